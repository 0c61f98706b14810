"""Command line: ``python -m cuattn compile`` and ``python -m cuattn config``."""

from __future__ import annotations

import argparse
import pathlib
import re
import sys


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m cuattn", description="cuattn's own tools")
    commands = parser.add_subparsers(dest="command", required=True)
    compile_ = commands.add_parser(
        "compile",
        help="compile every kernel, report its resources, and warm the cache of this machine's GPU",
        description=(
            "Compile every kernel variant that can ever be chosen and print one row each: kernel, "
            "config, registers, shared memory, spills, milliseconds. Needs no GPU; where there is "
            "one of a named architecture, its kernel cache is filled as well. Exits 1 if a kernel "
            "does not compile, spills, or has a serialised instruction."
        ),
    )
    compile_.add_argument(
        "--arch",
        type=_architectures,
        help="comma-separated, such as sm_80,sm_90a,sm_120 (default: those of this machine's GPUs)",
    )
    compile_.add_argument(
        "--jobs", type=_count, help="processes to compile in (default: one a core of this machine)"
    )
    compile_.add_argument(
        "--digest",
        metavar="FILE",
        type=_file,
        help="write a digest of each variant's machine code; where FILE exists, compare with it",
    )
    commands.add_parser("config", help="print versions, devices, tiers and the kernel cache")
    arguments = parser.parse_args(argv)

    if arguments.command == "config":
        from cuattn import show_config

        show_config()
        return 0
    try:
        import cuda.bindings.nvrtc  # noqa: F401
    except ImportError as error:
        parser.exit(
            1, f"compile: {error}; in a checkout, pip install '.[cuda13]' brings the compiler\n"
        )
    from cuattn.gpu.report import compile_report

    return compile_report(arguments.arch, arguments.jobs, arguments.digest)


def _architectures(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if not re.fullmatch(r"sm_\d+[af]?", name):
            raise argparse.ArgumentTypeError(f"{name!r} is no architecture such as sm_90a")
    return names


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _file(text: str) -> str:
    """A file that is written at the end, after minutes."""
    path = pathlib.Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no file in a folder that is there")
    return text


if __name__ == "__main__":
    sys.exit(main())
