"""Llama-architecture language models from GGUF files, with every attention done by cuattn.

From top to bottom: a checkpoint, its tokenizer, the model. The same code runs on NumPy and on CuPy:
`xp` is the one or the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

import cuattn

# ---------------------------------------------------------------------------------- checkpoint


class Layer(NamedTuple):
    """Weights of one layer; a matrix is (features in, features out)."""

    attn_norm: Any
    attn_qkv: Any  # query heads, key heads, value heads, side by side
    attn_output: Any
    ffn_norm: Any
    ffn_gate_up: Any  # gate and up, side by side
    ffn_down: Any


FUSED = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_gate_up": ("ffn_gate", "ffn_up")}


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Metadata of a GGUF file, and its weights, quantised or not, as float32."""
    from gguf import GGUFReader, dequantize
    from tqdm import tqdm

    reader = GGUFReader(path)
    fields = reader.fields.items()
    metadata = {name: field.contents() for name, field in fields if not name.startswith("GGUF.")}
    if (architecture := metadata["general.architecture"]) != "llama":
        raise ValueError(f"architecture {architecture!r}; this example knows 'llama'")

    tensors = {tensor.name.removesuffix(".weight"): tensor for tensor in reader.tensors}
    names = {name: (name,) for name in ("token_embd", "output", "output_norm") if name in tensors}
    for block in range(metadata["llama.block_count"]):
        for name in Layer._fields:
            parts = FUSED.get(name, (name,))
            names[f"blk.{block}.{name}"] = tuple(f"blk.{block}.{part}" for part in parts)
    if unknown := tensors.keys() - {part for parts in names.values() for part in parts}:
        raise ValueError(f"tensors a plain Llama has not: {', '.join(sorted(unknown))}")

    weights = {}
    for name, parts in tqdm(names.items(), desc=f"Reading {path.name}", leave=False):
        found = (tensors[part] for part in parts)
        weight = np.concatenate([dequantize(part.data, part.tensor_type) for part in found]).T
        # One token's step runs at the speed of memory, and BLAS is fastest along the longer axis.
        narrows = weight.ndim == 2 and weight.shape[0] > weight.shape[1]
        weights[name] = weight if narrows else np.ascontiguousarray(weight)
    return metadata, weights


def save(path: Path, metadata: dict[str, Any], weights: dict[str, np.ndarray]) -> None:
    """Save a checkpoint as it lies in memory: `load` is many times faster than `read_gguf`."""
    header = json.dumps([metadata, list(weights)]).encode()
    with open(path, "wb") as file:
        for array in (np.frombuffer(header, np.uint8), *weights.values()):
            np.save(file, array)


