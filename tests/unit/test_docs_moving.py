"""The guides for moving here: every setting has a counterpart, or the reason why it has none."""

from __future__ import annotations

import dataclasses
import re

import pytest

from shardplug import ZeroConfig
from shardplug.integrations.accelerate.launch_options import ENVIRONMENT_NAME, LaunchOptions
from tests.support.printed import PAGES, ROOT

GUIDES = [ROOT / "docs" / "guides" / name for name in ("from-deepspeed.md", "from-fsdp.md")]
FIELDS = {field.name for field in dataclasses.fields(ZeroConfig)}


def rows(text: str) -> list[list[str]]:
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if not set(row[0]) <= set("- |")]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_every_setting_has_a_counterpart_or_a_reason(guide) -> None:
    found = rows(guide.read_text())
    assert len(found) > 30
    for row in found:
        assert len(row) == 2 and all(row), row
        assert "no equivalent" not in row[1] or "because" in row[1], row


def test_strings_for_the_yaml_are_read() -> None:
    printed = {s for p in PAGES for s in re.findall(r'"(shardplug:[^".]+)"', p.read_text())}
    assert len(printed) > 8
    for text in printed:
        assert LaunchOptions.read(None, {ENVIRONMENT_NAME: text}).config


def test_configurations_in_running_text_have_fields_that_exist() -> None:
    calls = [
        call
        for page in PAGES
        for call in re.findall(r"`ZeroConfig\(([^`]+)\)`", page.read_text())
        if "=" in call
    ]
    assert calls
    for call in calls:
        assert set(re.findall(r"(\w+)=", call)) <= FIELDS, call
