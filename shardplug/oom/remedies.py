"""Settings that hold less than the one that ran out of memory, with their cost and their line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from shardplug.plan.choices import Choice, gib
from shardplug.plan.plan import Plan
from shardplug.plan.plan_report import accelerate_yaml, lightning_line
from shardplug.plan.run.observed import Running, batch_size, settings_of
from shardplug.plan.sizes.optimizer_kinds import fused_kind
from shardplug.process.overhead import RETURNED, THRESHOLD

__all__ = ["Remedy", "Headroom", "in_words", "remedies"]

_NUMBER = 3
_GIVEN_BACK = f"{THRESHOLD}=131072"


@dataclass(frozen=True, slots=True)
class Headroom:
    """What training may use, in bytes."""

    capacity: int
    """Of one device."""
    host: int | None = None
    """Of one node's memory beside the device, or None where unknown."""
    nvme: int | None = None
    """Of the drive behind the swap folder, or None where unknown."""
    refused: str = ""
    """Tier that has just refused to hold the state, or nothing."""
    error: float = 0.03
    """Share of a plan's bytes by which a run may hold more."""
    outset: int | None = None
    """On CPU ranks: of the process, less what there was when the model was sharded."""
    kept: float = 0.0
    """Share of a plan's bytes by which the process may grow more from there."""
    freed: int = 0
    """On CPU ranks: what the C allocator keeps of what was freed, and could give back."""

    def over(self, choice: Choice) -> int:
        """Return the bytes by which a choice is too large where it misses most, or 0."""
        missing = [choice.device - self.capacity]
        if self.host is not None:
            missing.append(choice.host - self.host)
        if self.nvme is not None:
            missing.append(choice.disk - self.nvme)
        return max(0, *missing)

    def surely(self, choice: Choice) -> bool:
        """Whether a choice fits even where it holds as much more as plans may be off."""
        if self.over(choice) or (1 + self.error) * choice.device > self.capacity:
            return False
        # A run with parameters in files gives freed memory back.
        kept = min(self.kept, RETURNED) if choice.offload_params == "nvme" else self.kept
        return self.outset is None or (1 + kept) * choice.device <= self.outset

    def surely_given_back(self, choice: Choice) -> bool:
        """Whether a choice fits like that once the C allocator gives back what is freed."""
        if not self.freed or self.refused:
            return False
        return replace(self, kept=min(self.kept, RETURNED)).surely(choice)


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change."""

    what: str
    freed: int
    """Bytes of one device that it holds less than the run at its planned peak."""
    over: int
    """Bytes that it still holds too much, or 0."""
    surely: bool
    """Whether it fits by more than the plan may be off."""
    slower: float
    """How many times as long a step takes, by the plan."""
    lines: tuple[str, ...]
    """The lines to change."""
    single: bool
    """Whether one setting changes, and not several."""


def remedies(run: Running, found: Plan, room: Headroom) -> list[Remedy]:
    """Find the settings to take instead.

    Those that fit by more than a plan may be off come first, the fastest of them in front, single
    changes before several at once; then those that just fit, and those that do not, each by what
    they free.

    Args:
        run: The run.
        found: Its plan.
        room: What it may use.
    """
    running = run.choice(found)
    if running is None:
        return []
    singles = list(_singles(run, found, running, room))
    if room.refused or not any(remedy.surely for remedy in singles):
        singles += _several(run, found, running, room)
    chosen = [remedy for remedy in singles if remedy.freed > 0 or room.refused]
    chosen.sort(key=_worth)
    return chosen[:_NUMBER]


def _worth(remedy: Remedy) -> tuple[int, bool, float, int]:
    sure = remedy.surely
    return (
        2 - sure - (remedy.over == 0),
        sure and not remedy.single,
        sure * round(remedy.slower, 2),
        -remedy.freed,
    )


def _singles(run: Running, found: Plan, running: Choice, room: Headroom) -> Iterator[Remedy]:
    now = settings_of(running)
    if room.surely_given_back(running):
        yield _remedy(run, found, running, running, room)
    for choice in _possible(found, room):
        changed = [a != b for a, b in zip(settings_of(choice), now, strict=True)]
        if sum(changed) == 1:
            yield _remedy(run, found, choice, running, room)
    if room.refused:
        return  # less on the device does not make room there
    size = batch_size(run.call.inputs)
    for divided in _divisors(size):
        smaller = run.plan(divided=divided, alone=True)
        less = run.choice(smaller)
        if less is None:
            continue
        if room.surely(less) or room.surely_given_back(less) or divided == size:
            yield _remedy(run, smaller, less, running, room, divided=divided)
            break
    if run.device != "cpu" and run.config.offload_activations == "none":
        away = run.plan(offload_activations=True, alone=True)
        for choice in away.choices:
            same = settings_of(choice)[:-1] == now[:-1]
            if same and away.traced:
                yield _remedy(run, away, choice, running, room)
    if run.config.stage == 3 and run.config.prefetch:
        later = run.plan(prefetch=0, alone=True)
        less = run.choice(later)
        if less is not None:
            yield _remedy(run, later, less, running, room, prefetch=0)
    fused = fused_kind(run.optimizer)
    if fused is not None and running.timeline.peak.held["optimizer_work"]:
        quiet = run.plan(optimizer=fused, alone=True)
        less = run.choice(quiet)
        if less is not None:
            yield _remedy(run, quiet, less, running, room, fused=True)


def _several(run: Running, found: Plan, running: Choice, room: Headroom) -> Iterator[Remedy]:
    """Several changes at once: any stage, tier and checkpointing, then the smallest batch too."""
    fitting = [choice for choice in _possible(found, room) if not room.over(choice)]
    for choice in fitting:
        if settings_of(choice) != settings_of(running):
            yield _remedy(run, found, choice, running, room, single=False)
    size = batch_size(run.call.inputs)
    if size == 1 or any(room.surely(choice) for choice in fitting):
        return
    smallest = run.plan(divided=size)
    for choice in _possible(smallest, room):
        yield _remedy(run, smallest, choice, running, room, divided=size, single=False)


def _possible(found: Plan, room: Headroom) -> Iterable[Choice]:
    able = [choice for choice in found.choices if not choice.unavailable]
    return [c for c in able if not room.refused or c.offload_optimizer != room.refused]


def _divisors(size: int) -> Iterator[int]:
    """Halve a batch as long as that is possible, then take single samples."""
    divided = 2
    while size % divided == 0 and divided < size:
        yield divided
        divided *= 2
    if size > 1:
        yield size


def _remedy(
    run: Running,
    found: Plan,
    choice: Choice,
    running: Choice,
    room: Headroom,
    *,
    divided: int = 1,
    prefetch: int | None = None,
    fused: bool = False,
    single: bool = True,
) -> Remedy:
    words = []
    if settings_of(choice) != settings_of(running):
        words.append(_change(choice, running))
    if divided > 1:
        words.append(
            f"a micro-batch of {found.request.micro_batch}, accumulated "
            f"{found.request.accumulate} times"
        )
    if prefetch is not None:
        words.append(f"prefetch={prefetch}: units are gathered when they are needed")
    if fused:
        words.append("fused=True in the optimizer, whose step then needs no work space")
    lines = _lines(run, found, choice)
    if fused:
        lines = ("the optimizer: fused=True", *lines)
    surely, freed = room.surely(choice), running.device - choice.device
    needed = not words or not room.surely_given_back(running)
    if needed and not surely and room.surely_given_back(choice):
        surely, single, freed = True, single and not words, freed + room.freed
        words.append(f"{_GIVEN_BACK} in the environment of the ranks: freed memory is given back")
        lines = (f"environment: {_GIVEN_BACK}", *lines)
    return Remedy(
        what=", ".join(words),
        freed=freed,
        over=room.over(choice),
        surely=surely,
        slower=choice.time.total / running.time.total if running.time.total else 1.0,
        lines=lines,
        single=single,
    )


def _change(choice: Choice, running: Choice) -> str:
    words = []
    if choice.stage != running.stage:
        words.append(f"stage={choice.stage}")
    for name in ("offload_optimizer", "offload_params"):
        if getattr(choice, name) != getattr(running, name):
            words.append(f'{name}="{getattr(choice, name)}"')
    if choice.activation_checkpointing != running.activation_checkpointing:
        words.append(f"activation_checkpointing={choice.activation_checkpointing}")
    if choice.offload_activations != running.offload_activations:
        words.append(f'offload_activations="{choice.offload_activations}"')
    return ", ".join(words)


def _lines(run: Running, found: Plan, choice: Choice) -> tuple[str, ...]:
    """Return the line for each door, with the run's own swap folder where it has one."""
    path = run.config.nvme_path
    yaml = [
        line.strip()
        for line in accelerate_yaml(found, choice).splitlines()
        if "fsdp_sharding_strategy" in line
        or ("gradient_accumulation_steps" in line and found.request.accumulate > 1)
    ]
    lines = [f"Lightning:  {lightning_line(found, choice)}", f"Accelerate: {'; '.join(yaml)}"]
    if run.loop == "pytorch":
        lines.append(f"engine:     {_config_line(found, choice)}")
    return tuple(line if path is None else line.replace("/mnt/nvme", path) for line in lines)


def _config_line(found: Plan, choice: Choice) -> str:
    fields = [f"stage={choice.stage}"]
    for name in ("offload_optimizer", "offload_params"):
        if getattr(choice, name) != "none":
            fields.append(f'{name}="{getattr(choice, name)}"')
    if choice.offload_optimizer == "nvme":
        fields.append('nvme_path="/mnt/nvme"')
    if choice.activation_checkpointing:
        fields.append("activation_checkpointing=True")
    if choice.offload_activations != "none":
        fields.append(f'offload_activations="{choice.offload_activations}"')
    for name, default in (("prefetch", 1), ("replicate_size", 1)):
        if getattr(found.request, name) != default:
            fields.append(f"{name}={getattr(found.request, name)}")
    return f"ZeroConfig({', '.join(fields)})"


def in_words(remedy: Remedy) -> str:
    """Say what a remedy changes, frees and costs, in one line."""
    freed = f"{gib(abs(remedy.freed))} {'less' if remedy.freed >= 0 else 'more'}"
    fits = "fits" if remedy.surely else "just fits, may not"
    if remedy.over:
        fits = f"still {gib(remedy.over)} too much"
    return f"{remedy.what}: {freed}, {fits}; a step takes {remedy.slower:.2f} times as long"
