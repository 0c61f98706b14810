"""cuattn in a torch model: tensors go in as they are, and the result is written into a tensor.

Needs torch. On a GPU, run it where CuPy is installed too.
"""

import argparse

import torch

import cuattn


class Attention(torch.nn.Module):
    """Causal self-attention of (batch, seqlen, features), for inference."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_qkv = torch.nn.Linear(features, 3 * features, bias=False)
        self.to_out = torch.nn.Linear(features, features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.to_qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        out = torch.empty_like(q)  # a tensor of torch's, which cuattn writes to without a copy
        cuattn.flash_attention(q, k, v, causal=True, out=out)
        return self.to_out(out.flatten(-2))


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Attention(256, 4).to(device, torch.bfloat16)
    x = torch.randn(2, 128, 256, device=device, dtype=torch.bfloat16)
    with torch.no_grad():  # gradients of torch's do not flow through cuattn
        print(f"{x.dtype} on {device}: {tuple(x.shape)} to {tuple(model(x).shape)}")


if __name__ == "__main__":
    main()
