"""cuattn in a torch model that is trained: tensors go in as they are, out is written into a tensor,
and gradients come back through torch.autograd.Function.

Needs torch. On a GPU, run it where CuPy is installed too; torch's current stream should be the
default one, as it is unless changed, since CuPy's is.
"""

import argparse
from typing import Any

import torch

import cuattn


class FlashAttention(torch.autograd.Function):
    """:func:`cuattn.flash_attention` with gradients of q, k and v:
    ``FlashAttention.apply(q, k, v, {"causal": True})``."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        q, k, v = (x.detach() for x in (q, k, v))
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))  # cuattn writes to it without a copy
        _, lse = cuattn.flash_attention(q, k, v, out=out, return_lse=True, **options)
        ctx.save_for_backward(q, k, v, out)
        ctx.lse, ctx.options = lse, options
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = (x.detach() for x in ctx.saved_tensors)
        grads = cuattn.flash_attention_backward(dout, *saved, ctx.lse, **ctx.options)
        return *(as_tensor(grad, dout.dtype) for grad in grads[:3]), None


def as_tensor(array: Any, dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the memory of a NumPy or CuPy array; NumPy has no bfloat16 of its own, so its
    bits change hands."""
    if dtype == torch.bfloat16:
        return torch.from_dlpack(array.view("int16")).view(dtype)
    return torch.from_dlpack(array)


class Attention(torch.nn.Module):
    """Causal self-attention of (batch, seqlen, features)."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_qkv = torch.nn.Linear(features, 3 * features, bias=False)
        self.to_out = torch.nn.Linear(features, features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.to_qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        return self.to_out(FlashAttention.apply(q, k, v, {"causal": True}).flatten(-2))


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Attention(256, 4).to(device, torch.bfloat16)
    x = torch.randn(2, 128, 256, device=device, dtype=torch.bfloat16)
    out = model(x)
    out.float().square().mean().backward()
    norms = {name: f"{weight.grad.norm():.4f}" for name, weight in model.named_parameters()}
    print(f"{x.dtype} on {device}: {tuple(x.shape)} to {tuple(out.shape)}; gradients {norms}")


if __name__ == "__main__":
    main()
