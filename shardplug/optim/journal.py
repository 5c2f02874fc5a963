"""Makes an optimizer step on a drive that can fail all or nothing for the weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardplug.core._torch.tensors import copy_all
from shardplug.optim.blocks import Piece

__all__ = ["Journal"]

_Kind = tuple[torch.device, torch.dtype]


class Journal:
    """Keeps the weights from before a step where gradients were.

    A gradient has the size of its weights and is needed only until they are updated. So the first
    block's weights are saved in a scratch buffer, and those of each later block in the gradients of
    the blocks before it: a step that fails is undone with no more memory than one block's, and at
    the price of one copy. The other price is that a step uses its gradients up. After it
    `parameter.grad` is None, as after `zero_grad()`.
    """

    def __init__(self) -> None:
        self._consumed: list[torch.Tensor] = []  # by the latest step, and not cleared since
        self._stepped: dict[torch.Tensor, None] = {}  # by this step
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []  # weights, and their old values
        self._used_up: list[torch.Tensor] = []  # gradients of the latest block
        self._scratch: dict[_Kind, list[torch.Tensor]] = {}
        self._free: dict[_Kind, list[torch.Tensor]] = {}

    @property
    def scratch_bytes(self) -> int:
        """Memory of the scratch buffers."""
        return sum(buffer.nbytes for buffers in self._scratch.values() for buffer in buffers)

    def save(self, stepped: Sequence[tuple[Piece, torch.Tensor]]) -> None:
        """Save the weights of a block's pieces.

        The gradients of the call before are overwritten: its pieces must have been stepped.

        Args:
            stepped: The pieces that are stepped next, with their weights, each with its gradient:
                contiguous, and all of one device and dtype.
        """
        for gradient in self._used_up:
            self._free[gradient.device, gradient.dtype].append(gradient)
        self._used_up = [w.grad.view(-1) for _, w in stepped if w.grad is not None]
        weights = [w.view(-1) for _, w in stepped]
        free = self._room(weights)
        first = len(self._saved)
        for (piece, _), rest in zip(stepped, weights, strict=True):
            self._stepped[piece.entry.parameter] = None
            while count := rest.numel():
                place = free.pop()
                if place.numel() > count:
                    free.append(place[count:])
                    place = place[:count]
                self._saved.append((rest[: place.numel()], place))
                rest = rest[place.numel() :]
        saved = self._saved[first:]
        copy_all([place for _, place in saved], [old for old, _ in saved])

    def _room(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return memory for these weights, from which the caller takes."""
        if not weights:
            return []
        kind = (weights[0].device, weights[0].dtype)
        free = self._free.setdefault(kind, [])
        missing = sum(w.numel() for w in weights) - sum(f.numel() for f in free)
        if missing > 0:
            buffer = torch.empty(missing, dtype=kind[1], device=kind[0])
            self._scratch.setdefault(kind, []).append(buffer)
            free.append(buffer)
        return free

    @torch.no_grad()
    def undo(self) -> None:
        """Bring the weights back that were saved. The gradients are lost."""
        for weights, saved in self._saved:
            weights.copy_(saved)
        self.commit()

    def commit(self) -> None:
        """Let go of the weights from before the step, and of the gradients."""
        self._consumed = list(self._stepped)
        for parameter in self._consumed:
            parameter.grad = None
        self._stepped.clear()
        self._saved.clear()
        self._used_up.clear()
        self._free = {kind: list(buffers) for kind, buffers in self._scratch.items()}

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
