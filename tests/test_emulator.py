"""Every kernel runs without a GPU: a few GPU tests, in the emulator."""

from __future__ import annotations

import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from cuattn.gpu import dispatch

ROOT = pathlib.Path(__file__).parents[1]

#: Small ones, which launch every kernel between them.
TESTS = (
    "test_attention_calls.py::test_no_batch_axis",
    "test_attention_calls.py::test_out_across_an_input[sm90-1]",
    "test_gradients_nonfinite.py::test_very_low_scores",
    "test_gradients.py::test_empty",
    "test_gradients.py::test_captured_in_a_graph",
    "test_gradients.py::test_aligned_bias_and_mask[sm80-bfloat16]",
    "test_gradients.py::test_aligned_small_scale[sm80-{'softcap': 0.1}]",
    "test_gradients.py::test_aligned_common_calls[sm80-bfloat16-head_dims0-full]",
    "test_gradients.py::test_aligned_common_calls[sm90-bfloat16-head_dims0-causal]",
    "test_gradients.py::test_aligned_common_calls[sm90-bfloat16-head_dims2-causal]",
    "test_gradients.py::test_wide_sequences_alone_and_in_a_batch[float16-4-{'causal': True}]",
    "test_gradients.py::test_aligned_common_calls[sm90-bfloat16-head_dims3-full]",
    "test_gradients.py::test_aligned_deterministic_calls[sm90-64-(8, 8)-seqlens0-far]",
    "test_gradients.py::test_aligned_deterministic_calls[sm90-128-(8, 4)-seqlens2-causal]",
    "test_gradients_dropout.py::test_gradients_drop_what_numpy_drops[sm90-bfloat16-(130, 250)-64]",
    "test_jvp.py::test_jvp_ignores_hidden_values",
    "test_decoding.py::test_a_page_that_does_not_exist_disturbs_nobody_else",
    "test_decoding.py::test_merge[2-float16]",
    "test_decoding.py::test_several_tiles_of_rows[sm90-lens0-1-1-48-64]",
    "test_quantized_decoding.py::test_rows[codes_sm90-8-1-64-paged-int4/int4]",
    "test_quantized_decoding.py::test_four_heads_of_a_block_with_several_splits[2]",
    "test_quantized_decoding.py::test_prompts_rotate_queries_instead_of_keys[64-int8]",
    "test_codes_prompts.py::test_few_queries_of_a_group_that_does_not_fill_its_rows",
    "test_mla.py::test_every_page_size[mla_sm90-256-True]",
    "test_mla.py::test_every_width[mla_sm80-widths0]",
    "test_mla.py::test_sparse[mla_sm90-16-3]",
    "test_mla.py::test_tiles_of_80_rows[window-16-5-lens3]",
    "test_mla.py::test_prefill[float16-False]",
    "test_mla_codes.py::test_every_format[mla_codes-int8-bfloat16]",
    "test_mla_codes.py::test_splits[mla_codes-24-3]",
    "test_mla_codes.py::test_splits[mla_codes, large tiles-128-3]",
    "test_split.py::test_into_an_array_of_any_strides",
    "test_split.py::test_a_captured_call_counts_the_parts_of_each_replay",
    "test_fixed_splits.py::test_ragged_rows[int4-(3, 1, 1, 1, 1)]",
    "test_fixed_splits.py::test_ragged_rows[-(4, 60)]",
    "test_fixed_splits.py::test_prefix[True-arrays]",
    "test_fixed_splits.py::test_latents_in_many_parts[9700]",
    "test_fixed_splits.py::test_ragged_rows_over_latents[int8]",
    "test_append_kv.py::test_places_that_do_not_exist_are_not_written",
    "test_kvcache.py::test_host_memory_and_files[float16]",
    "test_quantization.py::test_a_cache_goes_on_where_another_was",
    "test_quantization.py::test_the_bits_of_numpy[34-float32]",
    "test_quantization.py::test_scales_of_subnormal_numbers[float32-tensor]",
    "test_sampling.py::test_parameters_on_the_device_are_clamped",
    "test_sampling.py::test_filters_keep_what_numpy_keeps[129-top_k50]",
    "test_sampling.py::test_penalties_are_those_of_numpy[float16]",
    "test_sampling.py::test_softmax[2-float16]",
    "test_sampling.py::test_speculation_is_that_of_numpy[40-chain]",
    "test_sampling.py::test_arrays_of_other_libraries",
    "test_positions.py::test_scalings",
    "test_random_calls.py::test_random_calls[flash_decode-0]",
    "test_random_calls.py::test_random_calls[paged_attention-0]",
    "test_random_calls.py::test_random_calls[scaled_dot_product_attention-0]",
    "test_random_calls.py::test_random_calls[rope-0]",
)

#: The same on Ampere, for which some headers have text of their own.
AMPERE_TESTS = (
    "test_quantization.py::test_rows_of_one_sign[False-float32]",
    "test_quantization.py::test_scales_of_subnormal_numbers[float64-head]",
    "test_random_calls.py::test_random_calls[flash_attention-0]",
    "test_random_calls.py::test_random_calls[flash_attention_backward-0]",
    "test_random_calls.py::test_random_calls[flash_attention_jvp-0]",
    "test_random_calls.py::test_random_calls[flash_decode-0]",
    "test_random_calls.py::test_random_calls[paged_attention-0]",
    "test_random_calls.py::test_random_calls[mla_decode-0]",
    "test_random_calls.py::test_random_calls[quantize-0]",
    "test_random_calls.py::test_random_calls[append_kv-0]",
    "test_random_calls.py::test_random_calls[sample-0]",
)


@functools.cache
def missing() -> str:
    """Why the emulator cannot run here; empty where it can."""
    if not sys.platform.startswith("linux"):
        return "the emulator needs Linux"
    if shutil.which(os.environ.get("CXX") or "g++") is None:
        return "the emulator needs g++"
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        return f"NVRTC is not available: {error}"
    return ""


def emulate(*tests: str, options: str = "") -> tuple[str, dict[str, int]]:
    """Run GPU tests in a process of their own: its last lines, which say how they went, and how
    often it launched each kernel."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"),
            *("-m", "gpu", "--emulate", f"--emulate-options={options}", "--random-seed=1", *tests),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-10000:] + done.stderr[-2000:]
    launches = re.search(r"^emulated launches: (.*)$", done.stdout, re.MULTILINE)
    counts = (entry.rsplit(" ", 1) for entry in launches[1].split(", "))
    return done.stdout[-300:], {name: int(count) for name, count in counts}


needs_emulator = pytest.mark.skipif(bool(missing()), reason=missing())


@needs_emulator
def test_every_kernel_runs():
    """With copies and products as late as waits allow, and warps in an order of their own; without
    a race in shared memory."""
    _, launches = emulate(*(f"tests/gpu/{test}" for test in TESTS), options="late=1 seed=1 races=1")
    missed = {variant.entry for variant in dispatch.variants("sm_90a")} - launches.keys()
    assert not missed, f"{', '.join(sorted(missed))}: no test of TESTS launches these kernels"


@needs_emulator
def test_kernels_run_as_on_ampere():
    options = "sm_80 late=1 seed=1 races=1"
    emulate(*(f"tests/gpu/{test}" for test in AMPERE_TESTS), options=options)


@needs_emulator
def test_the_emulator_s_instructions():
    last, _ = emulate("tests/emulator", "tests/gpu/test_ptx.py")
    assert " skipped" not in last
