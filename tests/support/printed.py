"""The shell commands that README and the documentation print."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(
    r"^(?P<indent>[ ]*)```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_PROGRAMS = "python torchrun accelerate shardplug pip pytest mkdocs srun deepspeed".split()
_MODULES = {
    "python": [],
    "accelerate": ["-m", "accelerate.commands.accelerate_cli"],
    "torchrun": ["-m", "torch.distributed.run"],
    "shardplug": ["-m", "shardplug"],
}


def fences(text: str) -> Iterator[tuple[str, str]]:
    """Yield language and code of each fenced block, also those indented inside a tab."""
    for match in _FENCE.finditer(text):
        indent = len(match["indent"])
        code = "\n".join(line[indent:] for line in match["code"].splitlines())
        yield match["language"], code


def commands(page: Path) -> list[str]:
    """Commands in shell blocks, and those in running text that have arguments.

    A name alone, such as `shardplug plan`, is no command; `pip` and `python` with anything are.
    """
    found = []
    for language, code in fences(page.read_text()):
        if language in ("sh", "bash"):
            lines = re.sub(r"\\\n\s*", "", code).splitlines()
            found += [bare(line) for line in lines if line.strip() and not line.startswith("#")]
    for span in re.findall(r"`([^`]+)`", _FENCE.sub("", page.read_text())):
        words = span.split()
        while words and re.fullmatch(r"[A-Z_]+=\S+", words[0]):
            words.pop(0)
        enough = 2 if words and words[0] in ("python", "pip", "pytest", "mkdocs") else 3
        if len(words) >= enough and words[0] in _PROGRAMS and "COMMAND" not in words:
            found.append(bare(span))
    return found


def bare(line: str) -> str:
    """The command without the remark behind it, with single spaces."""
    return " ".join(line.partition("  #")[0].split())


def on_this_interpreter(command: str) -> list[str]:
    """The words of a command, run by the Python that runs the tests."""
    program, *words = shlex.split(command)
    return [sys.executable, *_MODULES[program], *words]
