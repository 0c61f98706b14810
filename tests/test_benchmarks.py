"""What is kept of recorded figures, and their report: its numbers, its bold face, and where it
goes. What happens to contestants that fail."""

from __future__ import annotations

import itertools
import json
import sys
import types
import weakref

import numpy as np
import pytest

import cuattn
from benchmarks import checks, peers, report, slim, timing


def recorded(folder, name, date, speeds, commit="0123456789abcdef"):
    """A results file as pytest-benchmark writes it, with ``speeds[head_dim, seqlen, causal] =
    {name: TFLOP/s}``."""
    file = folder / f"{name}.json"
    benchmarks = [
        {
            "fullname": f"benchmarks/bench_attention.py::bench_forward[{shape}]",
            "group": "attention forward",
            "params": dict(zip(("head_dim", "seqlen", "causal"), shape, strict=True))
            | {"dtype": "bfloat16"},
            "extra_info": {"tflops": tflops, "matmul_tflops": 760.0, "copy_tb_per_s": 4.25},
        }
        for shape, tflops in speeds.items()
    ]
    host = {"microseconds": {"call": 9.0, "bare launch": 3.0}}
    benchmarks.append({"fullname": "host", "group": "host", "params": None, "extra_info": host})
    machine = {
        "gpu": "GPU X",
        "driver": "580.1",
        "nvrtc": "13.0",
        "cupy": "14.2.0",
        "torch": "2.11",
    }
    run = {
        "datetime": f"{date}T00:00:00",
        "machine_info": machine,
        "commit_info": {"id": commit},
        "benchmarks": benchmarks,
    }
    file.write_text(json.dumps(run), encoding="utf-8")
    return file


@pytest.fixture
def results(tmp_path):
    return [
        recorded(
            tmp_path,
            "first",
            "2026-01-01",
            {
                (64, 512, False): {"cuattn": 100.0, "FA-2": 200.0},
                (64, 512, True): {"cuattn": 150.0, "FA-2": 100.0},
            },
        ),
        recorded(
            tmp_path,
            "second",
            "2026-01-02",
            {(64, 512, False): {"cuattn": 300.0, "FA-2": 200.0}},
            commit="fedcba9876543210",
        ),
    ]


def test_the_last_figure_of_a_shape_counts(results):
    records = report.load(reversed(results), "attention forward")
    speeds = {r["causal"]: r["tflops"]["cuattn"] for r in records}
    assert speeds == {False: 300.0, True: 150.0}


def test_report_compares_and_says_where_the_figures_come_from(results, capsys):
    report.main([str(file) for file in results])
    text = capsys.readouterr().out
    lines = text.splitlines()
    first = lines.index("| head_dim | mask | seqlen | cuattn | FA-2 |")
    assert lines[first + 2] == "| 64 | full | 512 | **300** | 200 |"
    assert lines[first + 3] == "| 64 | causal | 512 | **150** | 100 |"
    # 300 / 200 and 150 / 100
    assert (
        "over FA-2's: 1.50× in the geometric mean of 2 shapes, 1.50× at least, 1.50× at most"
        in text
    )
    assert "A call takes the host 9.0 µs; the bare launch of an empty kernel takes 3.0 µs (" in text
    for part in ("GPU X", "driver 580.1", "torch 2.11", "2026-01-01, commit 0123456789"):
        assert part in text
    assert "2026-01-02, commit fedcba9876" in text


def test_a_tier_is_compared_under_its_name():
    records = [{"tflops": {"cuattn": 1.0, "FA-2": 2.0}}, {"tflops": {"cuattn": 8.0, "FA-2": 1.0}}]
    (line,) = report.comparison(records, "The sm80 tier")
    assert line == (
        "- The sm80 tier's speed over FA-2's: 2.00× in the geometric mean of 2 shapes, "
        "0.50× at least, 8.00× at most."
    )


def test_the_host_has_a_line_for_each_benchmark():
    when = {"date": "2026-01-01", "commit": "0123456789abcdef"}
    records = [
        {"sampler_microseconds": {"joint": 15.6, "greedy": 8.2}, **when},
        {"compiling_ms": 900.0, "cached_ms": 30.0, **when},
        {"compiling_ms": 30.0, "cached_ms": 31.0, **when},
    ]
    samplers, first = report.host(records)
    assert samplers.endswith("in µs: joint 16, greedy 8 (2026-01-01, commit 0123456789).")
    assert "900 ms" in first


def test_a_line_on_the_cpu():
    machine = {"machine": {"cpu": "CPU Y, 2 cores"}, "date": "2026-01-01"}
    records = [
        {"causal": True, "seqlen": 64, "gflops": {"cuattn": 3.0, "torch": 4.0}, **machine},
        {"causal": False, "seqlen": 64, "gflops": {"cuattn": 1.0, "torch": 2.0}, **machine},
    ]
    (line,) = report.cpu(records)
    assert "full 64: cuattn 1, torch 2; causal 64: cuattn 3, torch 4 (CPU Y, 2 cores;" in line


