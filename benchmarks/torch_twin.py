"""The model of examples/train_chars.py in torch, with the weights of a model of the example: the
same layers, the same AdamW, so that one step of each can be compared."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional


class Twin(nn.Module):
    """The transformer of examples/train_chars.py, without dropout.

    Parameters
    ----------
    weights : dict of numpy.ndarray
        The example's, by name.
    slopes : numpy.ndarray (heads,)
        Of ALiBi.
    layers : int
        Blocks of the model.
    device : str
        Where the weights go.
    """

    def __init__(
        self, weights: dict[str, np.ndarray], slopes: np.ndarray, layers: int, device: str
    ) -> None:
        super().__init__()
        self.layers, self.heads = layers, len(slopes)
        self.weights = nn.ParameterDict(
            {
                name.replace(".", "_"): nn.Parameter(torch.tensor(w, device=device))
                for name, w in weights.items()
            }
        )
        self.register_buffer("slopes", torch.tensor(slopes, device=device))
        self.biases: dict[int, torch.Tensor] = {}  # of each length of sequences

    def bias(self, tokens: int) -> torch.Tensor:
        """What ALiBi and the causal mask add to scores, (heads, tokens, tokens): made once, since
        torch's attention takes no slopes."""
        if tokens not in self.biases:
            position = torch.arange(tokens, device=self.slopes.device)
            distance = position[:, None] - position
            bias = -self.slopes[:, None, None] * distance.abs()
            self.biases[tokens] = bias.masked_fill(distance < 0, -math.inf)
        return self.biases[tokens]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (batch, tokens, alphabet) of tokens (batch, tokens)."""
        w = self.weights
        x = functional.embedding(tokens, w["embedding"])
        for i in range(self.layers):
            h = rms_norm(x, w[f"norm1_{i}"])
            qkv = (h @ w[f"qkv_{i}"]).unflatten(-1, (3, self.heads, -1))
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            mask = self.bias(tokens.shape[1]).to(q.dtype)[None]
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + mixed.transpose(1, 2).flatten(2) @ w[f"out_{i}"]
            h = rms_norm(x, w[f"norm2_{i}"])
            x = x + functional.relu(h @ w[f"up_{i}"]).square() @ w[f"down_{i}"]
        return rms_norm(x, w["norm"]) @ w["head"]


def rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``w * x / sqrt(mean(x**2))`` of x (..., features)."""
    return functional.rms_norm(x, w.shape, w, 1e-5)


class Trainer:
    """Steps of a twin, as those of the example's training loop.

    Parameters
    ----------
    twin : Twin
        The model.
    autocast : bool
        Products and attention in bfloat16, as torch.autocast chooses.
    """

    def __init__(self, twin: Twin, *, autocast: bool) -> None:
        self.twin, self.autocast = twin, autocast
        device = twin.slopes.device
        parameters = list(twin.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim == 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim != 2], "weight_decay": 0.0},
        ]
        self.parameters = parameters
        self.adam = torch.optim.AdamW(
            groups, lr=1.0, betas=(0.9, 0.98), eps=1e-8, fused=device.type == "cuda"
        )

    def step(self, inputs: torch.Tensor, targets: torch.Tensor, rate: float) -> torch.Tensor:
        """Move the weights by one batch, (batch, tokens) both; the loss before."""
        for group in self.adam.param_groups:
            group["lr"] = rate
        loss = self.loss(inputs, targets)
        self.adam.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.adam.step()
        return loss.detach()

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean loss of predicting `targets`."""
        precision: Any = contextlib.nullcontext()
        if self.autocast:
            precision = torch.autocast(inputs.device.type, torch.bfloat16)
        with precision:
            logits = self.twin(inputs)
            return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
