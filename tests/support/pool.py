"""Resident gloo ranks: start a process once, run many tests in it.

A fresh pair of processes costs about 7 CPU seconds of imports, a resident one almost nothing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

MAX_RANKS = 4


class RankError(AssertionError):
    """A rank raised, hung or died; the message holds the first one's traceback or stack."""


class _Worker(NamedTuple):
    process: Any
    pipe: Connection
    stacks: Path
    """Where it writes its threads' stacks when it is ended, or asked to."""


class RankPool:
    """Runs module-level functions on the first `world_size` of a few resident processes."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []

    def run(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 100.0,
        group_timeout: float = 60.0,
        expect_death: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank, with the default process group up.

        Args:
            fn: A function that pickle finds by name.
            world_size: Number of ranks, 1 to 4.
            timeout: Seconds until the ranks are killed and the test fails.
            group_timeout: Seconds that a collective waits for its peers.
            expect_death: Return None for ranks that died instead of failing.

        Returns:
            What each rank returned, by rank.
        """
        self._start(world_size)
        chosen = self._workers[:world_size]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        store = tempfile.mkdtemp(prefix="ranks-")
        job = pickle.dumps((fn, args, kwargs))
        for rank, worker in enumerate(chosen):
            worker.pipe.send(
                (rank, world_size, port, os.path.join(store, "store"), group_timeout, job)
            )
        results: list[Any] = [None] * world_size
        errors: list[tuple[int, str]] = []
        died = False
        waiting = {worker.pipe: rank for rank, worker in enumerate(chosen)}
        while waiting:
            ready = wait(list(waiting), timeout=timeout if not errors else 20.0)
            if not ready:
                stuck = sorted(waiting.values())
                text = errors[0][1] if errors else "no rank raised"
                text += "".join(_where(rank, chosen[rank]) for rank in stuck)
                self.close()
                raise RankError(f"Ranks {stuck} hung; first error: {text}")
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                try:
                    ok, value = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    died = True
                    ok, value = expect_death, None
                    if not expect_death:
                        process, _, stacks = chosen[rank]
                        process.join(5)
                        value = f"the process died, code {process.exitcode}\n{stacks.read_text()}"
                if ok:
                    results[rank] = value
                else:
                    errors.append((rank, value))
        if errors or died:
            self.close()
        if errors:
            rank, text = errors[0]
            for other, its in errors[1:]:
                text += f"\nRank {other}, later: ...{its[-1000:]}"
            raise RankError(f"Rank {rank} of {world_size} failed ({len(errors)} did):\n{text}")
        return results

    def _start(self, count: int) -> None:
        if not 1 <= count <= MAX_RANKS:
            raise ValueError(f"Expected 1 to {MAX_RANKS} ranks, got {count}.")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed.checkpoint", "shardplug"])
        while len(self._workers) < count:
            ours, theirs = context.Pipe()
            stacks = Path(tempfile.mkdtemp(prefix="stacks-"), "stacks")
            process = context.Process(target=_serve, args=(theirs, stacks), daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours, stacks))

    def close(self) -> None:
        """End every worker; the next run starts new ones."""
        for process, pipe, _ in self._workers:
            pipe.close()
            process.terminate()
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        self._workers.clear()


def _where(rank: int, worker: _Worker) -> str:
    """Return the stacks of a rank that hangs."""
    os.kill(worker.process.pid, signal.SIGUSR1)
    time.sleep(1)
    return f"\nRank {rank} was at:\n{worker.stacks.read_text()[-6000:]}"


def _serve(pipe: Connection, stacks: Path) -> None:
    import torch
    import torch.distributed as dist

    crash = stacks.open("w")
    faulthandler.enable(crash)
    faulthandler.register(signal.SIGUSR1, crash)
    torch.set_num_threads(1)
    home = tempfile.mkdtemp(prefix="rank-home-")
    os.chdir(home)
    while True:
        try:
            rank, world_size, port, store, group_timeout, job = pipe.recv()
        except EOFError:
            return
        keep, hook = dict(os.environ), sys.excepthook
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            GROUP_RANK="0",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        output = io.StringIO()
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=group_timeout),
            )
            # gloo connects to one peer after the other: a rank that is through, and closes its
            # connections as the function is short, would end the set-up of one that is still at it.
            dist.barrier()
            torch.manual_seed(1234)
            fn, args, kwargs = pickle.loads(job)
            with warnings.catch_warnings(), contextlib.redirect_stdout(output):
                value = fn(*args, **kwargs)
            message = (True, value)
        except BaseException:
            message = (False, traceback.format_exc() + output.getvalue()[-4000:])
        finally:
            if dist.is_initialized():
                with contextlib.suppress(RuntimeError):
                    dist.destroy_process_group()
            os.environ.clear()
            os.environ.update(keep)
            sys.excepthook = hook  # torch puts one more around it for each process group
            multiprocessing.current_process()._config["daemon"] = True  # type: ignore[attr-defined]
            fn = args = kwargs = value = None
            # Else what this job leaves goes at some moment of a later one. A parameter's hooks are
            # out of the collector's sight, so that what they hold goes one collection later.
            for _ in range(3):
                gc.collect()
            gc.freeze()  # what is left is modules: the next collection need not look at them
        pipe.send(message)