def test_quantized_caches_have_a_column_for_each_format():
    record = {
        "heads": [32, 8, 128],
        "shape": [1, 64],
        "page_size": 16,
        "microseconds": {"bfloat16": 4.0, "int8": 2.0},
        "of_copy": {"bfloat16": 1.0, "int8": 0.97},
    }
    assert report.quantized([record, record | {"page_size": 0}]).splitlines() == [
        "| heads, head_dim | sequences × keys | cache | bfloat16 | int8 |",
        "| --- | --- | --- | --- | --- |",
        "| 32/8, 128 | 1×64 | pages of 16 | 4.0 (100%) | 2.0 (97%) |",
        "| 32/8, 128 | 1×64 | contiguous | 4.0 (100%) | 2.0 (97%) |",
    ]


def test_prompts_over_codes_are_compared_with_pages_of_numbers():
    record = {
        "chunk": [512, 8192, 1],
        "heads": [32, 8],
        "page_size": 16,
        "microseconds": {"bfloat16": 100.0, "int8": 110.0, "int4": 125.4},
    }
    assert report.prompts_over_codes([record]).splitlines() == [
        "| tokens over keys | heads | pages of | bfloat16 | int8 | int4 |",
        "| --- | --- | --- | --- | --- | --- |",
        "| 1 × 512 over 8192 | 32/8 | 16 | 100 | 1.10 | 1.25 |",
    ]


def test_decoding_has_a_row_for_each_shape():
    records = [
        {
            "heads": [32, 8, 128],
            "shape": [1, 64],
            "microseconds": {"cuattn": 2.0, "cuDNN": 4.0},
            "of_copy": {"cuattn": 1.0, "cuDNN": 0.5},
        },
        {
            "heads": [32, 8, 128],
            "shape": [2, 64],
            "microseconds": {"cuattn": 3.0},
            "of_copy": {"cuattn": 0.75},
        },
        {"tokens": 4, "microseconds": {"cuattn": 9.0}, "of_copy": {"cuattn": 0.1}},
    ]
    assert report.decoding(records).splitlines() == [
        "| sequences × keys | cuattn | cuDNN |",
        "| --- | --- | --- |",
        "| 1 × 64 | 2.0 (100%) | 4.0 (50%) |",
        "| 2 × 64 | 3.0 (75%) |  |",
    ]


def test_sampling_has_peaked_and_flat_in_a_cell():
    records = [
        {
            "operation": "greedy",
            "vocab": vocab,
            "dtype": dtype,
            "batch": batch,
            "rows": rows,
            "microseconds": {"cuattn": batch + spread, "torch": 9 * batch + spread},
            "read_microseconds": batch / 2,
        }
        for vocab in (8, 128256)
        for dtype in ("bfloat16", "float32")
        for batch in (4, 2)
        for rows, spread in (("flat", 1.0), ("peaked", 4.0))
    ]
    assert report.sampling(records).splitlines() == [
        "| rows | cuattn: 2 | cuattn: 4 | torch: 4 |",
        "| --- | --- | --- | --- |",
        "| greedy | 6.0 / 3.0 | 8.0 / 5.0 | 40.0 / 37.0 |",
        "| one read | 1.0 | 2.0 |  |",
    ]


def test_options_of_gradients_are_compared_with_the_peer_that_has_them():
    def record(option, causal, **rates):
        known = {"of_plain": 0.97, "tflops_of_tiles": {"cuattn": 500.0, "plain": 515.0, **rates}}
        return {"option": option, "head_dim": 128, "causal": causal, **known}

    records = [record("GQA", False, **{"FA-3": 400.0}), record("192/128", True)]
    assert report.gradient_options(records).splitlines() == [
        "| option | head_dim 128 | head_dim 128, causal |",
        "| --- | --- | --- |",
        "| GQA | 97% (1.25) |  |",
        "| 192/128 |  | 97% |",
    ]


def test_options_are_per_cent_of_the_plain_call():
    records = [
        {"option": option, "head_dim": head_dim, "seqlen": 8192, "of_plain": of_plain}
        for option, head_dim, of_plain in (("causal", 64, 0.9), ("bias", 64, 0.5), ("bias", 128, 1))
    ]
    assert report.options(records).splitlines() == [
        "| option | head_dim 64, 8192 tokens | head_dim 128, 8192 tokens |",
        "| --- | --- | --- |",
        "| causal | 90% |  |",
        "| bias | 50% | 100% |",
    ]


