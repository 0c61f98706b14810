"""Recorded results -> what is worth keeping of them: one line for each case.

pytest-benchmark writes every round, its options and a dozen statistics. ``benchmarks/conftest.py``
rewrites each file of ``--benchmark-json`` with what the report reads: the case and its parameters,
the median time of a launch, and the figures that the benchmark noted, beside the machine, the
versions, the date and the commit of the run. ``python -m benchmarks.slim FILE…`` does the same for
files that were written otherwise.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

#: Figures keep this many significant digits, far more than they are worth, so that a table made of
#: a file that was rewritten later shows the same figures.
DIGITS = 9


def slim(run: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a run. A run that is slim already comes back as it is."""
    return {
        "datetime": run["datetime"],
        "commit_info": run["commit_info"],
        "machine_info": run["machine_info"],
        "benchmarks": [_case(benchmark) for benchmark in run["benchmarks"]],
    }


def _case(benchmark: dict[str, Any]) -> dict[str, Any]:
    median = benchmark["stats"]["median"] if "stats" in benchmark else benchmark["median_s"]
    return {
        "group": benchmark["group"],
        "fullname": benchmark["fullname"],
        "params": benchmark["params"],
        "median_s": _rounded(median),
        "extra_info": _rounded(benchmark["extra_info"]),
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value


def dumps(run: dict[str, Any]) -> str:
    """A run as JSON, each case on a line of its own."""

    def line(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    head = [f"{line(name)}: {line(run[name])}" for name in run if name != "benchmarks"]
    cases = ",\n".join(line(case) for case in run["benchmarks"])
    return "{\n" + ",\n".join([*head, f'"benchmarks": [\n{cases}\n]']) + "\n}\n"


def rewrite(file: pathlib.Path) -> None:
    """Replace a results file by what is kept of it."""
    run = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(dumps(slim(run)), encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    """Rewrite the named files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slim", description=__doc__)
    parser.add_argument("results", nargs="+", type=pathlib.Path, help="files of --benchmark-json")
    for file in parser.parse_args(argv).results:
        rewrite(file)


if __name__ == "__main__":
    main()
