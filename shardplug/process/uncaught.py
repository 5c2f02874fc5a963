"""What runs when an exception ends the process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

__all__ = ["watch_uncaught"]

Action = Callable[[BaseException], None]

_before: list[Action] = []
_after: list[Action] = []
_shown_by: Callable[..., Any] | None = None
"""What `sys.excepthook` was before; None while it is in place."""


def watch_uncaught(before: Action | None = None, after: Action | None = None) -> Callable[[], None]:
    """Tell of exceptions that nobody catches.

    Args:
        before: Called before the exception is shown.
        after: Called after it.

    Returns:
        A function that ends it. With the last, `sys.excepthook` is put back.
    """
    global _shown_by
    if _shown_by is None:
        _shown_by, sys.excepthook = sys.excepthook, _hook
    if before is not None:
        _before.append(before)
    if after is not None:
        _after.append(after)

    def end() -> None:
        global _shown_by
        for actions, action in ((_before, before), (_after, after)):
            if action in actions:
                actions.remove(action)
        if not _before and not _after and sys.excepthook is _hook and _shown_by is not None:
            sys.excepthook, _shown_by = _shown_by, None

    return end


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    for action in list(_before):
        action(error)
    (_shown_by or sys.__excepthook__)(kind, error, trace)
    for action in list(_after):
        action(error)
