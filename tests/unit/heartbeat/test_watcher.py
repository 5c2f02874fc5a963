"""What the ranks' watchers agree on; each test's watchers share one store in this process."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardplug.config import ZeroConfig
from shardplug.errors import ConfigError
from shardplug.watchdog import Limits
from shardplug.watchdog.processes import Process
from shardplug.watchdog.watcher import Watcher

STEP = 0.5
"""Seconds that a clock is moved on at once: less than what a watcher takes for its own stop."""

QUICK = Limits(silence_seconds=2.0, grace_seconds=2.0)


class Clock:
    """Stands still until it is moved on."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.asked: Counter[str] = Counter()
        self._changed = threading.Condition()

    def __call__(self) -> float:
        with self._changed:
            self.asked[threading.current_thread().name] += 1
            self._changed.notify_all()
            return self.now

    def advance(self, seconds: float, threads: list[threading.Thread]) -> None:
        """Move on in steps, at each of which these threads look, and act on what they see."""
        for _ in range(round(seconds / STEP)):
            with self._changed:
                self.now += STEP
                # Of a round that asks up to four times, so that a whole one lies between.
                goals = [(thread, self.asked[thread.name] + 8) for thread in threads]
            for thread, goal in goals:
                deadline = time.monotonic() + 20
                while thread.is_alive() and self.asked[thread.name] < goal:
                    assert time.monotonic() < deadline, f"{thread.name} stands still"
                    with self._changed:
                        self._changed.wait(0.1)


def _said(caplog: pytest.LogCaptureFixture) -> str:
    """What was logged since the last call."""
    text = "\n".join(record.getMessage() for record in caplog.records)
    caplog.clear()
    return text


class Group:
    """Watchers of one group; an ended one is noted instead of ending the process."""

    def __init__(self, world_size: int, limits: Limits, *, only_reports: bool = False) -> None:
        self.clock = Clock()
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10), wait_for_workers=False
        )
        self.ended: dict[int, float] = {}
        self.changed = threading.Condition()
        self.watchers = [
            Watcher(
                self.store,
                rank,
                world_size,
                limits,
                only_reports=only_reports,
                end=self._note(rank),
                clock=self.clock,
            )
            for rank in range(world_size)
        ]
        for rank, watcher in enumerate(self.watchers):
            watcher._pause = 0.02
            watcher.start()
            for thread in watcher._threads:
                thread.name += f" {rank}"
        self.advance(1.0)
        assert all(watcher._seen and watcher._others for watcher in self.watchers)

    def advance(self, seconds: float, *, hang: Sequence[str] = ()) -> None:
        """Let time pass for all that still watch, but for threads that are known to hang."""
        threads = [t for watcher in self.watchers for t in watcher._threads if t.name not in hang]
        self.clock.advance(seconds, threads)

    def _note(self, rank: int) -> Any:
        def end(code: int) -> None:
            assert code != 0
            with self.changed:
                self.ended[rank] = self.clock.now
                self.changed.notify_all()

        return end

    def wait(self, ranks: set[int], seconds: float = 10.0) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: set(self.ended) >= ranks, seconds), self.ended

    def close(self) -> None:
        for watcher in self.watchers:
            watcher._leaving = True
            watcher._ended.set()
            watcher._wake.set()


@pytest.fixture(autouse=True)
def in_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)


@pytest.fixture
def three() -> Iterator[Group]:
    group = Group(3, QUICK)
    yield group
    group.close()


def test_the_rank_with_the_store_stays_until_the_others_have_left(three: Group) -> None:
    three.watchers[2].leave()
    three.watchers[0]._leaving = True  # its round looks who is left, and one is
    three.watchers[0]._wake.set()
    three.advance(STEP)
    assert not three.watchers[0]._all_left.is_set()
    three.watchers[1].leave()
    three.watchers[0].leave()
    assert three.watchers[0]._all_left.wait(5) and not three.ended


def test_ranks_that_beat_and_ranks_that_leave_are_no_alarm(three: Group) -> None:
    three.watchers[1].leave()
    three.advance(3.0)
    assert three.ended == {}
    assert 1 in three.watchers[0]._left


