"""Errors that the troubleshooting page quotes are errors that the package raises."""

from __future__ import annotations

import ast
import errno
import os
import re
from collections.abc import Iterator

import pytest

from shardplug import errors
from tests.support.printed import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
GAP = "\0"


def literals() -> Iterator[str]:
    """Every string of the package, with a mark for what is filled in."""
    for path in (ROOT / "shardplug").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else GAP for p in node.values)
                yield "".join(str(part) for part in parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


MESSAGES = list(literals())
OF_OTHERS = (os.strerror(errno.ENOSPC), "setStorage: ")
"""Parts of messages of the system and of torch."""
QUOTED = [
    (name, text)
    for name, text in re.findall(r"`(\w+Error): ([^`]+)`", PAGE.read_text())
    if not any(part in text for part in OF_OTHERS)
]


def test_errors_are_quoted() -> None:
    assert len(QUOTED) > 30
    assert {name for name, _ in QUOTED} <= {*errors.__all__, "RuntimeError"}


@pytest.mark.parametrize("quoted", sorted({text for _, text in QUOTED}))
def test_a_quoted_error_is_in_the_code(quoted: str) -> None:
    parts = [part.strip() for part in re.split(r"\.\.\.|'X'", quoted)]
    pattern = re.compile(".*".join(re.escape(part) for part in parts if part), re.DOTALL)
    assert any(pattern.search(message) for message in MESSAGES)
