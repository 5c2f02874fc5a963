"""Follows a run closely enough to explain it when memory runs out."""

from __future__ import annotations

import functools
import gc
import logging
import mmap
import os
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardplug.config import ZeroConfig
from shardplug.core._torch.groups import gathered_units
from shardplug.core.gathered.outside_use import advise
from shardplug.engine.engine import ZeroEngine
from shardplug.engine.listener import EngineListener
from shardplug.errors import ConfigError, StorageError
from shardplug.oom.oom_report import OutOfMemory, is_out_of_memory, oom_report, place_of
from shardplug.oom.remedies import Headroom, remedies
from shardplug.plan.choices import Choice
from shardplug.plan.plan import Plan
from shardplug.plan.request import Loop
from shardplug.plan.run.observed import Call, Running
from shardplug.plan.sizes.optimizer_kinds import OptimizerKind
from shardplug.plan.sizes.optimizer_probe import likely_kind
from shardplug.plan.trace.meta_copy import meta_copy, shapes_of
from shardplug.process.limits import ControlGroup, headroom, host_available, process_limits
from shardplug.process.memory_row import MODEL_STATE_KINDS
from shardplug.process.overhead import KEPT, RETURNED, kept_share, used_by_process, used_now
from shardplug.process.uncaught import watch_uncaught

__all__ = ["OomWatch", "explained_oom"]

_LOG = logging.getLogger("shardplug")

REPORT = "out_of_memory.txt"
WARNING = "memory_limit_near.txt"

_SEEN = "_shardplug_explained"
_BALLAST = 48 * 2**20
_WRITTEN_WITHIN = 60.0  # seconds
_ERROR_ON_GPU = 0.03  # of the plan, beside the slack that it counts for the allocator
_KEEPS = (
    "the C allocator keeps freed memory, up to 1.6 times what a plan counts: with "
    "MALLOC_MMAP_THRESHOLD_=131072 in the environment it goes back to the system, and more fits"
)