def test_an_uncaught_exception_ends_every_rank_with_it(
    three: Group, caplog: pytest.LogCaptureFixture
) -> None:
    three.watchers[1].tell_died("ValueError: the cause", may_follow=False)
    three.wait({0, 2})
    printed = _said(caplog)
    assert printed.count("ValueError: the cause") >= 2
    assert "First cause: rank 1 (process" in printed
    assert "Rank 0 was at" in printed and "Rank 2 was at" in printed


def test_a_rank_that_is_leaving_does_not_say_where_it_waits(
    three: Group, caplog: pytest.LogCaptureFixture
) -> None:
    three.watchers[0]._leaving = True
    three.watchers[1].tell_died("ValueError: the cause", may_follow=False)
    three.wait({0, 2})
    printed = _said(caplog)
    assert "Rank 0 is ended" in printed and "Rank 2 was at" in printed
    assert "Rank 0 was at" not in printed


def test_an_exception_on_one_rank_only_ends_the_others_after_the_grace(
    three: Group, caplog: pytest.LogCaptureFixture
) -> None:
    three.watchers[2].tell_raised("ValueError: only here")
    three.advance(1.0)
    assert three.ended == {}
    three.advance(2.0)
    three.wait({0, 1})
    assert "rank 2 raised, and the other ranks did not\nValueError" in _said(caplog)


def test_an_exception_on_every_rank_is_left_to_them(three: Group) -> None:
    for watcher in three.watchers:
        watcher.tell_raised("ValueError: everywhere")
    three.advance(3.0)
    assert three.ended == {}
    three.watchers[0].tell_raised("ValueError: the second, only here")
    three.advance(3.0)
    three.wait({1, 2})


def test_silence_on_another_machine_ends_the_job_after_the_limit(
    three: Group, caplog: pytest.LogCaptureFixture
) -> None:
    silent = three.watchers[1]
    for other in (0, 2):
        known = three.watchers[other]._others
        known[1] = dataclasses.replace(known[1], host="elsewhere")
    silent._leaving = True
    silent._ended.set()
    three.advance(1.5)
    assert three.ended == {}
    three.advance(1.5)
    three.wait({0, 2})
    assert "rank 1 (process" in (printed := _said(caplog))
    assert "on elsewhere) does not beat" in printed


def test_silence_of_a_process_that_runs_here_is_borne_longer(three: Group) -> None:
    silent = three.watchers[1]  # this process: it lives
    silent._leaving = True
    silent._ended.set()
    three.advance(3.0)
    assert three.ended == {}


def test_a_rank_that_was_stopped_itself_accuses_nobody(three: Group) -> None:
    watcher = three.watchers[0]
    now = three.clock.now
    watcher._seen[1] = (watcher._seen[1][0], now - 100)
    watcher._excuse_all_after(now - 100, now)
    assert now - watcher._seen[1][1] < 1


@pytest.fixture
def silent_store() -> Iterator[Group]:
    """The store does not answer rank 0 any more."""
    group = Group(3, dataclasses.replace(QUICK, grace_seconds=0.3))
    watcher = group.watchers[0]
    asleep = threading.Event()
    watcher._round = lambda beats: asleep.wait(30)  # type: ignore[assignment,return-value,method-assign]
    group.advance(STEP, hang=HUNG)  # the round under way ends
    yield group
    asleep.set()
    group.close()


HUNG = ("shardplug-beat 0",)


def test_a_silent_store_ends_the_rank_that_asks_it(
    silent_store: Group, caplog: pytest.LogCaptureFixture
) -> None:
    silent_store.advance(3.0, hang=HUNG)
    silent_store.wait({0})
    assert re.search(r"has not answered for [2-5] s", _said(caplog))


def test_a_rank_lost_before_the_store_was_silent_is_the_cause(
    silent_store: Group, caplog: pytest.LogCaptureFixture
) -> None:
    _lose(silent_store.watchers[0], 1)
    silent_store.advance(3.0, hang=HUNG)
    silent_store.wait({0})
    assert re.search(r"First cause: rank 1 .* is gone", _said(caplog))