def test_a_missing_peer_leaves_its_cell_empty(tmp_path):
    speeds = {(64, 512, False): {"cuattn": 1.0, "FA-3": 2.0}, (64, 1024, False): {"cuattn": 1.0}}
    file = recorded(tmp_path, "run", "2026-01-01", speeds)
    text = report.table(report.load([file], "attention forward"))
    assert "| 64 | full | 512 | 1 | **2** |" in text
    assert "| 64 | full | 1024 | **1** |  |" in text


def test_random_shapes_name_the_worst():
    def drawn(kind, of_best, **shape):
        return {
            "group": f"random {kind} shapes", "seed": 7, "of_best": of_best, "shape": shape
        }  # fmt: skip

    records = [drawn("forward", 4.0, seqlen=3), drawn("forward", 0.25, seqlen=5)]
    records += [drawn("decoding", 2.0, length=9), drawn("decoding", None, length=8)]
    assert report.random_shapes([*records, drawn("latent", 0.5, length=7)]).splitlines() == [
        "- forward attention, seed 7: 1.00× in the geometric mean of the 2 shapes that a peer "
        "serves, 0.25× at least (seqlen 5).",
        "- decoding, seed 7: 2.00× in the geometric mean of the 1 shapes that a peer serves, "
        "2.00× at least (length 9).",
        "- latents, seed 7: 0.50× in the geometric mean of the 1 shapes that a peer serves, "
        "0.50× at least (length 7).",
    ]


