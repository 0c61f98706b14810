"""Every argument struct of the kernels in rawkernels/, declared as in CUDA.

:mod:`cuattn.gpu.arguments` says what their fields are for a call.
"""

from __future__ import annotations

from cuattn.gpu.structs import Struct

UNBOUNDED = 1 << 30  # kUnbounded of rawkernels/tile/visibility.cuh

FORWARD_PARAMS = Struct(
    "ForwardParams",
    ("const void*", "q k v"),
    ("void*", "out lse"),
    ("const void*", "bias"),
    ("const unsigned char*", "mask"),
    ("const void*", "alibi_slopes sinks"),
    ("const int*", "cu_seqlens_q cu_seqlens_k"),
    ("Strides", "q_stride k_stride v_stride out_stride"),
    ("ScoreStrides", "bias_stride mask_stride"),
    ("long long", "alibi_batch_stride"),
    ("double", "scale softcap"),
    ("int", "batch seqlen_q seqlen_k heads_q heads_kv head_dim head_dim_v"),
    ("int", "window_left window_right bias_is_float32 score_rows score_cols"),
    ("int", "group queries_of_64_rows"),
    ("unsigned", "group_magic"),
)

CACHE_PARAMS = Struct(
    "CacheParams",
    ("const int*", "page_table seq_lens"),
    ("long long", "table_stride"),
    ("int", "page_shift num_pages"),
)

SM90_PARAMS = Struct(
    "Sm90Params",
    ("ptx::TensorMap", "q k v bias mask k_pair v_pair"),
    ("Scheduler*", "scheduler"),
    ("unsigned long long", "launch_id"),
    ("int", "section"),
    ("float", "cap_scale score_scale scale_log2"),
    ("const int*", "page_table"),
    ("unsigned char", "page_shift box_shift"),
    ("bool", "bias_mapped mask_mapped pairs_of_boxes"),
    ("int", "num_splits"),
    ("const int*", "seq_lens"),
    ("int", "table_stride num_pages"),
    ("tile::Divisor", "by_queries_of_tile"),
    ("int", "min_queries blocks page_heads"),
    ("ptx::TensorMap", "q_rope k_rope"),
    scheduler="workspace",
    launch_id="launch_id",
)

CODE_SCALES = Struct(
    "CodeScales",
    ("const void*", "k_scale v_scale"),
    ("ScaleStrides", "k_scale_stride v_scale_stride"),
    ("int", "team ring_slots"),
)

DECODE_PARAMS = Struct(
    "DecodeParams",
    ("const void*", "q k v"),
    ("void*", "out lse"),
    ("const void*", "alibi_slopes sinks"),
    ("const int*", "page_table seq_lens cu_seqlens_q"),
    ("void*", "workspace"),
    ("unsigned long long", "launch_id"),
    ("Strides", "q_stride out_stride"),
    ("PageStrides", "k_stride v_stride"),
    ("long long", "table_stride alibi_batch_stride lse_batch_stride lse_head_stride"),
    ("double", "scale softcap"),
    ("int", "batch seqlen_q capacity heads_q heads_kv head_dim head_dim_v"),
    ("int", "window_left window_right page_shift num_pages first_key fixed_splits"),
    ("int", "kv_block_shift num_splits heads_per_block group group_shift"),
    ("unsigned", "group_magic"),
    ("int", "out_is_acc single_tile"),
    ("const void*", "k_scale k_minimum"),
    ("const float*", "k_offset"),
    ("const void*", "v_scale v_minimum"),
    ("const float*", "v_offset"),
    ("ScaleStrides", "k_scale_stride k_minimum_stride v_scale_stride v_minimum_stride"),
    ("int", "k_format v_format k_group v_group"),
    ("int", "k_scale_is_float v_scale_is_float k_rotated v_rotated"),
    ("int", "max_queries"),
    launch_id="launch_id",
)

MLA_PARAMS = Struct(
    "MlaParams",
    ("const void*", "q_rope rope"),
    ("const int*", "indices lengths cu_tokens"),
    ("void*", "parts"),
    ("unsigned long long", "call_id"),
    ("CombineTask*", "tasks"),
    ("Strides", "q_rope_stride"),
    ("PageStrides", "rope_stride"),
    ("long long", "index_stride"),
    ("int", "tokens sequences row_tiles window_left window_right capacity"),
    ("int", "query_rows key_rows merges_parts"),
    call_id="call_id",
)

