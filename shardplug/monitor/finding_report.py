"""What a look found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from shardplug.checkpoint import ResumePoint
from shardplug.monitor.monitor_config import Action
from shardplug.monitor.row import StepRow

__all__ = ["Alert", "Report", "Sink", "strongest"]


@dataclass(frozen=True, slots=True)
class Alert:
    """One finding, the same on every rank."""

    kind: str
    """A name of `MONITORS`, or "target/" and a name of `TARGETS`."""

    step: int
    """Optimizer steps done."""

    text: str
    """What was found, with its numbers."""

    action: Action = "warn"
    """What it does."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a step brought, the same on every rank."""

    row: StepRow | None = None
    """The ranks' values; None in a step that is not looked at."""

    alerts: tuple[Alert, ...] = ()
    """What was found in this step."""

    targets: Mapping[str, bool] = field(default_factory=dict)
    """The targets judged in this step: whether they are met."""

    action: Literal["none", "warn", "stop", "rollback"] = "none"
    """What all ranks do now."""

    resume: ResumePoint | None = None
    """Where to go back to, with "rollback"."""


class Sink(Protocol):
    """Receiver of reports, on rank 0."""

    def write(self, report: Report) -> None:
        """Take a report of a step that was looked at."""

    def close(self, targets: Mapping[str, bool]) -> None:
        """Take each target's last state."""


def strongest(alerts: Sequence[Alert]) -> Literal["none", "warn", "stop", "rollback"]:
    """Return what all of them together do: stopping comes before going back."""
    actions = {alert.action for alert in alerts}
    for action in ("stop", "rollback", "warn"):
        if action in actions:
            return action
    return "none"