class OomWatch(EngineListener):
    """Explains the out-of-memory errors of one engine.

    What a report needs is noted while nothing is wrong: the model's structure, the shapes of its
    latest input, the optimizer's kind. Planning waits until memory has run out.

    A report is written once for the job: by the first rank that makes the file. Nothing that
    goes wrong in here replaces the error that is explained.

    Args:
        loop: Who drives the steps; a report names its options.
        folder: Where a report goes; None means the working directory.
    """

    def __init__(
        self, loop: Loop = "pytorch", folder: str | os.PathLike[str] | None = None
    ) -> None:
        self._engine: weakref.ref[ZeroEngine] | None = None
        self._loop = loop
        self._folder = Path(folder or "")
        self._cleared: set[Path] = set()
        self._plan: Plan | None = None
        self._running: Choice | None = None
        self._meta_model: nn.Module | None = None
        self._root: weakref.ref[nn.Module] | None = None
        self._call: Call | None = None
        self._optimizer: OptimizerKind | None = None
        self._accumulate = 1
        self._backwards = 0
        self._more = 1
        self._base: dict[str, int] = {}
        self._group = ControlGroup()
        self._warned = False
        self._unhook: Callable[[], object] | None = None
        # Given back before a report, which needs room too; never touched, so it takes no memory.
        self._ballast: mmap.mmap | None = None

    # ---------------------------------------------------------------- while nothing is wrong

    def opened(self, engine: ZeroEngine) -> None:
        """Begin; the engine is not kept alive."""
        self._engine = weakref.ref(engine)
        if hasattr(mmap, "MAP_PRIVATE"):
            self._ballast = mmap.mmap(-1, _BALLAST, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._put_old_away()
        # Errors of code outside of the engine's calls, such as a plain backward, too.
        unhook = watch_uncaught(before=functools.partial(_tell, weakref.ref(self)))
        self._unhook = weakref.finalize(self, unhook)

    def closed(self) -> None:
        """Stop watching."""
        if self._unhook is not None:
            self._unhook()

    def _watched_engine(self) -> ZeroEngine | None:
        return None if self._engine is None else self._engine()

    def write_into(self, folder: str | os.PathLike[str]) -> None:
        """Set the folder of the report."""
        self._folder = Path(folder)
        self._put_old_away()

    def expect(self, plan: Plan | None, running: Choice | None) -> None:
        """Give a plan that was made beforehand, and its choice that runs."""
        self._plan, self._running = plan, running

    def before_shard(self, model: nn.Module) -> None:
        """Note the structure of a model that is about to be sharded; the largest one counts."""
        size = sum(p.numel() for p in model.parameters())
        if self._meta_model is not None and size < sum(
            p.numel() for p in self._meta_model.parameters()
        ):
            return
        try:
            self._meta_model, self._root = meta_copy(model), weakref.ref(model)
        except Exception:
            # Anything: classes may refuse to be made without their __init__. No plan then.
            self._meta_model = None
        self._put_old_away()

    def after_shard(self) -> None:
        """Note what the process holds besides the model."""
        engine = self._watched_engine()
        if engine is None or engine.device.type != "cpu" or self._base:
            return
        if process_limits():
            gc.collect()  # what sharding has left over would count as needed for good
        states = sum(self._in_memory(engine)[0].values())
        self._base = {key: size - states for key, size in used_by_process().items()}

    def call(self, model: nn.Module, method: str, args: Any, kwargs: Any) -> None:
        """Note the shapes of an outermost call that records gradients."""
        if self._root is not None and self._root() is model:
            self._call = Call(method, shapes_of(tuple(args)), shapes_of(dict(kwargs)))

    def optimizer_bound(self, optimizer: torch.optim.Optimizer) -> None:
        """Note what an optimizer keeps."""
        self._optimizer = self._optimizer or likely_kind(optimizer)

    def micro_step(self, last: bool) -> None:
        """Note whether the micro-batch that begins is its window's last."""
        self._more = 1 if last else 2  # this one, and at least the last

    def phase(self, phase: str) -> None:
        """Count a window's micro-batches, and look at the control group's limit."""
        if phase == "after_backward":
            self._backwards, self._more = self._backwards + 1, 0
        elif phase == "after_step":
            self._accumulate, self._backwards = max(1, self._backwards), 0
        if not self._warned:
            near = self._group.near()
            if near:
                self._warned = True
                self._guarded(None, lambda: self._publish(None, near, WARNING))

    # ---------------------------------------------------------------- when it has gone wrong

    def error(self, error: BaseException) -> None:
        """Write the report, if the error is one of memory and no one has explained it yet."""
        killed = self._group.kills
        if not (is_out_of_memory(error) or killed) or getattr(error, _SEEN, False):
            return
        try:
            setattr(error, _SEEN, True)
        except AttributeError:
            return  # without a mark there is no end to its reports
        if self._ballast is not None:
            self._ballast.close()
            self._ballast = None
        words = "" if not killed else f"the system killed {killed} processes of the control group"
        self._guarded(error, lambda: self._publish(error, words, REPORT))

    def _guarded(self, error: BaseException | None, act: Any) -> None:
        try:
            act()
        except Exception as failure:
            # Anything: the error that is explained is the one to be seen, whatever happens here.
            note = f"shardplug: the report failed ({type(failure).__name__}: {failure})"
            _add_note(error, note)

    def _publish(self, error: BaseException | None, limit: str, name: str) -> None:
        engine = self._watched_engine()
        if engine is None:
            return
        path = self._folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("x", encoding="utf-8")
        except FileExistsError:  # another rank was first
            if error is not None:
                _wait_for(path)
            return
        except OSError as failure:
            text = oom_report(self._facts(engine, error, limit))
            text += f"\n(The report could not be written to {path}: {failure})"
        else:
            with file:
                text = oom_report(self._facts(engine, error, limit))
                file.write(text + "\n")
                if error is not None:
                    file.write("".join(traceback.format_exception(error)))
            _add_note(error, f"shardplug: what was held and what to change: {path.absolute()}")
        _LOG.error(text.removeprefix("shardplug: "))

    def _facts(self, engine: ZeroEngine, error: BaseException | None, limit: str) -> OutOfMemory:
        phase, module = place_of(None if error is None else error.__traceback__, engine.models)
        held, elsewhere = self._in_memory(engine)
        failure = OutOfMemory(
            error=error,
            rank=engine.rank,
            phase=phase,
            module=module,
            gathered=[name for model in engine.models for name in gathered_units(model)],
            held={kind: size for kind, size in held.items() if size},
            elsewhere={kind: size for kind, size in elsewhere.items() if size},
            limit=limit,
            running=self._running,
        )
        capacity = self._measure(engine, failure)
        try:
            self._plan_for(engine, failure, capacity)
        except Exception as reason:
            # Anything: it is the user's model that is traced. What was measured still stands.
            text = f"{type(reason).__name__}: {str(reason).partition(chr(10))[0]}"
            failure.notes.append(f"No plan could be made of the run: {text}")
        if failure.overhead is None:
            self._settle(failure)
        return failure

    def _plan_for(self, engine: ZeroEngine, failure: OutOfMemory, capacity: int | None) -> None:
        """Plan the run as it is, and look for what would fit."""
        run = self._run(engine)
        if run is None:
            failure.notes.append("No plan could be made of the run: no forward was seen yet")
            return
        found = run.plan()
        if failure.running is None:
            failure.running = run.choice(found)
        if not found.traced:
            failure.notes.append("activations are a formula's: the model could not be traced")
        if isinstance(failure.error, StorageError) and not failure.elsewhere:
            failure.elsewhere = _asked_for(engine.config, failure)
        self._settle(failure)
        room = self._room(engine, failure, capacity)
        failure.remedies = remedies(run, found, room)
        if (
            room.outset is not None
            and room.kept == KEPT
            and any(not (r.surely or r.over) for r in failure.remedies)
        ):
            failure.notes.append(_KEEPS)

    def _run(self, engine: ZeroEngine) -> Running | None:
        meta_model, call = self._meta_model, self._call
        model = None if self._root is None else self._root()
        if meta_model is None or call is None or model is None:
            return None
        frozen = {name: p.requires_grad for name, p in model.named_parameters()}
        for name, parameter in meta_model.named_parameters():
            parameter.requires_grad_(frozen.get(name, parameter.requires_grad))
        local = min(engine.world_size, int(os.environ.get("LOCAL_WORLD_SIZE", engine.world_size)))
        return Running(
            config=engine.config,
            meta_model=meta_model,
            call=call,
            devices=local,
            nodes=max(1, engine.world_size // local),
            device=engine.device.type,
            optimizer=self._optimizer or OptimizerKind(),
            accumulate=max(self._accumulate, self._backwards + self._more),
            loop=self._loop,
        )

    # ---------------------------------------------------------------- what there is and was

    def _in_memory(self, engine: ZeroEngine) -> tuple[dict[str, int], dict[str, int]]:
        """Split the accounting: what is in the memory that ran out, and what is elsewhere."""
        states = engine.memory()
        on_cpu = engine.device.type == "cpu"
        held = {
            kind: size
            for kind, size in states.items()
            if kind in MODEL_STATE_KINDS or (on_cpu and not kind.endswith("_nvme"))
        }
        return held, {kind: size for kind, size in states.items() if kind not in held}

    def _measure(self, engine: ZeroEngine, failure: OutOfMemory) -> int | None:
        """Note what is held in all; return what a GPU's allocator may hold at most."""
        device, states = engine.device, sum(failure.held.values())
        if device.type != "cpu":
            module = torch.get_device_module(device)
            free, whole = module.mem_get_info(device)
            failure.total = int(module.memory_allocated(device))
            failure.limit = failure.limit or f"{whole / 2**30:.3g} GiB of {device}"
            return int(module.memory_reserved(device)) + int(free)
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        failure.used = used_now(self._group, self._base, local)
        failure.total = states
        if failure.used is not None:
            failure.total = max(states, failure.used.now - failure.used.kept - failure.used.base)
            failure.limit = failure.limit or failure.used.limit
        return None

    def _settle(self, failure: OutOfMemory) -> None:
        """Now that there is a plan, tell what it counts from what the process holds besides."""
        used = failure.used
        if used is not None:
            states = sum(failure.held.values())
            planned = failure.running is not None
            failure.overhead = (
                used.overhead(states, failure.beyond_states) if planned else used.base
            )
            failure.total = max(states, used.now - used.kept - failure.overhead)

    def _room(self, engine: ZeroEngine, failure: OutOfMemory, capacity: int | None) -> Headroom:
        host, error, outset, freed = None, _ERROR_ON_GPU, None, 0
        if engine.device.type != "cpu":
            room, available = headroom(self._group), host_available()
            free = min(n for n in (room.free if room else None, available, 2**62) if n is not None)
            ours = sum(n for kind, n in failure.elsewhere.items() if kind.endswith("_cpu"))
            host = max(1, free + ours)
        else:
            error, used = RETURNED, failure.used
            if used is not None and used.most is not None:
                capacity = used.most - (failure.overhead or used.base)
                outset = used.most - used.base
                freed = used.kept
        path = engine.config.nvme_path or os.environ.get("SHARDPLUG_NVME_PATH")
        refused = isinstance(failure.error, StorageError)
        most = capacity or failure.total or 1
        here = failure.planned_here
        if here is not None and failure.error is not None and not refused:
            # As the plan counts: that much was too much, beside what was freed and is kept.
            most = min(most, here.total + freed)
        return Headroom(
            capacity=max(1, most),
            host=host,
            nvme=_free(path) if path else None,
            refused=engine.config.offload_optimizer if refused else "",
            error=error,
            outset=outset,
            kept=kept_share(),
            freed=freed,
        )

    # ---------------------------------------------------------------- the file

    def _put_old_away(self) -> None:
        """Keep an earlier run's reports under another name, so that this run's can be made."""
        engine = self._watched_engine()
        if engine is None or engine.rank != 0 or self._folder in self._cleared:
            return
        self._cleared.add(self._folder)
        for name in (REPORT, WARNING):
            path = self._folder / name
            try:
                path.replace(path.with_name(f"previous_{name}"))
            except OSError:
                continue  # most often there is none; where it cannot be moved it cannot be written


@contextmanager
def explained_oom(
    engine: ZeroEngine,
    folder: str | os.PathLike[str] = ".",
    *,
    plan: Plan | None = None,
    running: Choice | None = None,
) -> Iterator[None]:
    """Explain an out-of-memory error of the code inside, and let it through.

        with explained_oom(engine, "runs", plan=found, running=found.best):
            train()

    With `shardplug.default_listeners()`, as adapters have it, errors of forwards, backwards and
    steps are explained without being asked for. This names the folder of the report
    (`out_of_memory.txt`), gives it a plan made beforehand, and covers code outside of the steps.

    Args:
        engine: The engine.
        folder: Folder of the report.
        plan: What was planned; without it, the engine plans from what it has seen.
        running: The choice of the plan that runs.

    Raises:
        ConfigError: When the engine was made without `shardplug.default_listeners()`.
    """
    watch = next((one for one in engine.listeners if isinstance(one, OomWatch)), None)
    if watch is None:
        raise ConfigError(
            "Expected an engine whose errors are watched, got one without an OomWatch. Make it "
            "with ZeroEngine(config, listeners=shardplug.default_listeners())."
        )
    watch.write_into(folder)
    watch.expect(plan, running)
    with engine.telling_errors():
        yield


def _tell(watch: weakref.ref[OomWatch], error: BaseException) -> None:
    """Tell a watch that is alive of an exception that nobody caught."""
    known = watch()
    if known is not None and isinstance(error, Exception):
        advise(error)
        known.error(error)


def _asked_for(config: ZeroConfig, failure: OutOfMemory) -> dict[str, int]:
    """What the tier that refused was asked to hold."""
    return {f"optimizer_state_{config.offload_optimizer}": failure.requested}


def _wait_for(report: Path) -> None:
    """Wait until another rank has written its report: once this rank ends, the others are ended."""
    until = time.monotonic() + _WRITTEN_WITHIN
    while time.monotonic() < until and report.exists() and not report.stat().st_size:
        time.sleep(0.1)


def _free(path: str) -> int | None:
    from shardplug.tiers.filesystem import free_bytes

    try:
        return max(1, free_bytes(path))
    except OSError:
        return None


def _add_note(error: BaseException | None, note: str) -> None:
    """Add to an error's message; Python 3.10 has no notes, so it is logged there."""
    add = getattr(error, "add_note", None)
    if add is not None:
        add(note)
    else:
        _LOG.error(note)
