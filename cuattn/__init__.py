"""FlashAttention-class attention for NumPy and CuPy arrays, without torch."""

from cuattn import sampling
from cuattn._config import show_config
from cuattn.attention import (
    flash_attention,
    flash_attention_varlen,
    scaled_dot_product_attention,
)

__version__ = "0.1.0"

__all__ = [
    "flash_attention",
    "flash_attention_varlen",
    "sampling",
    "scaled_dot_product_attention",
    "show_config",
]