def load(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Load what `save` wrote."""
    with open(path, "rb") as file:
        metadata, names = json.loads(np.load(file).tobytes())
        return metadata, {name: np.load(file) for name in names}


# ----------------------------------------------------------------------------------- tokenizer

# A byte-level vocabulary writes each byte as one visible character: itself where it is one, and
# else one of those from U+0100 on.
VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTES = {chr(byte): bytes([byte]) for byte in VISIBLE}
for hidden in sorted(set(range(256)) - set(VISIBLE)):
    BYTES[chr(256 + len(BYTES) - len(VISIBLE))] = bytes([hidden])

CONTROL = 3  # the type of tokens that are no text, such as <|im_end|>


class Tokenizer:
    """Text to token ids and back, as a GGUF file's vocabulary, merges and chat template say."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        def parameter(name: str, default: Any = None) -> Any:
            return metadata.get(f"tokenizer.ggml.{name}", default)

        kind = parameter("model"), parameter("pre", "default")
        if kind not in [("gpt2", pre) for pre in ("default", "gpt-2", "smollm")]:
            raise ValueError(f"tokenizer {kind}: this example knows GPT-2's way to split text")
        self.tokens = parameter("tokens")
        types = parameter("token_type", [])
        self.control = {i for i, token_type in enumerate(types) if token_type == CONTROL}
        self.bos = parameter("bos_token_id", 0)
        self.eos = parameter("eos_token_id")
        self.prefix = [self.bos] if parameter("add_bos_token") else []
        self.template = metadata.get("tokenizer.chat_template")
        vocabulary = {token: i for i, token in enumerate(self.tokens)}
        merges = [tuple(pair.split(" ")) for pair in parameter("merges", [])]
        self.bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
        self.bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.bpe.add_special_tokens([self.tokens[i] for i in sorted(self.control)])

    def encode(self, text: str) -> list[int]:
        """Ids of a text. One of no token at all gets the token that begins a text."""
        return self.prefix + self.bpe.encode(text).ids or [self.bos]

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of a conversation, up to where the assistant answers."""
        if self.template is None:
            raise ValueError("this model has no chat template: it continues texts only")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        template = environment.from_string(self.template)
        return self.bpe.encode(template.render(messages=messages, add_generation_prompt=True)).ids

    def utf8(self, ids: list[int]) -> bytes:
        """Text of ids, in UTF-8; a character may be spread over several."""
        text = "".join(self.tokens[i] for i in ids if i not in self.control)
        return b"".join(BYTES.get(char, char.encode()) for char in text)


# --------------------------------------------------------------------------------------- model

CHUNK = 2048  # a prompt is read so many tokens at a time, which bounds the memory it takes


class Llama:
    """A Llama model with its cache of keys and values.

    Parameters
    ----------
    metadata, weights
        A checkpoint, from `read_gguf` or `load`.
    xp : module
        ``numpy`` or ``cupy``: where the model runs.
    attention : callable
        Called as ``attention(q, k, v, causal=True)``, with arrays (tokens, heads, head_dim).
    """

    def __init__(
        self,
        metadata: dict[str, Any],
        weights: dict[str, np.ndarray],
        xp: ModuleType = np,
        attention: Callable[..., Any] = cuattn.flash_attention,
    ) -> None:
        def parameter(name: str, default: Any = None) -> Any:
            return metadata.get(f"llama.{name}", default)

        weights = {name: xp.asarray(weight) for name, weight in weights.items()}
        self.xp = xp
        self.attention = attention
        self.layers = [
            Layer(*(weights[f"blk.{block}.{name}"] for name in Layer._fields))
            for block in range(parameter("block_count"))
        ]
        self.embedding = weights["token_embd"].T
        self.output_norm = weights["output_norm"]
        self.output = weights.get("output", weights["token_embd"])
        self.heads = parameter("attention.head_count")
        self.heads_kv = parameter("attention.head_count_kv", self.heads)
        self.head_dim = parameter("embedding_length") // self.heads
        self.eps = parameter("attention.layer_norm_rms_epsilon")
        exponents = np.arange(0, self.head_dim, 2) / self.head_dim
        self.frequencies = xp.asarray(parameter("rope.freq_base", 1e4) ** -exponents, xp.float32)
        self.length = 0  # tokens in the cache
        self.cache = xp.empty((len(self.layers), 2, 0, self.heads_kv, self.head_dim), xp.float32)

    def __call__(self, ids: list[int]) -> Any:
        """Logits of the token after `ids`, which come after what is in the cache and join it."""
        for start in range(0, len(ids), CHUNK):
            x = self.read(ids[start : start + CHUNK])
        return self.rms_norm(x[-1:], self.output_norm)[0] @ self.output

    def read(self, ids: list[int]) -> Any:
        """Read `ids` into the cache. Returns what the last layer makes of them: (tokens,
        features)."""
        xp, start, stop = self.xp, self.length, self.length + len(ids)
        self.reserve(stop)
        positions = xp.arange(start, stop, dtype=xp.float32)
        rotation = xp.exp(1j * xp.multiply.outer(positions, self.frequencies))[:, None]

        x = xp.ascontiguousarray(self.embedding[xp.asarray(ids)])
        for layer, (k_cache, v_cache) in zip(self.layers, self.cache, strict=True):
            qkv = self.rms_norm(x, layer.attn_norm) @ layer.attn_qkv
            qkv = qkv.reshape(len(ids), -1, self.head_dim)
            qk = rotate(qkv[:, : -self.heads_kv], rotation)
            k_cache[start:stop] = qk[:, self.heads :]
            v_cache[start:stop] = qkv[:, -self.heads_kv :]
            # Causal is aligned to the last key: the last query sees the whole cache.
            heads = self.attention(qk[:, : self.heads], k_cache[:stop], v_cache[:stop], causal=True)
            x += heads.reshape(len(ids), -1) @ layer.attn_output

            gate, up = xp.split(self.rms_norm(x, layer.ffn_norm) @ layer.ffn_gate_up, 2, axis=1)
            x += (gate / (1 + xp.exp(-gate)) * up) @ layer.ffn_down
        self.length = stop
        return x

    def rms_norm(self, x: Any, weight: Any) -> Any:
        """`x` scaled to a mean square of one, times `weight`."""
        mean_square = (x * x).mean(axis=1, keepdims=True)
        return x * (1 / self.xp.sqrt(mean_square + self.eps)) * weight

    def reserve(self, tokens: int) -> None:
        """Make room in the cache, and at least double it: so copying costs each token once or
        twice."""
        capacity = self.cache.shape[2]
        if tokens > capacity:
            shape = (*self.cache.shape[:2], max(tokens, 2 * capacity), *self.cache.shape[3:])
            grown = self.xp.empty(shape, self.xp.float32)
            grown[:, :, : self.length] = self.cache[:, :, : self.length]
            self.cache = grown


def rotate(x: Any, rotation: Any) -> Any:
    """Turn each pair of neighbours in `x` by an angle: as complex numbers, that is a product."""
    return (x.view(rotation.dtype) * rotation).view(x.dtype)
