"""Kills training runs at every moment of a save, and resumes them.

    python -m tests.dist.kill_harness --kills 200

Two gloo ranks under a launcher train a small model and save every two steps. Each round kills one
rank, all ranks or the launcher: half of the time just before a chosen system call of a save, so
that every phase is met on purpose, and half of the time at a random moment. Then the run is
started again in the same folder. It must find a whole checkpoint, not older than the last save
that had returned, whose weights and optimizer state are, bit for bit, those that a run without
kills has at that step; it removes what the killed save left; and it is killed again.

The ranks are forked from this process, which has imported torch and started no threads, so that
a round takes about a second of CPU time and not fifteen.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from shardplug.checkpoint import resume_point
from tests.dist.kill_runs import (
    CRASHED,
    LAST_STEP,
    PHASES,
    RANKS,
    SAVE_EVERY,
    WRONG,
    Board,
    Course,
    Kill,
    check,
    rank_main,
    strike,
)

VICTIMS = ("one", "all", "launcher", "orphans")
"""One rank; all ranks; the launcher and with it the ranks; the launcher alone, ranks go on."""

STAGES = (3, 1, 2)
MODES = 4
LIMIT_SECONDS = 30.0
"""How long a rank may go on after another one was killed."""


@dataclass
class Tally:
    """What has been seen."""

    kills: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    missed: int = 0
    resumed_unpublished: int = 0
    survivors: Counter[str] = field(default_factory=Counter)
    slowest_survivor_seconds: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.kills.values())


def fork(action: Callable[[], int], log: Path) -> int:
    """Run `action` in a new process that ends with the code it returns."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with log.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        code = action()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


class Launch:
    """A launcher process with its ranks."""

    def __init__(self, course: Course, board: Board, kill: Kill | None, until: int) -> None:
        self.course, self.kill = course, kill
        self.home = Path(tempfile.mkdtemp(prefix="launch-"))
        self._board, self._until = board, until
        board["saves"] = board["save_began"] = board["killed_at"] = 0
        for rank in range(RANKS):
            board[f"resumed_{rank}"] = 0
        self.codes: dict[int, int] = {}
        board["launcher"] = fork(self._launcher, self.home / "log")

    def _launcher(self) -> int:
        bound = self.kill is None or self.kill.victim != "orphans"
        for rank in range(RANKS):
            self._board[f"pid_{rank}"] = fork(partial(self._rank, rank, bound), self.home / "log")
        for _ in range(RANKS):
            pid, status = os.wait()
            self._note_code(pid, os.waitstatus_to_exitcode(status))
        return 0

    def _rank(self, rank: int, bound: bool) -> int:
        if bound:  # as a container's ranks end with its first process
            prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            if os.getppid() == self.harness:
                return CRASHED
        return rank_main(
            rank, self._board, self.course, self.kill, self.home / "store", self._until
        )

    harness = os.getpid()

    def finish(self) -> float:
        """Wait until all processes have ended; return the seconds since the kill."""
        deadline = time.monotonic() + 120
        waiting = {self._board["launcher"]}
        while waiting:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                if time.monotonic() > deadline:
                    raise AssertionError(f"{waiting} did not end. {self.log()}")
                self._strike_when_time()
                time.sleep(0.0005)
                continue
            code = os.waitstatus_to_exitcode(status)
            if pid == self._board["launcher"] and code < 0:
                waiting |= {self._board[f"pid_{r}"] for r in range(RANKS) if not self._code(r)}
            elif pid != self._board["launcher"]:
                self._note_code(pid, code)
            waiting.discard(pid)
        for rank in range(RANKS):
            self.codes[rank] = int(self._code(rank))
        killed_at = self._board["killed_at"]
        return (time.monotonic_ns() - killed_at) / 1e9 if killed_at else 0.0

    def _note_code(self, pid: int, code: int) -> None:
        rank = [self._board[f"pid_{rank}"] for rank in range(RANKS)].index(pid)
        (self.home / f"code-{rank}").write_text(str(code))

    def _code(self, rank: int) -> str:
        file = self.home / f"code-{rank}"
        return file.read_text() if file.exists() else ""

    def _strike_when_time(self) -> None:
        board, kill = self._board, self.kill
        if kill is None:
            return
        now = time.monotonic_ns()
        if board["killed_at"]:
            if kill.victim == "orphans":
                self._look_beside_the_living(now)
        elif kill.call is None and board["saves"] == kill.save:
            if now - board["save_began"] >= kill.after_seconds * 1e9:
                board["kill_phase"] = board["phase"]
                strike(board, kill)

    def _look_beside_the_living(self, now: int) -> None:
        """Another process resumes while the orphans go on; then they go too."""
        floor = self._board.reported
        point = resume_point(self.course.folder, verify=True, warn=False)
        check(floor == 0 or point is not None, f"nothing whole beside orphans, {floor} was saved")
        if now - self._board["killed_at"] > 0.3e9:
            for rank in range(RANKS):
                if not self._code(rank):
                    with suppress(ProcessLookupError):  # it may end just now
                        os.kill(self._board[f"pid_{rank}"], signal.SIGKILL)

    def log(self) -> str:
        return (self.home / "log").read_text()

    def close(self) -> None:
        shutil.rmtree(self.home)


