"""Writes snapshots in a thread while training goes on, one at a time."""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

from shardplug.checkpoint.write.snapshot import SnapshotMemory
from shardplug.checkpoint.write.writer import CheckpointWrite
from shardplug.collective import background_group, message_group
from shardplug.errors import CheckpointError

__all__ = ["Background"]

_NUMBERS = itertools.count()


class Background:
    """The save that is being written beside the training, if there is one.

    The ranks' threads talk on a group of their own and fail together. `poll` is called at every
    step, so that all ranks learn of the end, and of a failure, at the same one.

    Attributes:
        memory: Where the snapshots are; kept from one save to the next, until `release`.
    """

    def __init__(self) -> None:
        self.memory = SnapshotMemory()
        self._number = next(_NUMBERS)
        self._thread: threading.Thread | None = None
        self._failures: list[CheckpointError] = []  # one, at most
        self._after: list[Callable[[], None]] = []
        self._complaints: list[str] = []
        atexit.register(_report_unseen, self._failures)  # not a method: it would keep the memory

    @property
    def is_pending(self) -> bool:
        """Whether a save was started whose end no rank has been told of."""
        return self._thread is not None

    def prepare(self) -> None:
        """Wait for the save under way, and make ready for another. Collective.

        Raises:
            CheckpointError: On every rank, when the save under way failed.
        """
        self.wait()
        background_group(self._number)  # made before anything is written

    def start(self, draft: CheckpointWrite) -> None:
        """Finish a draft in the background. Collective; after `prepare`."""
        assert self._thread is None
        group = background_group(self._number)
        # Not a daemon: a process that ends while a save is being written finishes it.
        self._thread = threading.Thread(
            target=self._run, args=(draft, group), name="shardplug-save", daemon=False
        )
        self._thread.start()

    def after(self, action: Callable[[], None]) -> None:
        """Do something as soon as the save under way is published; at once if there is none.

        It is left out when the save fails. The thread that writes runs it, on this rank; what it
        raises becomes a warning, as the other ranks do not know of it.
        """
        if self._thread is None:
            action()
        else:
            self._after.append(action)

    def poll(self) -> None:
        """Look whether the save under way has ended on all ranks. Collective while one is pending.

        Raises:
            CheckpointError: On every rank at the same call, when it failed.
        """
        if self._thread is None:
            return
        ended = torch.tensor([not self._thread.is_alive()], dtype=torch.int32)
        group = message_group()
        if group is not None:
            dist.all_reduce(ended, op=dist.ReduceOp.MIN, group=group)
        if ended.item():
            self._end()

    def wait(self) -> None:
        """Wait for the save under way. Collective.

        Raises:
            CheckpointError: On every rank, when it failed.
        """
        if self._thread is not None:
            self._end()

    def release(self) -> None:
        """Give the snapshot's memory back. Nothing may be pending."""
        assert self._thread is None
        self.memory.release()

    def _end(self) -> None:
        assert self._thread is not None
        self._thread.join()
        self._thread = None
        failure = self._failures.pop() if self._failures else None
        # Actions that came after the thread had looked for the last time.
        actions, self._after = self._after, []
        if failure is not None:
            raise failure
        for action in actions:
            self._try(action)
        complaints, self._complaints = self._complaints, []
        for complaint in complaints:
            warnings.warn(complaint, UserWarning, stacklevel=3)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._complaints.append(f"After a save in the background: {error}")

    def _run(self, draft: CheckpointWrite, group: dist.ProcessGroup | None) -> None:
        try:
            draft.finish(group)
            while self._after:
                self._try(self._after.pop(0))
        except BaseException as error:
            why = str(error)
            if group is not None and not dist.is_initialized():
                why = "The process group was destroyed: call wait_for_save() before that."
            failure = CheckpointError(f"The save to {draft.target} in the background failed. {why}")
            failure.__cause__ = error
            self._failures.append(failure)  # raised by `poll` or `wait`


def _report_unseen(failures: list[CheckpointError]) -> None:
    for failure in failures:
        logging.getLogger("shardplug").error(failure)
