"""Llama-architecture language models from GGUF files, with every attention done by cuattn.

From top to bottom: a checkpoint, its tokenizer, the model. The same code runs on NumPy and on CuPy:
`xp` is the one or the other.

A module of generate.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit(f"{__doc__}\nRun generate.py instead; --help lists its options.")

import json
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

PAGE_SIZE = 16  # tokens; what two texts have in common is shared by the page


class Pass(NamedTuple):
    """What a pass of the model reads and is asked for, in int32 arrays."""

    ids: Any  # (total,): new tokens, sequence by sequence
    owners: Any  # (total,): the place of each one's sequence in the batch
    cu_seqlens: Any  # (batch + 1,): where the tokens of each sequence begin
    last: Any  # (wanted,): the tokens whose logits are wanted
    cu_last: Any  # (batch + 1,): where those of each sequence begin


class Llama:
    """A Llama model. What it has read of each text is in a cache of its keys and values.

    Parameters
    ----------
    metadata, weights
        A checkpoint, from `read_gguf` or `load`.
    xp : module
        ``numpy`` or ``cupy``: where the model runs.
    """

    def __init__(
        self, metadata: dict[str, Any], weights: dict[str, np.ndarray], xp: ModuleType = np
    ) -> None:
        def parameter(name: str, default: Any = None) -> Any:
            return metadata.get(f"llama.{name}", default)

        weights = {name: xp.asarray(weight) for name, weight in weights.items()}
        self.xp = xp
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
        exponents = np.arange(0, self.head_dim, 2) / self.head_dim
        self.frequencies = xp.asarray(parameter("rope.freq_base", 1e4) ** -exponents, xp.float32)

        # A GPU does each of these at once, and not operation by operation.
        fuse = getattr(xp, "fuse", lambda function: function)
        size, eps = parameter("embedding_length"), parameter("attention.layer_norm_rms_epsilon")

        @fuse
        def sum_of_squares(x: Any) -> Any:
            return xp.sum(x * x, axis=1)

        @fuse
        def scale(x: Any, squares: Any, weight: Any) -> Any:
            return x / xp.sqrt(squares / size + eps) * weight

        @fuse
        def swiglu(gate: Any, up: Any) -> Any:
            return gate / (1 + xp.exp(-gate)) * up

        self.sum_of_squares, self.scale, self.swiglu = sum_of_squares, scale, swiglu

    def cache(
        self,
        num_tokens: int,
        dtype: Any = np.float32,
        quantization: str | cuattn.KVQuantization | None = None,
    ) -> cuattn.PagedKVCache:
        """A cache for so many tokens, of all texts together."""
        return cuattn.PagedKVCache(
            -(-num_tokens // PAGE_SIZE),
            PAGE_SIZE,
            self.heads_kv,
            self.head_dim,
            num_layers=len(self.layers),
            dtype=dtype,
            quantization=quantization,
            xp=self.xp,
        )

    def __call__(
        self,
        cache: cuattn.PagedKVCache,
        sequences: list[int],
        new: list[list[int]],
        wanted: list[int],
    ) -> Any:
        """Read new tokens of some sequences, in one pass, into the cache.

        Parameters
        ----------
        cache, sequences
            The cache, and the sequences' ids in it.
        new
            Each sequence's new tokens: part of a prompt, the token that was last chosen, or a few.
        wanted
            Of how many of each sequence's tokens, its last ones, the logits are wanted.

        Returns
        -------
        array (sum(wanted), vocabulary)
            Logits of what comes after each of the wanted tokens.

        Raises
        ------
        MemoryError
            The cache has not enough pages left. After this or any other error the cache has the
            tokens it had before.
        """
        counts = [len(tokens) for tokens in new]
        cu_seqlens, cu_last = (np.append(0, np.cumsum(each)) for each in (counts, wanted))
        ends = zip(cu_seqlens[1:], wanted, strict=True)
        step = Pass(
            np.concatenate(new),
            np.repeat(np.arange(len(counts)), counts),
            cu_seqlens,
            np.concatenate([np.arange(end - n, end) for end, n in ends]),
            cu_last,
        )
        cache.extend(sequences, counts, tokens=step.ids)
        step = Pass(*(array.astype(np.int32) for array in step))
        try:
            return self.run(cache, sequences, step) @ self.output
        except BaseException:  # the next pass begins where this one did
            cache.rollback(sequences)
            raise

    def run(self, cache: cuattn.PagedKVCache, sequences: list[int], step: Pass) -> Any:
        """`forward`, given host arrays."""
        return self.forward(cache, sequences, Pass(*map(self.xp.asarray, step)))

    def forward(self, cache: cuattn.PagedKVCache, sequences: list[int], step: Pass) -> Any:
        """The features of the tokens whose logits are wanted, (wanted, hidden size)."""
        ids, owners, cu_seqlens, last, cu_last = step
        xp, heads_kv = self.xp, self.heads_kv
        page_table, seq_lens = cache.page_table(sequences), cache.seq_lens(sequences)
        positions = xp.arange(len(ids)) + (seq_lens - cu_seqlens[1:])[owners]
        angles = xp.multiply.outer(positions.astype(xp.float32), self.frequencies)
        rotation = xp.exp(1j * angles)[:, None]

        x = xp.ascontiguousarray(self.embedding[ids])
        for i, layer in enumerate(self.layers):
            qkv = self.matmul(self.rms_norm(x, layer.attn_norm), layer.attn_qkv)
            qkv = qkv.reshape(len(ids), -1, self.head_dim)
            rotate(qkv[:, :-heads_kv], rotation)
            qkv = qkv.astype(cache.dtype, copy=False)
            q, k, v = qkv[:, : self.heads], qkv[:, self.heads : -heads_kv], qkv[:, -heads_kv:]
            cache.write(i, sequences, k, v)
            if i == len(self.layers) - 1 and len(last) < len(ids):
                x, q, cu_seqlens = x[last], q[last], cu_last
            heads = cuattn.paged_attention(
                q, *cache.pages(i), page_table, seq_lens, cu_seqlens_q=cu_seqlens
            )
            heads = heads.reshape(len(x), self.heads * self.head_dim)
            self.add_matmul(x, heads.astype(x.dtype, copy=False), layer.attn_output)

            gate_up = self.matmul(self.rms_norm(x, layer.ffn_norm), layer.ffn_gate_up)
            half = len(layer.ffn_down)
            swiglu = self.swiglu(gate_up[:, :half], gate_up[:, half:])
            self.add_matmul(x, swiglu, layer.ffn_down)
        return self.rms_norm(x, self.output_norm)

    def matmul(self, x: Any, weight: Any) -> Any:
        """`x` times a matrix of weights."""
        return x @ weight

    def add_matmul(self, out: Any, x: Any, weight: Any) -> None:
        """The same, added to `out`."""
        out += x @ weight

    def rms_norm(self, x: Any, weight: Any) -> Any:
        """`x` scaled to a mean square of one, times `weight`."""
        return self.scale(x, self.sum_of_squares(x)[:, None], weight)


def rotate(x: Any, rotation: Any) -> None:
    """Turn each pair of neighbours in `x` by an angle: as complex numbers, that is a product."""
    pairs = x.view(rotation.dtype)
    pairs *= rotation