class Harness:
    """Rounds of killing and resuming.

    Args:
        seed: Of what is killed when.
        say: Where progress goes.
    """

    def __init__(self, seed: int, say: Callable[[str], None]) -> None:
        prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: a killed launcher's ranks become children
        self.tally = Tally()
        self._random = random.Random(seed)
        self._say = say
        self._home = Path(tempfile.mkdtemp(prefix="kills-"))
        self._calls: dict[str, list[dict[str, int]]] = {}
        self._lengths: dict[str, float] = {}

    def run(self, kills: int) -> None:
        """Kill so many times, and resume each time."""
        try:
            number = 0
            while self.tally.total < kills:
                stage = STAGES[number // MODES % len(STAGES)]
                course = self._course(number % MODES, stage, f"folder-{number}")
                if not course.reference.exists():
                    self._learn_states(stage)
                if course.mode not in self._calls:
                    self._learn_saves(self._course(number % MODES, stage, f"learn-{number}"))
                enough = min(kills, self.tally.total + max(2, kills // 10))
                self._one_folder(course, enough)
                shutil.rmtree(course.folder)
                number += 1
        finally:
            shutil.rmtree(self._home, ignore_errors=True)

    def _course(self, mode: int, stage: int, name: str) -> Course:
        folder = self._home / name
        folder.mkdir()
        return Course(
            folder=folder,
            reference=self._home / f"reference-{stage}",
            stage=stage,
            asynchronous=mode % 2 == 1,
            in_place=mode >= 2,
        )

    def _learn_states(self, stage: int) -> None:
        """Train once without kills, for the states that are right."""
        course = self._course(0, stage, f"states-{stage}")
        self._launch_to_the_end(course, Board(), LAST_STEP)

    def _learn_saves(self, course: Course) -> None:
        """Learn which system calls a save makes, and how long it takes."""
        board = Board()
        self._calls[course.mode] = self._launch_to_the_end(course, board, 2 * SAVE_EVERY)
        self._lengths[course.mode] = (board["save_ended"] - board["save_began"]) / 1e9
        self._say(f"{course.mode}: a save takes {self._lengths[course.mode]:.3f} s")

    def _launch_to_the_end(self, course: Course, board: Board, until: int) -> list[dict[str, int]]:
        """Launch without a kill; return for each rank the calls that a save has made."""
        launch = Launch(course, board, None, until)
        launch.finish()
        check(set(launch.codes.values()) == {0}, f"{course}, to the end\n{launch.log()}")
        calls = [json.loads((launch.home / f"calls-{r}.json").read_text()) for r in range(RANKS)]
        launch.close()
        return calls

    def _plan(self, mode: str) -> Kill:
        random_ = self._random
        victim, save = random_.choice(VICTIMS), random_.choice((1, 1, 2, 3))
        if random_.random() < 0.5:
            seconds = random_.uniform(0, 1.2 * self._lengths[mode])
            rank = random_.randrange(RANKS)
            return Kill(victim=victim, save=save, rank=rank, after_seconds=seconds)
        calls = [
            (rank, *name.split(":"), n)
            for rank, found in enumerate(self._calls[mode])
            for name, n in found.items()
            if not name.startswith("training")
        ]
        phases = sorted({call[1] for call in calls})
        phase = random_.choice([*phases, "renames", "renames"])  # the shortest that counts most
        rank, phase, name, n = random_.choice([call for call in calls if call[1] == phase])
        call = (phase, name, random_.randint(1, n))
        return Kill(victim=victim, save=save, rank=rank, call=call)

    def _one_folder(self, course: Course, enough: int) -> None:
        """Kill in one folder until so many kills were seen, or the run is at its end."""
        board = Board()
        while self.tally.total < enough:
            kill = self._plan(course.mode)
            launch = Launch(course, board, kill, LAST_STEP)
            seconds = launch.finish()
            where = f"{course}, {kill}, codes {launch.codes}"
            check(WRONG not in launch.codes.values(), f"{where}\n{launch.log()}")
            if not board["killed_at"]:
                self.tally.missed += 1
                check(set(launch.codes.values()) == {0}, f"{where}\n{launch.log()}")
            else:
                self._judge(course, kill, launch, board, seconds, where)
            launch.close()
            if self._step(board) > LAST_STEP - 4 * SAVE_EVERY:
                break
        self._launch_to_the_end(course, board, self._step(board) + 2 * SAVE_EVERY)

    def _step(self, board: Board) -> int:
        return max(board["resumed_0"], board.reported)

    def _judge(
        self, course: Course, kill: Kill, launch: Launch, board: Board, seconds: float, where: str
    ) -> None:
        phase = PHASES[board["kill_phase"]]
        self.tally.kills[course.mode, kill.victim, phase] += 1
        if kill.victim == "one":
            other = 1 - kill.rank
            file = launch.home / f"error-{other}"
            if launch.codes[other] == CRASHED:
                text = file.read_text()
                self.tally.survivors[text.partition(":")[0]] += 1
                self.tally.slowest_survivor_seconds = max(
                    self.tally.slowest_survivor_seconds, seconds
                )
                outside = {"training", "retention"}
                if kill.call is None:  # the phase is rank 0's; the other may not be in the save
                    outside.add("between")
                if not course.asynchronous and phase not in outside:
                    known = text.startswith("CheckpointError")
                    check(known, f"{where}\n{text}\n{launch.log()}")
            else:
                check(launch.codes[other] == 0, f"{where}\n{launch.log()}")
                self.tally.survivors["ended well"] += 1
            check(seconds < LIMIT_SECONDS, f"{where}: the other rank took {seconds:.1f} s")
        floor = board.reported
        point = resume_point(course.folder, verify=True, warn=False)
        check(floor == 0 or point is not None, f"{where}: nothing whole, but {floor} was saved")
        if point is not None and point.path.name.startswith("."):
            self.tally.resumed_unpublished += 1
        if self.tally.total % 20 == 0:
            self._say(f"{self.tally.total} kills")


def report(tally: Tally, seconds: float) -> str:
    """Return the numbers as text."""
    lines = [f"{tally.total} kills, all resumed, in {seconds:.0f} s"]
    for index, title in ((0, "saves"), (1, "killed"), (2, "in phase")):
        count: Counter[str] = Counter()
        for key, number in tally.kills.items():
            count[key[index]] += number
        parts = ", ".join(f"{name} {number}" for name, number in sorted(count.items()))
        lines.append(f"  {title}: {parts}")
    lines.append(
        f"  ranks that were left: {dict(tally.survivors)}, the last ended "
        f"{tally.slowest_survivor_seconds:.1f} s after the kill"
    )
    lines.append(
        f"  found under a name not yet, or no longer, published: {tally.resumed_unpublished}\n"
        f"  launches that ended before their kill, not counted: {tally.missed}"
    )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    began = time.monotonic()
    harness = Harness(options.seed, lambda text: print(text, flush=True))
    harness.run(options.kills)
    print(report(harness.tally, time.monotonic() - began))


if __name__ == "__main__":
    main()
