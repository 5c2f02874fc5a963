"""The process's one heartbeat: started with the engine, stopped at exit."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
import weakref
from collections.abc import Callable
from types import TracebackType
from uuid import uuid4

import torch.distributed as dist

from shardplug.core._torch.collectives import default_tcp_store
from shardplug.engine.engine import ZeroEngine
from shardplug.engine.listener import EngineListener
from shardplug.watchdog.stall_limits import Limits
from shardplug.watchdog.watcher import Watcher

__all__ = ["Watchdog", "before_end", "progress", "raised", "start", "stop"]

_LONGEST = 6000  # characters of a traceback that is sent to the other ranks

_watcher: Watcher | None = None
_hooked = False
_cleanups: list[weakref.WeakMethod[Callable[[], None]]] = []


class Watchdog(EngineListener):
    """Watches the ranks of an engine."""

    def opened(self, engine: ZeroEngine) -> None:
        """Start watching; swap files are removed where the job is ended."""
        start()
        for tier in engine.tiers:
            before_end(tier.remove_files)

    def phase(self, phase: str) -> None:
        """Note that this rank has come on."""
        progress()


def start(limits: Limits | None = None) -> bool:
    """Watch the ranks of the default process group, and be watched. Collective, once a group.

    A process group that did not meet in a TCPStore (a file, MPI) is not
    watched, nor is one rank alone.

    Args:
        limits: How long a silence is borne; None reads the environment.

    Returns:
        Whether the ranks are watched now.
    """
    global _watcher
    limits = limits or Limits.from_environment()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    store = default_tcp_store()
    if store is None:
        return False
    if _watcher is not None and _watcher.store is store and _watcher.pid == os.getpid():
        return True
    stop()
    name = [uuid4().hex[:8]]
    dist.broadcast_object_list(name)
    if limits.silence_seconds is None:
        return False
    _watcher = Watcher(
        store, dist.get_rank(), dist.get_world_size(), limits, name[0], clean_up=_clean_up
    )
    _watcher.start()
    _hook()
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
                print(f"shardplug: cleaning up failed: {error}", file=sys.stderr, flush=True)


def stop() -> None:
    """Leave: the other ranks no longer wait for this one's beat."""
    global _watcher
    watcher, _watcher = _watcher, None
    if watcher is not None and watcher.pid == os.getpid():
        watcher.leave()


def progress() -> None:
    """Note that this rank has come on; hosts call it at the end of each phase of a step."""
    if _watcher is not None:
        _watcher.progress += 1


def raised(error: BaseException) -> None:
    """Tell the other ranks of an exception that ends what all of them do together.

    Ranks that raise too, within the grace, are left to handle it. The others are ended.
    """
    if _watcher is not None and _watcher.pid == os.getpid():
        _watcher.tell_raised(_text(type(error), error, error.__traceback__))


def _hook() -> None:
    global _hooked
    if _hooked:
        return
    _hooked = True
    atexit.register(stop)
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if issubclass(kind, KeyboardInterrupt):
            return  # every rank has it, and goes in peace
        if _watcher is not None and _watcher.pid == os.getpid():
            lost_peer = isinstance(error, RuntimeError)  # gloo's and NCCL's errors are, and ours
            _watcher.tell_died(_text(kind, error, trace), may_follow=lost_peer)

    sys.excepthook = hook


def _text(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> str:
    return "".join(traceback.format_exception(kind, error, trace))[-_LONGEST:].rstrip()