SCORE_PARAMS = Struct(
    "ScoreParams",
    ("const void*", "bias"),
    ("const unsigned char*", "mask"),
    ("ScoreStrides", "bias_stride mask_stride"),
    ("int", "bias_is_float32 score_rows score_cols"),
)

TAKE_PARAMS = Struct(
    "TakeParams",
    ("const void*", "pages"),
    ("void*", "out"),
    ("const int*", "page_table seq_lens cu_seqlens_q"),
    ("long long", "page_stride slot_stride table_stride"),
    ("int", "total batch capacity page_shift num_pages vecs"),
)

DECODE_MAPS = Struct("Maps", ("ptx::TensorMap", "k v"))

MLA_MAPS = Struct("Maps", ("ptx::TensorMap", "latent rope q q_rope"))

MAX_PARTS = 32  # kMaxParts of rawkernels/decoding/merge.cu
MERGE_PARAMS = Struct(
    "MergeParams",
    (f"const void*[{MAX_PARTS}]", "outs lses"),
    ("void*", "out lse"),
    ("long long[3]", "out_stride lse_stride"),
    ("long long", "rows"),
    ("int", "middle inner head_dim_v parts packed"),
    ("long long", "out_part_stride lse_part_stride"),
    ("tile::Divisor", "by_vecs by_middle by_inner"),
)

CACHE_WRITE_PARAMS = Struct(
    "WriteParams",
    ("const void*", "k v"),
    ("void*", "k_pages v_pages"),
    ("const int*", "page_table seq_lens cu_new"),
    ("const void*", "cos sin"),
    ("long long", "k_token k_head v_token v_head"),
    ("PageStrides", "k_page v_page"),
    ("long long", "table_stride"),
    ("int", "total batch heads head_dim head_dim_v page_shift num_pages capacity uniform"),
    ("int", "lanes_shift pairs interleaved"),
    ("tile::Divisor", "by_uniform by_k_vecs by_v_vecs"),
    ("const int*", "slots left_padding"),
    ("int", "page_slots max_position"),
)

QUANTIZED_WRITE_PARAMS = Struct(
    "QuantizedWriteParams",
    ("void*", "k_scale k_minimum v_scale v_minimum"),
    ("const float*", "k_offset v_offset"),
    ("ScaleStrides", "k_scale_stride k_minimum_stride v_scale_stride v_minimum_stride"),
    ("int", "k_format v_format k_group v_group k_group_shift v_group_shift"),
    ("int", "k_scale_is_float v_scale_is_float k_rotated v_rotated k_is_static v_is_static"),
    ("tile::Divisor", "by_heads"),
)

QUANTIZE_PARAMS = Struct(
    "QuantizeParams",
    ("void*", "x codes scale minimum"),
    ("const float*", "offset"),
    ("const int*", "page_table seq_lens"),
    ("PageStrides", "x_stride codes_stride"),
    ("ScaleStrides", "scale_stride minimum_stride"),
    ("long long", "table_stride"),
    ("int", "rows tokens heads head_dim page_shift num_pages"),
    ("int", "format group group_shift scale_is_float rotated is_static"),
    ("tile::Divisor", "by_heads by_tokens"),
)

MAX_PAIRS = 256  # kMaxPairs of rawkernels/positions/rope.cu
ROPE_PARAMS = Struct(
    "RopeParams",
    ("const void*", "x"),
    ("void*", "out"),
    ("const void*", "positions"),
    ("long long", "x_batch x_seq x_head out_batch out_seq out_head"),
    ("long long", "position_batch position_seq"),
    ("double", "scale"),
    ("int", "tokens seqlen heads head_dim pairs heads_per_block lanes_shift interleaved wide"),
    (f"unsigned long long[{MAX_PAIRS}]", "turns"),
)

SAMPLE_PARAMS = Struct(
    "SampleParams",
    ("const void*", "logits"),
    ("int*", "tokens"),
    ("float*", "filtered"),
    ("void*", "top_values"),
    ("int*", "top_indices"),
    ("const PenalizedLogit*", "penalty_table"),
    ("long long", "row_stride"),
    ("RowSeeds", "seed"),
    ("RowValue<unsigned long long>", "offset"),
    ("RowValue<float>", "temperature top_p min_p typical_p"),
    ("RowValue<int>", "top_k"),
    ("int", "vocab top_count only_fallback kind table_bits"),
)

SOFTMAX_PARAMS = Struct(
    "SoftmaxParams",
    ("const void*", "logits"),
    ("float*", "probabilities"),
    ("const int*", "tokens"),
    ("float*", "log_probabilities"),
    ("long long", "row_stride"),
    ("RowValue<float>", "temperature"),
    ("int", "rows vocab num_tokens"),
)

