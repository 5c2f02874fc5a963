"""Where the library's messages are seen when the user has configured no logging."""

from __future__ import annotations

import logging
import sys

__all__ = ["hide_messages", "show_messages"]


class _Console(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to standard output, from warnings on to standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stdout if record.levelno < logging.WARNING else sys.stderr
        super().emit(record)


_LOGGER = logging.getLogger("shardplug")
_console = _Console()
_console.setFormatter(logging.Formatter("shardplug: %(message)s"))


def show_messages() -> None:
    """Write messages to the console, from INFO on, unless logging is configured already."""
    if not _LOGGER.hasHandlers() and _LOGGER.level == logging.NOTSET:
        _LOGGER.addHandler(_console)
        _LOGGER.setLevel(logging.INFO)


def hide_messages() -> None:
    """Undo `show_messages`."""
    if _console in _LOGGER.handlers:
        _LOGGER.removeHandler(_console)
        _LOGGER.setLevel(logging.NOTSET)
