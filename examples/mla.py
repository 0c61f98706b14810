"""Multi-head latent attention, as DeepSeek-V2 and V3 have it: a small model with random weights
that writes tokens over a paged cache of latents, and beside it the paper's formulas in plain NumPy.
"""

import argparse
import dataclasses

import numpy as np

import cuattn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--heads", type=int, default=8)
parser.add_argument("--prompt", type=int, default=200, help="tokens of the prompt")
parser.add_argument("--tokens", type=int, default=24, help="tokens to write")
args = parser.parse_args()
for name, value in vars(args).items():
    if value < 1:
        parser.error(f"--{name} is {value}, must be at least 1")

rng = np.random.default_rng(0)
HIDDEN, VOCABULARY = 256, 1000
NOPE, ROPE, VALUE, LATENT = 32, 16, 32, 64  # DeepSeek-V3: 128, 64, 128, 512
SCALE = (NOPE + ROPE) ** -0.5  # of the heads before absorption: latents are no measure of it
PAGE = 16


def weights(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape) / np.sqrt(shape[-1])


@dataclasses.dataclass
class Layer:
    """Weights of one layer; a head's rows are together."""

    w_q: np.ndarray  # hidden -> the heads' queries, what is not rotated and what is
    w_dkv: np.ndarray  # hidden -> a latent
    w_kr: np.ndarray  # hidden -> what is rotated of a key, the same for all heads
    w_uk: np.ndarray  # (heads, NOPE, LATENT): a latent -> the heads' keys
    w_uv: np.ndarray  # (heads, VALUE, LATENT): … and values
    w_o: np.ndarray

    @classmethod
    def random(cls, heads: int) -> "Layer":
        return cls(
            weights(heads, NOPE + ROPE, HIDDEN),
            weights(LATENT, HIDDEN),
            weights(ROPE, HIDDEN),
            weights(heads, NOPE, LATENT),
            weights(heads, VALUE, LATENT),
            weights(HIDDEN, heads * VALUE),
        )

    def queries(self, x: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        q = np.einsum("sx,hdx->shd", x, self.w_q)
        return q[..., :NOPE], cuattn.rope(q[..., NOPE:], positions, interleaved=True)

    def latents(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What a token leaves in the cache: its latent, and what is yet to be rotated."""
        return normalised(x @ self.w_dkv.T), x @ self.w_kr.T


def normalised(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)


def by_the_formulas(layer: Layer, x: np.ndarray) -> np.ndarray:
    """Causal attention of a whole text, with every head's keys and values written out."""
    positions = np.arange(len(x))
    q_nope, q_rope = layer.queries(x, positions)
    c, r = layer.latents(x)
    r = cuattn.rope(r[:, None], positions, interleaved=True)[:, 0]
    k = np.einsum("hdc,nc->nhd", layer.w_uk, c)
    v = np.einsum("hdc,nc->nhd", layer.w_uv, c)
    s = np.einsum("shd,nhd->hsn", q_nope, k) + np.einsum("shd,nd->hsn", q_rope, r)
    s = np.where(positions <= positions[:, None], SCALE * s, -np.inf)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    return np.einsum("hsn,nhd->shd", p, v).reshape(len(x), -1) @ layer.w_o.T


def step(cache: cuattn.PagedKVCache, layers: list[Layer], ids: list[int], x: np.ndarray):
    """The hidden states of new tokens, which go into the cache."""
    cache.extend(ids, len(x))
    table, lens = cache.page_table(ids), cache.seq_lens(ids)
    positions = np.arange(lens[0] - len(x), lens[0])
    for number, layer in enumerate(layers):
        y = normalised(x)
        latent, rotated = layer.latents(y)
        cache.write(number, ids, rotated[:, None], latent[:, None], rope=TABLES, interleaved=True)
        rope_pages, latent_pages = cache.pages(number)
        q_nope, q_rope = layer.queries(y, positions)
        if len(x) > 1:
            out = cuattn.mla_prefill(
                q_nope[None], q_rope[None], latent_pages, rope_pages, table, lens,
                layer.w_uk, layer.w_uv, scale=SCALE,
            )[0]  # fmt: skip
        else:
            q_latent = np.einsum("bhd,hdc->bhc", q_nope, layer.w_uk)
            out = cuattn.mla_decode(
                q_latent, q_rope, latent_pages, rope_pages, table, lens, scale=SCALE
            )
            out = np.einsum("bhc,hdc->bhd", out, layer.w_uv)
        x = x + out.reshape(len(x), -1) @ layer.w_o.T
    return x


length = args.prompt + args.tokens
angles = np.outer(np.arange(length), 10000.0 ** (-np.arange(ROPE // 2) / (ROPE // 2)))
TABLES = np.cos(angles), np.sin(angles)
layers = [Layer.random(args.heads) for _ in range(args.layers)]
embeddings, w_out = rng.standard_normal((VOCABULARY, HIDDEN)), weights(VOCABULARY, HIDDEN)
cache = cuattn.PagedKVCache(
    -(-length // PAGE), PAGE, 1, ROPE, head_dim_v=LATENT, num_layers=args.layers, joined=True,
    dtype=np.float64,
)  # fmt: skip
ids = [cache.add_sequence()]

tokens = rng.integers(VOCABULARY, size=args.prompt).tolist()
hidden = step(cache, layers, ids, embeddings[tokens])
for _ in range(args.tokens):
    tokens.append(int(np.argmax(normalised(hidden[-1]) @ w_out.T)))
    hidden = step(cache, layers, ids, embeddings[tokens[-1:]])

x = embeddings[tokens]
for layer in layers:
    x = x + by_the_formulas(layer, normalised(x))
difference = abs(hidden[-1] - x[-1]).max()
assert difference < 1e-6 * abs(x).max(), difference

row, full = LATENT + ROPE, args.heads * (NOPE + ROPE + VALUE)
print("tokens:", *tokens[args.prompt :])
print(f"absorbed and by the paper's formulas: {difference:.1e} apart")
print(f"a token in the cache: {row} numbers a layer, where heads would take {full}")
print(f"DeepSeek-V3: {512 + 64} numbers, where 128 heads would take {128 * (128 + 64 + 128)}")
print(cache)