PENALTY_PARAMS = Struct(
    "PenaltyParams",
    ("const int*", "tokens"),
    ("const float*", "bias"),
    ("const int*", "triple_rows triple_tokens"),
    ("const float*", "triple_values"),
    ("const void*", "allowed"),
    ("long long", "bias_stride allowed_stride"),
    ("RowValue<float>", "repetition frequency presence"),
    ("int", "length triples packed any"),
)

PENALIZE_PARAMS = Struct(
    "PenalizeParams",
    ("const void*", "logits"),
    ("void*", "out"),
    ("PenalizedLogit*", "penalty_table"),
    ("long long", "row_stride"),
    ("int", "vocab segment table_bits"),
)

SPECULATE_PARAMS = Struct(
    "SpeculateParams",
    ("const int*", "draft_tokens parents"),
    ("const float*", "draft_probs target_probs"),
    ("int*", "tokens accepted"),
    ("RowSeeds", "seed"),
    ("RowValue<unsigned long long>", "offset"),
    ("int", "drafts vocab"),
)

DROPOUT_PARAMS = Struct(
    "DropoutParams",
    ("unsigned long long", "seed"),
    ("double", "scale"),
    ("unsigned", "threshold"),
    seed="seed",
)

BACKWARD_PARAMS = Struct(
    "BackwardParams",
    ("const void*", "dout dlse"),
    ("void*", "dq dk dv delta dbias dsinks dalibi"),
    ("double*", "alibi_parts"),
    ("Strides", "dout_stride"),
    ("int", "bias_batch bias_heads bias_rows bias_cols"),
    ("int", "alibi_batched alibi_slots alibi_tile"),
    ("int*", "nonfinite"),
    ("float*", "dq_sums"),
)

SM90_BACKWARD_PARAMS = Struct(
    "Sm90BackwardParams",
    ("ptx::TensorMap", "q k v dout dk dv"),
    ("float*", "score_start dp_start dq_sums"),
    ("unsigned long long*", "opened"),
    ("int*", "next_tile"),
    ("int", "padded_q slots tiles section late group"),
    ("float", "scale_log2"),
)

JVP_PARAMS = Struct(
    "JvpParams",
    ("const void*", "tangent_q tangent_k tangent_v"),
    ("void*", "dout"),
    ("Strides", "tangent_q_stride tangent_k_stride tangent_v_stride"),
)

#: Every struct, and a kernel that takes it.
STRUCTS = {
    FORWARD_PARAMS: "attention/forward_simt.cu",
    CACHE_PARAMS: "attention/forward_sm80.cu",
    SM90_PARAMS: "attention/forward_sm90.cu",
    CODE_SCALES: "attention/forward_codes_sm90.cu",
    DECODE_PARAMS: "decoding/decode_simt.cu",
    SCORE_PARAMS: "decoding/decode_simt.cu",
    DECODE_MAPS: "decoding/decode_sm90.cu",
    MLA_PARAMS: "mla/combine.cu",
    MLA_MAPS: "mla/decode_sm90.cu",
    TAKE_PARAMS: "mla/take_tokens.cu",
    MERGE_PARAMS: "decoding/merge.cu",
    CACHE_WRITE_PARAMS: "kvcache/write.cu",
    QUANTIZED_WRITE_PARAMS: "kvcache/write_quantized.cu",
    QUANTIZE_PARAMS: "quantization/quantize.cu",
    ROPE_PARAMS: "positions/rope.cu",
    SAMPLE_PARAMS: "sampling/sample_unfiltered.cu",
    SOFTMAX_PARAMS: "sampling/softmax.cu",
    PENALTY_PARAMS: "sampling/penalize.cu",
    PENALIZE_PARAMS: "sampling/penalize.cu",
    SPECULATE_PARAMS: "sampling/speculate.cu",
    DROPOUT_PARAMS: "gradients/backward_simt.cu",
    BACKWARD_PARAMS: "gradients/backward_simt.cu",
    SM90_BACKWARD_PARAMS: "gradients/backward_sm90.cu",
    JVP_PARAMS: "gradients/jvp_simt.cu",
}


def divisor(d: int) -> tuple[int, int]:
    """A ``tile::Divisor``: (magic, shift) with ``n // d == n * magic >> shift`` for all n < 2**31
    (Granlund & Montgomery, 1994)."""
    shift = 31 + (d - 1).bit_length()
    return -(-(1 << shift) // d), shift
