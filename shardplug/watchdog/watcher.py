"""The threads of one rank: one beats and reads, one watches the clock.

Only the beating thread talks to the store, over a connection of its own: where the store's process
is stopped, it hangs there, and the other thread sees that its rounds have ceased. Nobody waits for
the store in the main thread for longer than the grace.

Each rank watches the next one (the last watches the first), so the store gets four small messages
a second from each rank, whatever their number. A verdict that one rank finds is written once, read
by all in their next round, and ends all of them.
"""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardplug.watchdog.processes import Process
from shardplug.watchdog.stall_limits import Limits

__all__ = ["Watcher"]

_LOG = logging.getLogger("shardplug")

_KEY = "shardplug-heartbeat"
_EXIT_CODE = 1
_FRAMES = 12  # of the stack, said of a rank that does not come on
_ALL_NAMED = 64  # ranks, up to which each knows all others' processes


class Watcher:
    """Beats for this rank and watches another.

    Args:
        store: The store of the default process group. It is kept: where its server is in this
            process, the server lives as long as the watch.
        rank: This rank.
        world_size: Number of ranks.
        limits: How long a silence is borne.
        name: The same on all ranks, and no other attempt's: a launcher that restarts the job may
            keep the store, and with it the verdict that ended the attempt before.
        only_reports: Whether the end of the job is logged, and no process is ended.
        end: Ends the process; for tests.
        clean_up: Called before that.
        clock: Seconds since some moment, by which silences are measured; for tests.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        limits: Limits,
        name: str = "",
        *,
        only_reports: bool = False,
        end: Callable[[int], Any] = os._exit,
        clean_up: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.pid = os.getpid()
        self.progress = 0
        """Phases that this rank has ended."""
        self._rank = rank
        self._world_size = world_size
        self._limits = limits
        self._name = name
        self._silence = limits.silence_seconds
        self._pause = min(1.0, self._silence / 20)
        self._only_reports = only_reports
        self._end_process = end
        self._clean_up = clean_up
        self._clock = clock
        self._own = Process.own()
        self._others: dict[int, Process] = {}
        self._seen: dict[int, tuple[str, float]] = {}  # a rank's beat, and when it came
        self._gone_since: float | None = None
        self._last_round = clock()
        self._lost_first: list[str] | None = None  # once the store is silent: who was lost by then
        self._verdict = ""
        self._moved = (0, clock())
        self._noticed = 0  # the progress at which this rank has last said where it is
        self._longest = 0.0  # seconds from one progress to the next
        self._raised = 0  # exceptions that this rank has told of
        self._deadlines: dict[tuple[int, int], float] = {}
        self._outgoing: list[tuple[str, str, threading.Event]] = []
        self._wake, self._ended = threading.Event(), threading.Event()
        self._leaving = False
        self._all_left = threading.Event()  # on rank 0, while it leaves
        self._left: set[int] = set()
        self._ending = threading.Lock()
        self._connection: Any = None
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start both threads."""
        self._connection = self.store.clone()
        for name, target in (("beat", self._beat_always), ("clock", self._watch_always)):
            thread = threading.Thread(target=target, name=f"shardplug-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    # ---------------------------------------------------------------- what the main thread calls

    def tell_raised(self, text: str) -> None:
        """Tell of an exception that other ranks may raise too."""
        self._raised += 1
        self._send(f"raised/{self._rank}/{self._raised}", text)

    def tell_died(self, text: str, *, may_follow: bool) -> None:
        """Tell of an exception that ends this process.

        Args:
            text: The exception.
            may_follow: It may be what the loss of another rank looks like from here.
        """
        self._raised += 1
        if may_follow and self._lost_first is not None:
            lost = [self._store_is_silent()]
        else:
            lost = self._lost_ranks()
        deadline = time.monotonic() + 1.0  # a killed process closes its connections, then ends
        while may_follow and not lost and time.monotonic() < deadline:
            time.sleep(0.05)
            lost = self._lost_ranks()
        # The exception follows from a loss.
        cause = "; ".join(lost) or f"rank {self._rank} ({self._own}) raised\n{text}"
        self._send("verdict", cause)
        if lost:  # who is gone may have been ended, for what another rank had found first
            cause = self._verdict or cause
            _LOG.error("First cause: %s", cause)

    def leave(self) -> None:
        """Stop beating; where the store is in this process, others may have to hear of it."""
        self._leaving = True
        self._send(f"left/{self._rank}", "1")
        if self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            self._all_left.wait(2 * self._pause + 0.5)  # their next round finds the store
        self._ended.set()
        self._wake.set()
        # A thread that comes back from the store while the interpreter goes aborts the process.
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(self._limits.grace_seconds)

    def _send(self, name: str, text: str) -> None:
        sent = threading.Event()
        self._outgoing.append((name, text, sent))
        self._wake.set()
        sent.wait(min(3.0, self._limits.grace_seconds))

    # ---------------------------------------------------------------- the beating thread

    def _beat_always(self) -> None:
        beats = 0
        while not self._ended.is_set():
            beats += 1
            self._excuse_all_after(self._last_round, self._clock())
            try:
                self._round(beats)
            except RuntimeError as error:  # torch's errors of a store that is gone
                if self._leaving or not dist.is_initialized():
                    return  # the job is over
                self._wait_for_store(error)
                return
            self._last_round, self._lost_first = self._clock(), None
            self._wake.wait(min(self._pause, 0.05) if self._leaving else self._pause)
            self._wake.clear()

    def _round(self, beats: int) -> None:
        if not self._others:
            self._introduce()
        while self._outgoing:
            name, text, sent = self._outgoing[0]
            if name == "verdict":
                self._verdict = self._connection.compare_set(self._key(name), "", text).decode()
            else:
                self._connection.set(self._key(name), text)
                if name.startswith("raised/"):
                    self._connection.add(self._key("raised"), 1)
                    number = self._connection.add(self._key("raised"), 0)
                    self._connection.set(self._key(f"raising/{number}"), name)
            self._outgoing.pop(0)
            sent.set()
        if self._leaving and self._rank == 0:
            others = [self._key(f"left/{rank}") for rank in range(1, self._world_size)]
            if self._connection.check(others):
                self._all_left.set()
        self._connection.set(self._key(f"beat/{self._rank}"), f"{beats} {self.progress}")
        if self._connection.check([self._key("verdict")]):
            self._end(self._get("verdict"))
        self._hear_of_exceptions()
        self._look_at_next()

    def _introduce(self) -> None:
        self._connection.set(self._key(f"process/{self._rank}"), self._own.write())
        near = {0, (self._rank + 1) % self._world_size, (self._rank - 1) % self._world_size}
        ranks = set(range(self._world_size)) if self._world_size <= _ALL_NAMED else near
        keys = {rank: self._key(f"process/{rank}") for rank in sorted(ranks - {self._rank})}
        if self._connection.check(list(keys.values())):
            found = self._connection.multi_get(list(keys.values()))
            self._others = {
                rank: Process.read(value.decode()) for rank, value in zip(keys, found, strict=True)
            }

    def _hear_of_exceptions(self) -> None:
        now = self._clock()
        for number in range(1, self._connection.add(self._key("raised"), 0) + 1):
            key = f"raising/{number}"
            if not self._connection.check([self._key(key)]):
                continue
            _, rank, count = self._get(key).split("/")
            which = (int(rank), int(count))
            if which[0] == self._rank or self._raised >= which[1]:
                continue  # this rank has raised as often, and handles it
            due = self._deadlines.setdefault(which, now + self._limits.grace_seconds)
            if now >= due:
                text = self._get(f"raised/{rank}/{count}")
                self._pronounce(f"rank {rank} raised, and the other ranks did not\n{text}")

    def _look_at_next(self) -> None:
        """Look at the next rank that has not left."""
        for offset in range(1, self._world_size):
            rank = (self._rank + offset) % self._world_size
            if rank not in self._left and self._connection.check([self._key(f"left/{rank}")]):
                self._left.add(rank)
            if rank not in self._left:
                break
        else:
            return
        now = self._clock()
        key = self._key(f"beat/{rank}")
        beat = self._get(f"beat/{rank}") if self._connection.check([key]) else ""
        if self._seen.get(rank, ("", 0.0))[0] != beat or rank not in self._seen:
            self._seen[rank] = (beat, now)
            return
        silent = now - self._seen[rank][1]
        process = self._others.get(rank)
        state = "unknown" if process is None else process.state(self._own)
        limit = self._silence * (self._limits.busy_factor if state == "lives" else 1.0)
        # One that is gone might have left just now: the next round would see it.
        if not beat or silent <= (3 * self._pause if state == "gone" else limit):
            return
        self._pronounce(self._describe(rank, state, silent))

    # ---------------------------------------------------------------- the clock

    def _watch_always(self) -> None:
        before = self._clock()
        while not self._ended.wait(self._pause):
            now = self._clock()
            self._excuse_all_after(before, now)
            before = now
            if self._lost_first is None and now - self._last_round > self._silence / 4:
                self._lost_first = self._lost_ranks()
            if now - self._last_round > self._silence:
                self._end(self._store_is_silent())
            stall = self._limits.stall_seconds
            still = now - self._moved[1]
            if self.progress != self._moved[0]:
                self._longest = max(self._longest, still) if self._moved[0] else 0.0
                self._moved = (self.progress, now)
            elif self._noticed != self.progress and still > self._notice_after():
                self._noticed = self.progress
                _LOG.warning(self._describe_place(still))
            elif stall is not None and self.progress and still > stall:
                self._send("verdict", f"{self._describe_stall(still)} (stall_seconds)")
                self._ended.wait(self._limits.grace_seconds)

    def _notice_after(self) -> float:
        """Seconds until a rank says where it is; steps from files may take many minutes."""
        return max(self._limits.notice_seconds, 3 * self._longest)

    def _excuse_all_after(self, before: float, now: float) -> None:
        """Start all clocks anew where this process was stopped itself, as then maybe all were."""
        if now - before <= self._pause + max(1.0, self._silence / 4):
            return
        self._last_round, self._lost_first = now, None
        self._moved = (self.progress, now)
        self._seen = {rank: (beat, now) for rank, (beat, _) in self._seen.items()}

    def _wait_for_store(self, error: Exception) -> None:
        """The store has gone; its process may have ended in peace, and this one be about to."""
        begin = time.monotonic()
        # Ranks that are lost later than at once were ended for the same reason as this one is.
        at_once = min(1.0, self._limits.grace_seconds / 2) if self._lost_first is None else 0.0
        lost = self._lost_first or []
        while True:
            passed = time.monotonic() - begin
            if not lost and passed < at_once:
                lost = self._lost_ranks()
            if passed >= self._limits.grace_seconds or self._ended.wait(self._pause):
                break
            self._last_round = self._clock()
            if self._leaving or not dist.is_initialized():
                return
        reason = str(error).partition("\n")[0]
        self._end("; ".join(lost) or f"the store that the ranks met in is gone ({reason})")

    def _store_is_silent(self) -> str:
        """Say why: a rank that was lost before it fell silent, as those lost later follow."""
        seconds = self._clock() - self._last_round
        return "; ".join(self._lost_first or []) or (
            f"the store that the ranks met in has not answered for {seconds:.0f} s: its process, "
            "its machine or the network to it is down"
        )

    # ---------------------------------------------------------------- verdicts

    def _pronounce(self, cause: str) -> None:
        self._connection.compare_set(self._key("verdict"), "", cause)
        self._end(self._get("verdict"))

    def _end(self, cause: str) -> None:
        """Say why, and end this process, which may be in the middle of anything."""
        if not self._ending.acquire(blocking=False):
            self._ended.wait()  # the other thread is at it, which ends the process
            return
        self._verdict = self._verdict or cause
        if self._raised:  # its own exception is on its way out
            self._ended.wait(self._limits.grace_seconds)
        if self._only_reports:
            _LOG.error("Rank %d: the job cannot go on. First cause: %s", self._rank, cause)
            self._ended.set()
            return
        stack = _main_stack()
        words = f"Rank {self._rank} is ended, as the job is. First cause: {cause}"
        if stack and not self._leaving:  # else it waits in leave(), which says nothing
            lines = "".join(traceback.format_list(stack[-8:]))
            words += f"\nRank {self._rank} was at\n{lines}"
        _LOG.error(words)
        self._clean_up()
        self._end_process(_EXIT_CODE)
        self._ended.set()

    def _lost_ranks(self) -> list[str]:
        """Name the ranks of this machine whose processes are gone or stopped."""
        found = []
        for rank, process in sorted(self._others.items()):
            state = process.state(self._own)
            if rank not in self._left and state in ("gone", "stopped"):
                found.append(self._describe(rank, state, None))
        return found

    def _describe(self, rank: int, state: str, silent: float | None) -> str:
        process = self._others.get(rank)
        who = f"rank {rank}" + ("" if process is None else f" ({process})")
        how = {
            "gone": "is gone without a word: it was killed, crashed, or called os._exit",
            "stopped": "is stopped (SIGSTOP, or suspended)",
            "lives": "runs, but nothing in Python does",
            "unknown": "does not beat: its machine, its network or its process is down",
        }[state]
        return f"{who} {how}" + ("" if silent is None else f", silent for {silent:.0f} s")

    def _describe_stall(self, seconds: float) -> str:
        ended = f"rank {self._rank} has ended no forward, backward or step for {seconds:.0f} s"
        return f"{ended}; it had ended {self.progress}"

    def _describe_place(self, seconds: float) -> str:
        stack = _main_stack()
        shown = [f for f in stack[:-3] if _is_told(f.filename)] + stack[-3:]
        frames = (f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in shown[-_FRAMES:])
        place = " > ".join(frames)
        return (
            f"{self._describe_stall(seconds)}. It is at {place}. If this is no long "
            "load, evaluation or save, the ranks wait for each other: a call that belongs on every "
            "rank was made on some. The option stall_seconds=1800 ends a job that stands so long."
        )

    def _key(self, name: str) -> str:
        return f"{_KEY}{self._name}/{name}"

    def _get(self, name: str) -> str:
        value: bytes = self._connection.get(self._key(name))
        return value.decode()


def _main_stack() -> list[traceback.FrameSummary]:
    """Where the main thread is, the innermost frame last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return [] if frame is None else list(traceback.extract_stack(frame))


def _is_told(file: str) -> bool:
    """Whether a frame of this file is the user's or ours."""
    paths = sysconfig.get_paths()
    libraries = (paths["stdlib"], paths["purelib"], paths["platlib"], "<")
    return "shardplug" in Path(file).parts or not file.startswith(libraries)
