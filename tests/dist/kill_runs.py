"""Training runs that are killed: what goes on in their ranks; see kill_harness."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what every rank would import at its first step
import torch.distributed as dist

import shardplug.checkpoint.read.reader  # noqa: F401  (the same)
import shardplug.checkpoint.write.background  # noqa: F401  (the same)
from shardplug.checkpoint import resume_point
from shardplug.checkpoint.format import commit, durable
from shardplug.checkpoint.write import snapshot, writer
from tests.dist.checkpoint_runs import assert_equal, make_run, train
from tests.dist.checkpoint_runs import snapshot as state_of

RANKS = 2
SAVE_EVERY = 2
LAST_STEP = 40
KEEP = 2
CRASHED, WRONG = 3, 4
"""Exit codes of ranks: with an error as it must be, and with one that the harness looks for."""

PHASES = (
    "training",
    "between",
    "check",
    "open",
    "rest",
    "snapshot",
    "tensors",
    "manifest",
    "renames",
    "after",
    "retention",
)
"""Of a save, in their order; "between" is any moment of a save that is none of the others."""


class Board:
    """Whole numbers that every process of a launch sees."""

    _NAMES = (
        *("launcher", "phase", "saves", "save_began", "save_ended", "killed_at", "kill_phase"),
        *(f"{name}_{rank}" for name in ("pid", "reported", "resumed") for rank in range(RANKS)),
    )

    def __init__(self) -> None:
        self._numbers = memoryview(mmap.mmap(-1, 8 * len(self._NAMES))).cast("q")

    def __getitem__(self, name: str) -> int:
        return self._numbers[self._NAMES.index(name)]

    def __setitem__(self, name: str, value: int) -> None:
        self._numbers[self._NAMES.index(name)] = value

    @property
    def reported(self) -> int:
        """The newest step whose save has returned on some rank."""
        return max(self[f"reported_{rank}"] for rank in range(RANKS))


@dataclass(frozen=True, kw_only=True)
class Course:
    """How a run in one folder trains and saves."""

    folder: Path
    reference: Path
    stage: int = 3
    asynchronous: bool = False
    in_place: bool = False
    """Every save goes to one path; otherwise each has its own, and the last KEEP stay."""

    @property
    def mode(self) -> str:
        where = "one path" if self.in_place else f"last {KEEP}"
        return f"{'async' if self.asynchronous else 'sync'}, {where}"


@dataclass(frozen=True, kw_only=True)
class Kill:
    """When to kill, and what."""

    victim: str
    save: int
    """Which save of the launch, from 1."""

    rank: int = 0
    """The one that is killed, and whose system calls are counted."""

    call: tuple[str, str, int] | None = None
    """Phase, name and number of a system call."""

    after_seconds: float = 0.0
    """From the start of the save, where no call is given."""


class Watch:
    """Follows a rank's saves: phases and system calls, and the kill that is planned."""

    def __init__(self, board: Board, rank: int, folder: Path, kill: Kill | None) -> None:
        self.seen: Counter[tuple[str, str]] = Counter()
        self.history: Counter[tuple[str, str]] = Counter()
        self.phase = "training"
        self._board, self._rank, self._folder, self._kill = board, rank, str(folder), kill
        for owner, name, phase in (
            (writer, "check_agreement", "check"),
            (writer.StagingFolder, "open", "open"),
            (writer.CheckpointWrite, "_write_rest", "rest"),
            (snapshot.Snapshot, "__init__", "snapshot"),
            (writer.CheckpointWrite, "_write_tensors", "tensors"),
            (writer.CheckpointWrite, "_publish", "manifest"),
            (writer.StagingFolder, "publish", "renames"),
            (commit, "_remove", "after"),
        ):
            setattr(owner, name, self._in_phase(getattr(owner, name), phase))
        durable._SummingStream.write = self._counted("write", durable._SummingStream.write)
        os.fsync = self._counted("fsync", os.fsync)
        sys.addaudithook(self._audit)

    def begin_save(self) -> None:
        self.seen.clear()
        if self._rank == 0:
            self._board["save_began"] = time.monotonic_ns()
            self._board["saves"] += 1

    def enter(self, phase: str) -> None:
        self.phase = phase
        if self._rank == 0:
            self._board["phase"] = PHASES.index(phase)

    def _in_phase(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def inside(*args: Any, **kwargs: Any) -> Any:
            before = self.phase
            # A leftover is removed when a save opens, the replaced folder after it is published.
            self.enter(before if (phase, before) == ("after", "open") else phase)
            try:
                return function(*args, **kwargs)
            finally:
                self.enter(before)

        return inside

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._count(name)
            return function(*args, **kwargs)

        return call

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir"):
            path = args[0]
            # Below a folder that is removed, names are relative to it.
            if isinstance(path, (str, os.PathLike)) and (
                os.fspath(path).startswith(self._folder)
                or (event in ("os.remove", "os.rmdir") and not os.path.isabs(path))
            ):
                self._count(event)

    def _count(self, name: str) -> None:
        key = (self.phase, name)
        self.seen[key] += 1
        self.history[key] = max(self.history[key], self.seen[key])
        kill = self._kill
        if kill is None or kill.rank != self._rank or kill.save != self._board["saves"]:
            return
        if kill.call == (*key, self.seen[key]):
            self._board["kill_phase"] = PHASES.index(self.phase)
            strike(self._board, kill)


def strike(board: Board, kill: Kill) -> None:
    """Kill; the process that is killed itself comes last."""
    board["killed_at"] = time.monotonic_ns()
    if kill.victim in ("launcher", "orphans"):
        victims = [board["launcher"]]
    elif kill.victim == "one":
        victims = [board[f"pid_{kill.rank}"]]
    else:
        victims = [board[f"pid_{1 - kill.rank}"], board[f"pid_{kill.rank}"]]
    for pid in victims:
        if pid != os.getpid():
            os.kill(pid, signal.SIGKILL)
    if os.getpid() in victims:
        os.kill(os.getpid(), signal.SIGKILL)


class Trainee:
    """One rank of a launch."""

    def __init__(self, course: Course, board: Board, watch: Watch) -> None:
        self.course, self._board, self._watch = course, board, watch
        self.rank = dist.get_rank()
        self.run = make_run("plain", course.stage)
        self.step = 0
        self._saving: int | None = None
        self._saves = 0

    def resume(self, expected: dict[int, dict[str, Any]]) -> None:
        """Go on from what is in the folder, after a look at it."""
        floor = self._board.reported
        point = resume_point(self.course.folder, verify=True, warn=False)
        if point is None:
            check(floor == 0, f"nothing to resume from, but step {floor} was saved")
            return
        optimizers = [self.run.optimizer]
        self.step = self.run.engine.load(point.path, optimizers=optimizers)["step"]
        check(self.step >= floor, f"resumed from step {self.step}, but {floor} was saved")
        assert_equal(expected[self.step], state_of(self.run.model, self.run.optimizer), self.step)
        self._board[f"resumed_{self.rank}"] = self.step

    def go_on(self, until: int, keep_states: dict[int, dict[str, Any]] | None = None) -> None:
        """Train, and save every second step."""
        while self.step < until:
            train(self.run, [self.step])
            self.step += 1
            self._look_at_background()
            if keep_states is not None:
                keep_states[self.step] = state_of(self.run.model, self.run.optimizer)
            if self.step % SAVE_EVERY == 0:
                self._save()
        self.run.engine.wait_for_save()
        self._look_at_background()

    def _save(self) -> None:
        course = self.course
        if self._saving is not None:
            self.run.engine.wait_for_save()
            self._look_at_background()
        self._watch.begin_save()
        dist.barrier()  # the other rank looks at what rank 0 has noted
        self._watch.enter("between")
        self.run.engine.save(
            course.folder / ("last" if course.in_place else f"step-{self.step:04}"),
            optimizers=[self.run.optimizer],
            extra={"step": self.step},
            async_save=course.asynchronous,
        )
        self._saves += 1
        if course.asynchronous:
            self._saving = self.step
            if self.rank == 0:
                self.run.engine.background.after(self._published)
        else:
            self._board[f"reported_{self.rank}"] = self.step
            if self.rank == 0:
                self._published()
            self._watch.enter("training")

    def _look_at_background(self) -> None:
        if self._saving is not None and not self.run.engine.background.is_pending:
            self._board[f"reported_{self.rank}"] = self._saving
            self._saving = None
            self._watch.enter("training")

    def _published(self) -> None:
        """Keep the last few, as any run does."""
        self._board["save_ended"] = time.monotonic_ns()
        names = sorted(os.listdir(self.course.folder))
        left = [name for name in names if name.startswith(".")]
        check(not left, f"a save left {left}")
        if not self.course.in_place:
            self._watch.enter("retention")
            for name in names[:-KEEP]:
                shutil.rmtree(self.course.folder / name)


def check(true: bool, text: str) -> None:
    if not true:
        raise AssertionError(text)


def rank_main(
    rank: int, board: Board, course: Course, kill: Kill | None, store: Path, until: int
) -> int:
    """Run one rank; returns its exit code."""
    torch.set_num_threads(1)
    watch = Watch(board, rank, course.folder, kill)
    group = {"rank": rank, "world_size": RANKS, "timeout": timedelta(seconds=60)}
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", **group)
        trainee = Trainee(course, board, watch)
        expected = torch.load(course.reference) if course.reference.exists() else {}
        trainee.resume(expected)
        states: dict[int, dict[str, Any]] | None = None if expected else {}
        if kill is not None:  # enough to reach the save that is hit
            until = min(until, trainee.step + SAVE_EVERY * (kill.save + 1))
        trainee.go_on(until, states)
        if states is not None and rank == 0:
            torch.save(states, course.reference)
        calls = {f"{phase}:{name}": n for (phase, name), n in watch.history.items()}
        store.with_name(f"calls-{rank}.json").write_text(json.dumps(calls))
    except AssertionError:
        traceback.print_exc()
        return WRONG
    except Exception as error:
        traceback.print_exc()
        kind = type(error).__name__
        store.with_name(f"error-{rank}").write_text(f"{kind}: {error}")
        return CRASHED
    finally:
        for thread in threading.enumerate():  # as the interpreter does before it ends
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()
    dist.destroy_process_group()
    return 0
