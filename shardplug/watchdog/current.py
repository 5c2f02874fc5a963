"""The process's one watcher: started with an engine, stopped at exit or with the last engine."""

from __future__ import annotations

import atexit
import logging
import os
import traceback
import weakref
from collections.abc import Callable
from uuid import uuid4

import torch.distributed as dist

from shardplug.config import ZeroConfig
from shardplug.core._torch.collectives import default_tcp_store
from shardplug.engine.engine import ZeroEngine
from shardplug.engine.listener import EngineListener
from shardplug.process.uncaught import watch_uncaught
from shardplug.watchdog.stall_limits import Limits
from shardplug.watchdog.watcher import Watcher

__all__ = ["Watchdog", "before_end", "progress", "raised", "start", "stop"]

_LOG = logging.getLogger("shardplug")

_LONGEST = 6000  # characters of a traceback that is sent to the other ranks

_watcher: Watcher | None = None
_unhook: Callable[[], None] | None = None
_cleanups: list[weakref.WeakMethod[Callable[[], None]]] = []
_watching: weakref.WeakSet[Watchdog] = weakref.WeakSet()
"""Listeners of engines that are open."""


class Watchdog(EngineListener):
    """Watches the ranks of an engine, as the option `watchdog` of its configuration says."""

    def opened(self, engine: ZeroEngine) -> None:
        """Start watching; swap files are removed where the job is ended."""
        _watching.add(self)
        start(engine.config)
        for tier in engine.tiers:
            before_end(tier.remove_files)

    def phase(self, phase: str) -> None:
        """Note that this rank makes progress."""
        progress()

    def closed(self) -> None:
        """Stop watching with the last engine."""
        _watching.discard(self)
        if not _watching:
            stop()


def start(config: ZeroConfig, limits: Limits | None = None) -> bool:
    """Watch the ranks of the default process group, and be watched. Collective, once a group.

    A process group that did not meet in a TCPStore (a file, MPI) is not
    watched, nor is one rank alone.

    Args:
        config: Says what happens to the job, and after how long; the same on all ranks.
        limits: Other limits, for tests.

    Returns:
        Whether the ranks are watched now.
    """
    global _watcher, _unhook
    if not dist.is_initialized() or dist.get_world_size() == 1 or config.watchdog == "off":
        return False
    store = default_tcp_store()
    if store is None:
        return False
    if _watcher is not None and _watcher.store is store and _watcher.pid == os.getpid():
        return True
    stop()
    name = [uuid4().hex[:8]]
    dist.broadcast_object_list(name)
    _watcher = Watcher(
        store,
        dist.get_rank(),
        dist.get_world_size(),
        limits
        or Limits(silence_seconds=config.silence_seconds, stall_seconds=config.stall_seconds),
        name[0],
        only_reports=config.watchdog == "report",
        clean_up=_clean_up,
    )
    _watcher.start()
    atexit.register(stop)
    _unhook = watch_uncaught(after=_tell_died)
    return True


def before_end(action: Callable[[], None]) -> None:
    """Call a method of an object that still lives before this process is ended with the job.

    What runs at the exit of an interpreter does not run then: files have to be removed here.

    Args:
        action: A bound method; it is called from another thread, in the middle of anything.
    """
    _cleanups.append(weakref.WeakMethod(action))


def _clean_up() -> None:
    for reference in _cleanups:
        action = reference()
        if action is not None:
            try:
                action()
            except OSError as error:
                _LOG.error("Cleaning up failed: %s", error)


def stop() -> None:
    """Leave: the other ranks no longer wait for this one's beat."""
    global _watcher, _unhook
    watcher, _watcher = _watcher, None
    unhook, _unhook = _unhook, None
    if watcher is None:
        return
    if watcher.pid == os.getpid():
        watcher.leave()
    atexit.unregister(stop)
    if unhook is not None:
        unhook()


def progress() -> None:
    """Note that this rank makes progress; called at the end of each phase of a step."""
    if _watcher is not None:
        _watcher.progress += 1


def raised(error: BaseException) -> None:
    """Tell the other ranks of an exception that ends what all of them do together.

    Ranks that raise too, within the grace, are left to handle it. The others are ended.
    """
    if _watcher is not None and _watcher.pid == os.getpid():
        _watcher.tell_raised(_text(error))


def _tell_died(error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt):
        return  # every rank has it, and ends by itself
    if _watcher is not None and _watcher.pid == os.getpid():
        lost_peer = isinstance(error, RuntimeError)  # gloo's and NCCL's errors are, and ours
        _watcher.tell_died(_text(error), may_follow=lost_peer)


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-_LONGEST:].rstrip()