def test_a_rank_ended_for_the_silent_store_is_not_the_cause(
    silent_store: Group, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the link to the store's node is cut: both ranks of a node end for it."""
    watcher = silent_store.watchers[0]
    silent_store.advance(1.0, hang=HUNG)
    _lose(watcher, 1)  # the first of the two ended, and the other sees a closed connection
    watcher.tell_died("RuntimeError: Connection closed by peer", may_follow=True)
    silent_store.advance(2.0, hang=HUNG)
    silent_store.wait({0})
    printed = _said(caplog)
    assert printed.count("First cause: the store that the ranks met in has not answered") == 2
    assert "is gone" not in printed


def test_a_rank_ended_by_a_verdict_is_not_the_cause(
    three: Group, caplog: pytest.LogCaptureFixture
) -> None:
    three.watchers[1]._send("verdict", "rank 5 does not beat")
    _lose(three.watchers[2], 1)
    three.watchers[2].tell_died("RuntimeError: Connection closed by peer", may_follow=True)
    three.wait({0, 1, 2})
    printed = _said(caplog)
    assert "First cause: rank 5 does not beat" in printed
    assert "is gone" not in printed


def _lose(watcher: Watcher, rank: int) -> None:
    watcher._others[rank] = dataclasses.replace(watcher._others[rank], started="1")


def test_a_stall_is_an_alarm_only_when_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    group = Group(2, dataclasses.replace(QUICK, stall_seconds=2.0))
    group.advance(2.5)
    assert group.ended == {}  # not before the first phase: compiling takes its time
    for watcher in group.watchers:
        watcher.progress = 7
    group.advance(3.0)
    group.wait({0, 1})
    assert "has ended no forward, backward or step for" in _said(caplog)
    group.close()


def test_ranks_that_do_not_come_on_say_where_they_are(caplog: pytest.LogCaptureFixture) -> None:
    group = Group(2, dataclasses.replace(QUICK, notice_seconds=2.0))
    group.advance(2.5)
    assert "has ended no" not in _said(caplog), "not before the first phase"
    group.watchers[1].progress = 7
    group.advance(5.5)
    said = _said(caplog)
    assert said.count("has ended no forward, backward or step") == 1, said
    assert re.search(r"rank 1 has ended no forward, backward or step for [2-5] s", said), said
    assert "test_watcher.py" in said and "stall_seconds=1800" in said
    assert "site-packages" not in said and group.ended == {}
    group.watchers[1].progress = 8  # it came on after more than 4 s, and stands again
    group.advance(3.5)
    assert "has ended no" not in _said(caplog), "it has been slower before"
    assert group.watchers[1]._notice_after() > 12
    group.watchers[1]._longest = 0.5
    group.advance(STEP)
    assert "rank 1 has ended no forward" in _said(caplog)
    group.close()


def test_a_process_is_told_from_a_later_one_with_its_number() -> None:
    here = Process.own()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        started = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        process = Process(here.host, child.pid, started)
        assert process.state(here) == "lives"
        child.send_signal(19)
        deadline = time.monotonic() + 10
        while process.state(here) != "stopped":
            assert time.monotonic() < deadline
        assert dataclasses.replace(process, started="1").state(here) == "gone"
        assert dataclasses.replace(process, host="elsewhere").state(here) == "unknown"
        child.kill()
        child.wait(10)
        assert process.state(here) == "gone"
    finally:
        child.kill()
        child.wait()


def test_limits_that_are_too_short_are_refused() -> None:
    with pytest.raises(ConfigError, match="Expected silence_seconds of 2 seconds or more"):
        Limits(silence_seconds=0.5)
    for options in ({"watchdog": "kill"}, {"silence_seconds": 1}, {"stall_seconds": float("inf")}):
        with pytest.raises(ConfigError, match="Expected (watchdog|silence_seconds|stall_seconds)"):
            ZeroConfig(**options)  # type: ignore[arg-type]


def test_a_job_is_only_reported_where_it_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    group = Group(2, QUICK, only_reports=True)
    group.advance(1.0)
    group.watchers[0].tell_died("ValueError: the cause", may_follow=False)
    group.advance(3.0)
    assert "Rank 1: the job cannot go on. First cause: rank 0" in _said(caplog)
    assert group.ended == {}
    group.close()
