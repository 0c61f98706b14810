"""cuattn inside functions that JAX compiles and differentiates, by jax.pure_callback.

Needs JAX. The callbacks compute on the host's CPU, whatever the device of the arrays.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import cuattn


def attention(q: jax.Array, k: jax.Array, v: jax.Array, **options) -> jax.Array:
    """:func:`cuattn.flash_attention`, to be called under jit, vmap and grad."""

    def on_the_host(*arrays) -> tuple[np.ndarray, np.ndarray]:
        return cuattn.flash_attention(*map(np.asarray, arrays), return_lse=True, **options)

    def gradients_on_the_host(*arrays) -> tuple[np.ndarray, ...]:
        return cuattn.flash_attention_backward(*map(np.asarray, arrays), **options)[:3]

    def forward(q: jax.Array, k: jax.Array, v: jax.Array):
        *batch, seqlen, heads, _ = q.shape
        results = (
            jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype),
            jax.ShapeDtypeStruct((*batch, heads, seqlen), jnp.promote_types(q.dtype, jnp.float32)),
        )
        out, lse = jax.pure_callback(on_the_host, results, q, k, v, vmap_method="sequential")
        return out, (q, k, v, out, lse)

    def backward(saved, dout: jax.Array):
        results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in saved[:3])
        return jax.pure_callback(
            gradients_on_the_host, results, dout, *saved, vmap_method="sequential"
        )

    @jax.custom_vjp
    def call(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return forward(q, k, v)[0]

    call.defvjp(forward, backward)
    return call(q, k, v)


def layer(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Causal self-attention of (batch, seqlen, features)."""
    q, k, v = jnp.einsum("bsf,fnhd->nbshd", x, weights["to_qkv"])
    return jnp.einsum("bshd,hdf->bsf", attention(q, k, v, causal=True), weights["to_out"])


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (2, 128, 256), jnp.bfloat16)
    weights = {
        "to_qkv": jax.random.normal(keys[1], (256, 3, 4, 64), jnp.bfloat16) / 16,
        "to_out": jax.random.normal(keys[2], (4, 64, 256), jnp.bfloat16) / 16,
    }

    @jax.jit
    @jax.value_and_grad
    def loss(weights: dict[str, jax.Array]) -> jax.Array:
        return jnp.square(layer(weights, x).astype(jnp.float32)).mean()

    value, gradients = loss(weights)
    shapes = {name: gradient.shape for name, gradient in gradients.items()}
    print(f"loss {value:.4f}; gradients of {shapes}")


if __name__ == "__main__":
    main()
