"""What is watched, from when on, and what a finding does."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shardplug.errors import ConfigError

__all__ = ["ACTIONS", "MONITORS", "TARGETS", "Action", "MonitorConfig", "Target"]

Action = Literal["warn", "stop", "rollback"]

ACTIONS: tuple[Action, ...] = ("warn", "stop", "rollback")
"""What a finding does: it is always logged; "stop" ends the run, "rollback" goes back to the
newest whole checkpoint."""

MONITORS: tuple[str, ...] = (
    "nonfinite",
    "loss_spike",
    "grad_norm_drift",
    "throughput_drift",
    "memory_drift",
    "lagging_rank",
)
"""What is looked for."""

TARGETS: tuple[str, ...] = ("step_seconds", "tokens_per_second", "memory_gib", "loss", "cost")
"""What a limit can be declared for; tokens_per_second is a least value, the others are most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A limit that the run declares.

    Raises:
        ConfigError: For an impossible value.
    """

    limit: float
    """Seconds, tokens per second of all ranks, GiB (2^30 bytes) of the fullest rank, loss, or
    cost in the currency of `price_per_hour`."""

    action: Action = "warn"
    """What a miss does."""

    from_step: int | None = None
    """Optimizer step from which it is judged; None is after the warm-up. A loss needs one."""

    def __post_init__(self) -> None:
        if not _is_number(self.limit) or not self.limit > 0:
            raise ConfigError(f"Expected a target's limit above 0, got {self.limit!r}.")
        _require_action(self.action)
        if self.from_step is not None and self.from_step < 1:
            raise ConfigError(f"Expected from_step >= 1, got {self.from_step!r}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorConfig:
    """Monitors and targets of a run. None leaves a monitor out.

    Raises:
        ConfigError: For an unknown name or an impossible value.
    """

    every_n_steps: int = 1
    """Optimizer steps between two looks; a look reads the loss, which waits for the device."""

    window: int = 50
    """Looks that make up what is usual; a fifth of them is what is recent."""

    warmup: int = 20
    """Looks at the beginning that nothing but the non-finite monitor judges."""

    loss_spike: float | None = 8.0
    """Robust standard deviations above the window's median that make a spike; it must also be a
    tenth of the median above it."""

    grad_norm_drift: float | None = 4.0
    """Times the first window's median gradient norm."""

    throughput_drift: float | None = 0.3
    """Share of the first window's median throughput that is lost."""

    memory_growth: float | None = 0.05
    """Share by which a rank's memory grows over a window, rising in every fifth of it."""

    lag: float | None = 1.5
    """Times the other ranks' median of the seconds that a rank works without waiting."""

    actions: Mapping[str, Action] = field(default_factory=dict)
    """What a finding of a monitor does, by its name in `MONITORS`; "warn" for others."""

    targets: Mapping[str, Target] = field(default_factory=dict)
    """Limits, by their name in `TARGETS`."""

    price_per_hour: float | None = None
    """Of all machines of the run together; needed for a target of cost."""

    max_rollbacks: int = 3
    """Returns to a checkpoint after which the next one stops the run."""

    def __post_init__(self) -> None:
        for name, least in (("every_n_steps", 1), ("window", 10), ("warmup", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"Expected {name} to be {least} or more, got {value!r}.")
        lowest = {"loss_spike": 0, "grad_norm_drift": 1, "memory_growth": 0, "lag": 1}
        for name, least in {**lowest, "throughput_drift": 0, "price_per_hour": 0}.items():
            value = getattr(self, name)
            if value is not None and (not _is_number(value) or not value > least):
                raise ConfigError(f"Expected {name} above {least}, or None, got {value!r}.")
        if self.throughput_drift is not None and self.throughput_drift >= 1:
            raise ConfigError(f"Expected throughput_drift below 1, got {self.throughput_drift!r}.")
        if self.max_rollbacks < 0:
            raise ConfigError(f"Expected max_rollbacks >= 0, got {self.max_rollbacks!r}.")
        _require_known("monitor", self.actions, MONITORS)
        _require_known("target", self.targets, TARGETS)
        for action in self.actions.values():
            _require_action(action)
        for name, target in self.targets.items():
            if not isinstance(target, Target):
                raise ConfigError(
                    f"Expected the target {name} to be a Target, got {type(target).__name__}; "
                    "MonitorConfig.from_dict makes it from plain values."
                )
        if "loss" in self.targets and self.targets["loss"].from_step is None:
            raise ConfigError("Expected from_step with a target of loss: when it is to be reached.")
        if "cost" in self.targets and self.price_per_hour is None:
            raise ConfigError("Expected price_per_hour with a target of cost.")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MonitorConfig:
        """Make the configuration from plain values, as YAML has them.

        A target is a number, its limit, or a mapping of `Target`'s fields:

            targets:
              step_seconds: 1.2
              loss: {limit: 2.5, from_step: 2000, action: stop}

        Raises:
            ConfigError: For an unknown name or an impossible value.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"Expected a mapping for the monitor, got {type(values).__name__}.")
        _require_known("option", values, tuple(f.name for f in dataclasses.fields(cls)))
        read = dict(values)
        for name in ("actions", "targets"):
            if read.get(name) is None:
                read.pop(name, None)
            elif not isinstance(read[name], Mapping):
                raise ConfigError(f"Expected {name} to be a mapping, got {read[name]!r}.")
        if "targets" in read:
            read["targets"] = {name: _target(name, v) for name, v in read["targets"].items()}
        return cls(**read)

    @property
    def recent(self) -> int:
        """Looks that are recent."""
        return max(2, self.window // 5)

    @property
    def may_roll_back(self) -> bool:
        """Whether anything is declared to go back to a checkpoint."""
        declared = [*self.actions.values(), *(t.action for t in self.targets.values())]
        return "rollback" in declared


def _target(name: str, value: Any) -> Target:
    if isinstance(value, Target):
        return value
    if not isinstance(value, Mapping):
        return Target(limit=value)
    fields = tuple(f.name for f in dataclasses.fields(Target))
    _require_known(f"field of the target {name}:", value, fields)
    if "limit" not in value:
        raise ConfigError(f"Expected a limit for the target {name}, got {dict(value)!r}.")
    return Target(**value)


def _is_number(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value)


def _require_action(action: str) -> None:
    if action not in ACTIONS:
        raise ConfigError(f"Expected an action of {', '.join(ACTIONS)}, got {action!r}.")


def _require_known(what: str, found: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = [name for name in found if name not in known]
    if unknown:
        raise ConfigError(f"Unknown {what} {unknown[0]!r}; expected one of {', '.join(known)}.")
