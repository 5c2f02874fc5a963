"""Processes that a test starts, gone when its block ends, whether it passes or fails."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any


class Processes(ExitStack):
    """At the end of a `with` block, kills what is still there and closes all pipes.

    A pipe that stays open is a warning, and an error of whichever test runs when it is collected.
    """

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a process as `Popen` does; what it says is read as text, from pipes."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = self.enter_context(subprocess.Popen(command, **{**pipes, **options}))
        self.callback(process.kill)  # before the pipes are closed and the end is waited for
        return process
