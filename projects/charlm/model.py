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
        return x + self.down(F.relu(self.up(self.norm2(x))).square())  # arXiv:2109.08668

    def _attend(self, x: Tensor, waves: Tensor) -> Tensor:
        queries, keys, values = (
            self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(
            _rotate(queries, waves), _rotate(keys, waves), values, is_causal=True
        )
        return self.proj(attended.transpose(1, 2).flatten(2))


def _rotate(x: Tensor, waves: Tensor) -> Tensor:
    """Rotate queries or keys ``[N, heads, T, dim]`` by their positions (RoPE, arXiv:2104.09864)."""
    cos, sin = waves.to(x.dtype)
    left, right = x.chunk(2, dim=3)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=3)


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
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, bias=False)
        self.register_buffer("waves", _waves(width // num_heads), persistent=False)

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        gpt = cfg.MODEL.GPT
        return {"width": gpt.WIDTH, "depth": gpt.DEPTH, "num_heads": gpt.NUM_HEADS}

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor] | Tensor:
        return self.losses(batch) if self.training else self.logits(batch["tokens"])

    def losses(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The loss in nats per character, and the same in bits."""
        loss = F.cross_entropy(
            self.logits(batch["tokens"]).flatten(0, 1), batch["targets"].flatten()
        )
        return {"loss_char": loss, "bits_per_char": loss.detach() / math.log(2)}

    def logits(self, tokens: Tensor) -> Tensor:
        x, waves = self.embedding(tokens), self.waves[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x, waves)
        return F.linear(self.norm(x), self.embedding.weight)

    def flops_per_sample(self) -> int:
        """FLOPs of forward and backward pass, see Chowdhery et al., "PaLM", appendix B."""
        num_params = sum(parameter.numel() for parameter in self.parameters())
        return WINDOW * (
            6 * num_params + 12 * len(self.blocks) * self.embedding.embedding_dim * WINDOW
        )


def _waves(dim: int) -> Tensor:
    """Cosines and sines of all positions, ``[2, WINDOW, dim / 2]``."""
    angles = torch.arange(WINDOW)[:, None] / _LONGEST_WAVE ** (torch.arange(dim // 2) / (dim // 2))
    return torch.stack([angles.cos(), angles.sin()])
