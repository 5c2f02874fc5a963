"""Saves in the background that wait until a test lets them go on, or that fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardplug.checkpoint.format.durable import SummingFileSystem
from shardplug.checkpoint.write.writer import CheckpointWrite

PATIENCE = 40.0  # seconds: under the pool's timeout


class Gate:
    """Holds every save in the background just before it writes."""

    def __init__(self, fail_on_save: int | None, failing: bool) -> None:
        self._open = threading.Event()
        self.count = 0
        self._fail_on_save = fail_on_save
        self._failing = failing

    def release(self) -> None:
        """Let the save that waits, or the next one, go on."""
        self._open.set()

    def arrive(self) -> None:
        """Wait until released."""
        assert self._open.wait(PATIENCE), "nobody released the save"
        self._open.clear()
        self.count += 1

    def check_space(self) -> None:
        """Fail if this is the save to fail, on the rank to fail."""
        if self._failing and self.count == self._fail_on_save:
            raise OSError(28, "No space left on device")


@contextmanager
def held_saves(fail_on_save: int | None = None, failing: bool = True) -> Iterator[Gate]:
    """Hold saves in the background until they are released, one by one.

    Args:
        fail_on_save: Which of them fails, counted from 1; None for no one.
        failing: Whether it is this rank on which it fails.
    """
    gate, write_tensors = Gate(fail_on_save, failing), CheckpointWrite._write_tensors
    create_stream = SummingFileSystem.create_stream

    def held(self: CheckpointWrite, *args: Any, **kwargs: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            gate.arrive()
        write_tensors(self, *args, **kwargs)

    def full(self: SummingFileSystem, *args: Any, **kwargs: Any) -> Any:
        gate.check_space()
        return create_stream(self, *args, **kwargs)

    CheckpointWrite._write_tensors = held  # type: ignore[method-assign]
    SummingFileSystem.create_stream = full  # type: ignore[method-assign]
    try:
        yield gate
    finally:
        gate.release()
        CheckpointWrite._write_tensors = write_tensors  # type: ignore[method-assign]
        SummingFileSystem.create_stream = create_stream  # type: ignore[method-assign]
