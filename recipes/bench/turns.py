"""Contenders of a benchmark that live side by side, on ranks of their own, and take turns.

The parent makes a `Contender` of each and tells it when to step; its ranks run a script that ends
in a loop over `Turns`. A few steps each in turn, so that a change of the machine's load meets all
of them; memory is each process's own peak (VmHWM), which is why they do not share processes.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch


class Contender:
    """The ranks of one side, which run steps when they are told to.

    Args:
        name: What the worker knows it by: its first argument.
        worker: The script that each rank runs.
        ranks: How many there are.
        logs: Where what they print goes.
        arguments: Further arguments of the worker.
    """

    def __init__(
        self,
        name: str,
        worker: Path,
        ranks: int,
        logs: IO[str],
        arguments: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.step = 0
        self.losses: list[float] = []
        self.turns: list[list[float]] = []
        self.cpu: list[float] = []
        self.peak = 0.0
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._ranks = []
        for rank in range(ranks):
            environment = {
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0",
                "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
                "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false",
            }  # fmt: skip
            self._ranks.append(
                subprocess.Popen(
                    [sys.executable, str(worker), name, *arguments], env=environment, text=True,
                    bufsize=1, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=logs,
                )
            )  # fmt: skip

    def wait_until_ready(self) -> None:
        """Return when every rank has built its model and asks for its first batch."""
        self._replies()

    def _replies(self) -> list[dict[str, Any]]:
        found = []
        for rank in self._ranks:
            assert rank.stdout is not None
            line = rank.stdout.readline()
            if not line:
                raise RuntimeError(f"{self.name} has ended; see the log.")
            found.append(json.loads(line))
        return found

    def run(self, count: int, *, count_time: bool = True) -> None:
        """Run so many steps on all ranks. The slowest rank's time counts."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{self.step} {count}\n")
            rank.stdin.flush()
        self.step += count
        replies = self._replies()
        pick = range(count)
        self.losses += [statistics.fmean(r["losses"][i] for r in replies) for i in pick]
        if count_time:
            self.turns.append([max(r["seconds"][i] for r in replies) for i in pick])
            self.cpu += [statistics.fmean(r["cpu"][i] for r in replies) for i in pick]
        self.peak = max(self.peak, *(r["peak"] for r in replies))

    def close(self) -> None:
        """End the ranks."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
            try:
                rank.wait(30)
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()


class Turns:
    """What a rank loops over: the indices of the steps that its parent asks for.

    A step's time runs from its index being handed out to the next one being asked for, so that it
    includes whatever a framework does around the user's code. The process ends with its input.
    """

    def __init__(self) -> None:
        self._to_parent = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # some libraries write to where the replies go
        warnings.filterwarnings("ignore")
        torch.set_num_threads(1)
        self._losses: list[float] = []

    def loss(self, value: torch.Tensor | float) -> None:
        """Take the loss of the step that runs."""
        self._losses.append(float(value))

    def __iter__(self) -> Iterator[int]:
        print(json.dumps({"ready": True}), file=self._to_parent)
        for line in sys.stdin:
            first, count = map(int, line.split())
            seconds, used = [], []
            self._losses.clear()
            for index in range(first, first + count):
                begin, cpu = time.perf_counter(), time.process_time()
                yield index
                seconds.append(time.perf_counter() - begin)
                used.append(time.process_time() - cpu)
            reply = {"losses": self._losses, "seconds": seconds, "cpu": used, "peak": peak_mib()}
            print(json.dumps(reply), file=self._to_parent)
        os._exit(0)  # some threads of a contender may not end


def peak_mib() -> float:
    """The largest amount of memory that this process has held, in MiB."""
    with open("/proc/self/status") as file:
        return int(file.read().split("VmHWM:")[1].split()[0]) / 1024
