"""How long a silence is borne."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardplug.errors import ConfigError

__all__ = ["Limits"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """When a rank counts as lost.

    Raises:
        ConfigError: For a limit below 2 seconds.
    """

    silence_seconds: float = 20.0
    """A process that is stopped, or silent on another machine, for this long."""

    stall_seconds: float | None = None
    """A job whose ranks live but end no forward, backward or step for this long; None: never."""

    notice_seconds: float = 300.0
    """After this long without the end of a forward, backward or step a rank says where it is, or
    after three times the longest so far."""

    busy_factor: float = 10.0
    """A silent process of the same machine that runs (something in it holds Python's lock) has
    this many times `silence_seconds`."""

    grace_seconds: float = 5.0
    """What ranks have to raise the same error, or to end by themselves, before they are ended."""

    def __post_init__(self) -> None:
        for name in ("silence_seconds", "stall_seconds", "notice_seconds"):
            value = getattr(self, name)
            if value is not None and not 2 <= value < math.inf:
                raise ConfigError(f"Expected {name} of 2 seconds or more, or None, got {value!r}.")
