"""Carries out the stage table: the only owner of FSDP2's gather and reduce knobs."""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule

from shardplug.core.stage import Stage

__all__ = ["Schedule"]


class Schedule:
    """Sets the knobs of every sharded model for the next micro-batch.

    Outside an accumulation window each backward counts as the window's last, which is right for
    plain loops and manual optimization.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._roots: list[FSDPModule] = []
        self.last = True
        """Whether the micro-batch under way is the last of its window."""

    def attach(self, root: FSDPModule) -> None:
        """Put one more model under the schedule."""
        self._roots.append(root)
        self._apply(root)

    def detach(self, root: object) -> None:
        """Take a model out of the schedule."""
        self._roots = [known for known in self._roots if known is not root]

    def begin(self, last: bool) -> None:
        """Announce whether the coming micro-batch is the last of its window."""
        if last == self.last:
            return
        self.last = last
        for root in self._roots:
            self._apply(root)

    def _apply(self, root: FSDPModule) -> None:
        # set_is_last_backward stays True: it would keep the last unit's whole gradients alive
        # between micro-batches, to save one wait.
        root.set_requires_gradient_sync(self.last or self._stage.reduce_every_backward)
        root.set_reshard_after_backward(self.last or self._stage.reshard_every_backward)
