"""FlashAttention-class attention for NumPy and CuPy arrays, without torch."""

from cuattn import sampling
from cuattn._config import show_config
from cuattn.attention import (
    flash_attention,
    flash_attention_varlen,
    scaled_dot_product_attention,
)
from cuattn.decoding import flash_decode, merge_attention, paged_attention
from cuattn.gradients import (
    AttentionGrads,
    flash_attention_backward,
    flash_attention_jvp,
    flash_attention_varlen_backward,
    flash_attention_vjp,
)
from cuattn.kvcache import KVQuantization, PagedKVCache, append_kv
from cuattn.mla import flashmla_pages, mla_decode, mla_prefill
from cuattn.multihead import multi_head_attention
from cuattn.positions import rope
from cuattn.quantization import QuantizedArray, dequantize, quantize

__version__ = "0.1.0"

__all__ = [
    "AttentionGrads",
    "KVQuantization",
    "PagedKVCache",
    "QuantizedArray",
    "append_kv",
    "dequantize",
    "flash_attention",
    "flash_attention_backward",
    "flash_attention_jvp",
    "flash_attention_varlen",
    "flash_attention_varlen_backward",
    "flash_attention_vjp",
    "flash_decode",
    "flashmla_pages",
    "merge_attention",
    "mla_decode",
    "mla_prefill",
    "multi_head_attention",
    "paged_attention",
    "quantize",
    "rope",
    "sampling",
    "scaled_dot_product_attention",
    "show_config",
]