def test_write_puts_table_and_pictures_in_their_places(results, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n", encoding="utf-8")
    for _ in range(2):  # writing again changes nothing
        report.main(["--write", *map(str, results)])
        page = readme.read_text(encoding="utf-8")
        assert page.startswith(f"before\n{report.BEGIN}\nTFLOP/s of forward attention:\n")
        assert page.endswith(f"\n{report.END}\nafter\n")
        assert page.count("| 64 | full | 512 |") == 1
        assert "old" not in page
        documentation = (tmp_path / report.PAGE).read_text(encoding="utf-8")
        assert documentation.count("| 64 | full | 512 |") == 1
        assert "A call takes the host 9.0 µs" in documentation
        assert "](images/attention_forward.png)" in documentation
    assert (tmp_path / report.IMAGES / "attention.png").read_bytes().startswith(b"\x89PNG")


def test_the_documentation_shows_what_is_recorded(capsys):
    report.main([])
    text = capsys.readouterr().out
    assert text in (report.ROOT / report.PAGE).read_text(encoding="utf-8")


def test_the_readme_has_a_place_for_the_report():
    page = (report.ROOT / "README.md").read_text(encoding="utf-8")
    assert page.count(report.BEGIN) == page.count(report.END) == 1
    assert page.count(report.markdown("attention.png", "README.md")) == 1


def test_no_figures_is_an_error(tmp_path, capsys):
    file = recorded(tmp_path, "empty", "2026-01-01", {})
    with pytest.raises(SystemExit):
        report.main([str(file)])
    assert "no recorded figures" in capsys.readouterr().err


def test_slim_keeps_what_the_report_reads(tmp_path, capsys):
    file = recorded(tmp_path, "run", "2026-01-01", {(64, 512, False): {"cuattn": 1 / 3}})
    run = json.loads(file.read_text(encoding="utf-8"))
    for benchmark in run["benchmarks"]:
        benchmark |= {"name": "bench", "options": {"warmup": False}}
        benchmark["stats"] = {"median": 2 / 3, "rounds": 9, "data": [0.5] * 9}
    file.write_text(json.dumps(run, indent=4), encoding="utf-8")
    report.main([str(file)])
    before = capsys.readouterr().out
    for _ in range(2):  # a slim file stays as it is
        slim.main([str(file)])
        report.main([str(file)])
        assert capsys.readouterr().out == before
        text = file.read_text(encoding="utf-8")
        assert len(text.splitlines()) == 7 + len(run["benchmarks"])
        assert '"median_s": 0.666666667' in text
        assert "options" not in text
        assert "rounds" not in text


def test_recorded_results_are_slim():
    for file in report.RESULTS.glob("*.json"):
        text = file.read_text(encoding="utf-8")
        assert text == slim.dumps(slim.slim(json.loads(text))), file.name


@pytest.mark.parametrize("causal", [False, True])
def test_rows_by_the_definition_tell_wrong_results(causal, rng):
    q = rng.standard_normal((2, 30, 4, 16)).astype(np.float32)
    k, v = (rng.standard_normal((2, 50, 2, 16)).astype(np.float32) for _ in "kv")
    out = cuattn.flash_attention(q, k, v, causal=causal)
    rows = list(checks.rows_of_batch(rng, q, k, v, causal=causal))
    assert len(rows) == checks.ROWS
    assert checks.largest_difference(out, rows) < 1e-5
    for wrong in (out * 1.1, np.full_like(out, np.nan), np.zeros_like(out)):
        assert checks.largest_difference(wrong, rows) > 2e-2

    lengths_q, lengths_k = np.array([12, 0, 5, 43]), np.array([12, 3, 20, 65])
    q = rng.standard_normal((60, 4, 16)).astype(np.float32)
    k, v = (rng.standard_normal((100, 2, 16)).astype(np.float32) for _ in "kv")
    ends = (np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (lengths_q, lengths_k))
    out = cuattn.flash_attention_varlen(q, k, v, *ends, causal=causal)
    rows = list(checks.rows_of_varlen(rng, q, k, v, lengths_q, lengths_k, causal=causal))
    assert rows
    assert checks.largest_difference(out, rows) < 1e-5
    assert checks.largest_difference(out * 1.1, rows) > 2e-2


class Pedantic:
    """Of pytest-benchmark what `timing.race` calls."""

    @staticmethod
    def pedantic(call, *, rounds, warmup_rounds):
        for _ in range(warmup_rounds + rounds):
            call()


def contestant(name, seconds, fails_at=None, result=None):
    """One that takes `seconds` a launch, and raises an error in call `fails_at` of its timer."""
    calls = itertools.count()

    def timer(run, launches):
        if next(calls) == fails_at:
            raise MemoryError(f"of {name}\nin the second line more")
        run(launches)
        return launches * seconds

    return timing.Contestant(name, lambda launches: result, timer)


def test_who_fails_in_a_race_is_left_out():
    """At the first launches, or in a later round; the first contestant's errors are raised."""
    left_out = {}
    contestants = [
        contestant("ours", 2e-3),
        contestant("early", 1e-3, fails_at=0),
        contestant("late", 1e-3, fails_at=5),
        contestant("theirs", 3e-3),
    ]
    seconds = timing.race(Pedantic, contestants, rounds=5, left_out=left_out)
    assert seconds == pytest.approx({"ours": 2e-3, "theirs": 3e-3})
    assert left_out == {"early": "MemoryError: of early", "late": "MemoryError: of late"}
    for first in (0, 5):
        failing = [contestant("ours", 1e-3, fails_at=first), contestant("theirs", 1e-3)]
        with pytest.raises(MemoryError):
            timing.race(Pedantic, failing, left_out=left_out)
        with pytest.raises(MemoryError):
            timing.race(Pedantic, [contestant("a", 1e-3), contestant("b", 1e-3, fails_at=first)])
    assert len(left_out) == 2


def test_peers_whose_results_differ_are_left_out(rng):
    out = rng.standard_normal((3, 5, 2)).astype(np.float32)

    def fail(launches):
        raise RuntimeError("no kernel")

    others = [
        contestant("right", 1, result=out.ravel()),
        contestant("wrong", 1, result=1.1 * out),
        contestant("not a number", 1, result=np.full_like(out, np.nan)),
        contestant("of another size", 1, result=out[:2]),
        timing.Contestant("failing", fail),
    ]
    left_out = {"early": "was not made"}
    assert checks.agreeing(out, others, np.asarray, left_out) == others[:1]
    assert left_out.keys() == {"early", "wrong", "not a number", "of another size", "failing"}
    assert left_out["wrong"] == "differs by 1.0e-01"
    assert left_out["failing"] == "RuntimeError: no kernel"


def test_a_peer_that_cannot_be_made_is_named():
    left_out = {}
    made = [c for make in (lambda: len, lambda: 1 // 0) for c in peers._made("x", make, left_out)]
    assert [c.run for c in made] == [len]
    assert left_out == {"x": "ZeroDivisionError: integer division or modulo by zero"}


def test_what_a_failed_case_held_is_freed(monkeypatch):
    """pytest keeps its traceback, whose frames have the case's arrays."""

    class Array:
        pass

    def case():
        array = held.append(weakref.ref(kept := Array())) or kept
        raise MemoryError(array)

    held, pools = [], []
    try:
        case()
    except MemoryError as error:
        error.args = ()
        monkeypatch.setattr(sys, "last_traceback", error.__traceback__, raising=False)
    for name in ("torch", "jax", "cupy"):
        pool = types.SimpleNamespace(free_all_blocks=lambda name=name: pools.append(name))
        pool.empty_cache = pool.free_all_blocks
        module = types.SimpleNamespace(
            cuda=pool, clear_caches=pool.empty_cache, get_default_memory_pool=lambda pool=pool: pool
        )
        monkeypatch.setitem(sys.modules, name, module)
    assert held[0]() is not None
    peers.free_memory()
    assert held[0]() is None
    assert sorted(pools) == ["cupy", "jax", "torch"]
