"""Small models that have what breaks sharding: odd sizes, ties, scalars, branches."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

VOCAB = 257  # a prime: rows never divide evenly


class Block(nn.Module):
    """A pre-norm MLP block."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., width)."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TinyLM(nn.Module):
    """An embedding, three blocks, a head; sizes are odd on purpose."""

    def __init__(self, *, width: int = 18, hidden: int = 37, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        nn.init.normal_(self.embed.weight, std=0.05)  # language models do; 1.0 is ill-conditioned
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.3))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (b, s) -> logits (b, s, VOCAB)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale


def lm_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean next-token loss; logits (b, s, VOCAB), tokens (b, s)."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def tokens(step: int, micro: int, rank: int, *, batch: int = 2, length: int = 9) -> torch.Tensor:
    """A batch that differs for every step, micro-batch and rank."""
    generator = torch.Generator().manual_seed(1_000_003 * step + 1009 * micro + rank)
    return torch.randint(0, VOCAB, (batch, length), generator=generator)
