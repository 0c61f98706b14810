"""cuattn, call by call: on a GPU where CuPy finds one, else on the CPU, by the same calls."""

import argparse

import numpy as np

import cuattn
from cuattn import sampling

argparse.ArgumentParser(description=__doc__).parse_args()

try:
    import cupy as xp

    xp.cuda.runtime.getDeviceCount()
except Exception:  # no CuPy, no driver, no device: each raises its own
    xp = np
rng = np.random.default_rng(0)


def random(*shape: int) -> xp.ndarray:
    return xp.asarray(rng.standard_normal(shape, dtype=np.float32))


# Attention: 2 sequences of 512 tokens, 8 query heads on 2 key heads, head_dim 64.
q, k, v = random(2, 512, 8, 64), random(2, 512, 2, 64), random(2, 512, 2, 64)
out = cuattn.flash_attention(q, k, v, causal=True)

# The same sequences end to end, as ones of different lengths would be; and by torch's signature.
flat = (array.reshape(1024, -1, 64) for array in (q, k, v))
cu_seqlens = xp.asarray([0, 512, 1024], dtype=np.int32)
varlen = cuattn.flash_attention_varlen(*flat, cu_seqlens, causal=True).reshape(out.shape)
heads_first = (array.swapaxes(1, 2) for array in (q, k, v))
torch_like = cuattn.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)

# The newest token over a cache of keys and values, which may lie in pages that sequences share.
decoded = cuattn.flash_decode(q[:, -1], k, v, xp.asarray([512, 512], dtype=np.int32))
cache = cuattn.PagedKVCache(64, 16, num_kv_heads=2, head_dim=64, dtype=np.float32, xp=xp)
ids = [cache.add_sequence(), cache.add_sequence()]
cache.extend(ids, 512)
cache.write(0, ids, k, v)
page_table, seq_lens = cache.page_table(ids), cache.seq_lens(ids)
paged = cuattn.paged_attention(q[:, -1], *cache.pages(0), page_table, seq_lens)

# Partial results over some of the keys, merged into the result over all of them.
halves = ((k[:, part], v[:, part]) for part in (slice(0, 256), slice(256, 512)))
parts = [cuattn.flash_attention(q[:, -1:], *half, return_lse=True) for half in halves]
merged, lse = cuattn.merge_attention(*zip(*parts, strict=True))
for last in (out[:, -1], varlen[:, -1], torch_like[:, :, -1], paged, merged[:, 0]):
    assert abs(last - decoded).max() < 1e-5

# From logits to tokens. Without a seed each call draws anew; seeds and offsets of the rows decide
# their draws, whatever the batch around them.
logits = 4 * random(2, 32000)
logits = sampling.apply_penalties(logits, sampling.greedy(logits)[:, None], repetition=1.2)
filters = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
tokens = sampling.sample(logits, **filters, seed=np.array([7, 8]), offset=512)
chosen, best, best_tokens = sampling.logprobs(logits, tokens, top_n=5)

# A draft of one token, accepted as often as leaves the text distributed as without drafts.
draft = sampling.softmax(logits)[:, None]
target = sampling.softmax(sampling.filter_logits(logits, **filters))[:, None].repeat(2, axis=1)
accepted, count = sampling.speculative_sample(sampling.sample(logits)[:, None], draft, target)
print(f"{xp.__name__}: out {out.shape} in {out.dtype}; tokens {tokens}; {cache}")
