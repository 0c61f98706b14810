"""FlashAttention-class attention for NumPy and CuPy arrays, without torch."""

from cuattn import sampling
from cuattn._config import show_config
from cuattn.attention import (
    flash_attention,
    flash_attention_varlen,
    scaled_dot_product_attention,
)
from cuattn.decoding import flash_decode, merge_attention, paged_attention
from cuattn.kvcache import PagedKVCache
from cuattn.multihead import multi_head_attention
from cuattn.positions import rope

__version__ = "0.1.0"

__all__ = [
    "PagedKVCache",
    "flash_attention",
    "flash_attention_varlen",
    "flash_decode",
    "merge_attention",
    "multi_head_attention",
    "paged_attention",
    "rope",
    "sampling",
    "scaled_dot_product_attention",
    "show_config",
]
