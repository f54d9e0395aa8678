"""A small GPT."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from projects.charlm.corpus import VOCABULARY
from projects.charlm.data import WINDOW
from trainkit.config import CfgNode, configurable
from trainkit.modeling import MODEL_REGISTRY

_LONGEST_WAVE = 1000.0  # longest wavelength of the positions, as a multiple of the shortest


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each with a norm before it and a residual connection.

    The last weights of both parts start as zero, so the block starts as the identity.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        for last in (self.proj, self.down):
            nn.init.zeros_(last.weight)

    def forward(self, x: Tensor, waves: Tensor) -> Tensor:
        x = x + self._attend(self.norm1(x), waves)
        hidden = F.relu(self.up(self.norm2(x))).square()  # arXiv:2109.08668
        return x + self.down(hidden)

    def _attend(self, x: Tensor, waves: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(2, (3, self.num_heads, -1))  # [N, T, 3, heads, dim]
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4)  # each [N, heads, T, dim]
        queries = _rotate(queries, waves)
        keys = _rotate(keys, waves)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.proj(attended.transpose(1, 2).flatten(2))


def _rotate(x: Tensor, waves: Tensor) -> Tensor:
    """Rotate queries or keys ``[N, heads, T, dim]`` by their positions (RoPE, arXiv:2104.09864)."""
    cos, sin = waves.to(x.dtype)
    left, right = x.chunk(2, dim=3)
    new_left = left * cos - right * sin
    new_right = left * sin + right * cos
    return torch.cat([new_left, new_right], dim=3)


@MODEL_REGISTRY.register()
class GPT(nn.Module):
    """A transformer that predicts the next character from those before it.

    A batch is a dict with ``tokens``, int64 ``[N, T]`` with T at most ``WINDOW``, and, for the losses, ``targets``
    ``[N, T]``. Train mode returns ``losses(batch)``, eval mode logits ``[N, T, 97]``. The embedding is also the output
    layer.

    Args:
        width: numbers per token, a multiple of ``2 * num_heads``.
        depth: number of blocks.
    """

    tokens_per_sample = WINDOW
    waves: Tensor

    @configurable
    def __init__(self, width: int, depth: int, num_heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(VOCABULARY), width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            self.blocks.append(Block(width, num_heads))
        self.norm = nn.LayerNorm(width, bias=False)
        self.register_buffer("waves", _waves(width // num_heads), persistent=False)

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        gpt = cfg.MODEL.GPT
        return {"width": gpt.WIDTH, "depth": gpt.DEPTH, "num_heads": gpt.NUM_HEADS}

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor] | Tensor:
        if self.training:
            return self.losses(batch)
        return self.logits(batch["tokens"])

    def losses(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The loss in nats per character, and the same in bits."""
        logits = self.logits(batch["tokens"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        bits = loss.detach() / math.log(2)
        return {"loss_char": loss, "bits_per_char": bits}

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        waves = self.waves[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x, waves)
        return F.linear(self.norm(x), self.embedding.weight)

    def flops_per_sample(self) -> int:
        """FLOPs of forward and backward pass, see Chowdhery et al., "PaLM", appendix B."""
        num_params = sum(parameter.numel() for parameter in self.parameters())
        of_attention = 12 * len(self.blocks) * self.embedding.embedding_dim * WINDOW
        per_token = 6 * num_params + of_attention
        return WINDOW * per_token


def _waves(dim: int) -> Tensor:
    """Cosines and sines of all positions, ``[2, WINDOW, dim / 2]``."""
    positions = torch.arange(WINDOW)[:, None]
    exponents = torch.arange(dim // 2) / (dim // 2)
    angles = positions / _LONGEST_WAVE**exponents
    return torch.stack([angles.cos(), angles.sin()])
