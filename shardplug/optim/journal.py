"""Makes an optimizer step on a drive that can fail all or nothing for the weights."""

from __future__ import annotations

import torch

from shardplug.optim.blocks import Piece

__all__ = ["Journal"]


class Journal:
    """Keeps the weights from before a step where their gradients were.

    A gradient has the size of its weights and is needed only until they are updated. So each
    block's gradients move to a scratch buffer, and the weights are saved in the place they leave:
    a step that fails is undone with no more memory than one block's. The price is that a step uses
    its gradients up. After it `parameter.grad` is None, as after `zero_grad()`.
    """

    def __init__(self) -> None:
        self._consumed: list[torch.Tensor] = []  # by the latest step, and not cleared since
        self._saved: list[tuple[Piece, torch.Tensor]] = []
        self._scratch: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
        self._used: dict[tuple[torch.device, torch.dtype], int] = {}
        self._block: object = None

    @property
    def scratch_bytes(self) -> int:
        """Memory of the scratch buffers."""
        return sum(buffer.nbytes for buffer in self._scratch.values())

    def record(self, piece: Piece, weights: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Save a piece's weights; return its gradient, which has moved.

        Args:
            piece: What is stepped next.
            weights: The piece's weights.
            gradient: Its gradient, whose memory then holds the weights.
        """
        kind = (gradient.device, gradient.dtype)
        if self._block is not piece.block:
            self._block = piece.block
            self._used.clear()
            size = sum(p.num_elements for p in piece.block.pieces)
            if kind not in self._scratch or self._scratch[kind].numel() < size:
                self._scratch[kind] = torch.empty(size, dtype=kind[1], device=kind[0])
        begin = self._used.get(kind, 0)
        moved = self._scratch[kind][begin : begin + piece.num_elements].view_as(gradient)
        self._used[kind] = begin + piece.num_elements
        moved.copy_(gradient)
        gradient.copy_(weights)
        self._saved.append((piece, gradient))
        return moved

    @torch.no_grad()
    def undo(self) -> None:
        """Bring the weights back that were saved. The gradients are lost."""
        for piece, saved in self._saved:
            piece.of(piece.entry.parameter).copy_(saved)
        self.commit()

    def commit(self) -> None:
        """Let go of the weights from before the step, and of the gradients."""
        self._consumed = list(dict.fromkeys(piece.entry.parameter for piece, _ in self._saved))
        for parameter in self._consumed:
            parameter.grad = None
        self._saved.clear()
        self._block = None

    def gradients_cleared(self, *, to_none: bool) -> None:
        """Note that gradients were cleared since the latest step.

        Args:
            to_none: False gives the parameters whose gradient that step used up one of zeros, as
                they would have without a journal.
        """
        for parameter in self._consumed:
            if not to_none and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._consumed = []
