"""cuattn inside a function that JAX compiles, by jax.pure_callback.

Needs JAX. The callback computes on the host's CPU, whatever the device of the arrays.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import cuattn


def attention(q: jax.Array, k: jax.Array, v: jax.Array, **options) -> jax.Array:
    """:func:`cuattn.flash_attention`, to be called under jit and vmap."""

    def on_the_host(*arrays) -> np.ndarray:
        return cuattn.flash_attention(*map(np.asarray, arrays), **options)

    result = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype)
    return jax.pure_callback(on_the_host, result, q, k, v, vmap_method="sequential")


@jax.jit
def layer(x: jax.Array, to_qkv: jax.Array, to_out: jax.Array) -> jax.Array:
    """Causal self-attention of (batch, seqlen, features)."""
    q, k, v = jnp.einsum("bsf,fnhd->nbshd", x, to_qkv)
    return jnp.einsum("bshd,hdf->bsf", attention(q, k, v, causal=True), to_out)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (2, 128, 256), jnp.bfloat16)
    to_qkv = jax.random.normal(keys[1], (256, 3, 4, 64), jnp.bfloat16) / 16
    to_out = jax.random.normal(keys[2], (4, 64, 256), jnp.bfloat16) / 16
    out = layer(x, to_qkv, to_out)
    print(f"{out.dtype}: {x.shape} to {out.shape}")


if __name__ == "__main__":
    main()
