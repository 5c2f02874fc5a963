"""The files for 70 B parameters: their plan is what `shardplug plan` says, and they follow it."""

from __future__ import annotations

import functools
import re
import shlex
from pathlib import Path

import pytest
import yaml

from shardplug.cli import main
from tests.recipes.test_recipes import RECIPES, ROOT

FILES = ("lightning_llama3_70b.yaml", "zero3_infinity_llama3_70b.yaml")
QUOTED = re.compile(
    r"^# +(shardplug plan .+)\n"
    r"# +(\w+(?: offload_params=cpu)?) checkpointing: ([\d.]+) GiB of a device, "
    r"([\d.]+) GiB of host memory, "
    r"([\d.]+) GiB of disk$",
    re.M,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@functools.cache
def chosen(command: str, capture: pytest.CaptureFixture[str]) -> tuple[str, float, float, float]:
    """Run a plan; return the choice it marks: name, device, host, disk in GiB."""
    assert main(shlex.split(command)[1:]) == 0
    (row,) = re.findall(r"^\* (.+)$", capture.readouterr().out, re.M)
    name, _, values = row.partition(" checkpointing ")
    cells = values.split()
    numbers = [float(cell) for cell in cells[: cells.index("backward")]]
    # masters ... slack are ten columns; then total, host, disk where there is one, seconds
    total, host, *rest = numbers[10:]
    return name, total, host, rest[0] if len(rest) == 2 else 0.0


def test_the_files_quote_the_plan_and_follow_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    for file in FILES:
        text = (RECIPES / "configs" / file).read_text()
        quoted = QUOTED.findall(text)
        assert [name for _, name, *_ in quoted] == [
            "zero3_infinity",
            "zero3_cpu offload_params=cpu",
            "zero3_cpu",
        ]
        for command, name, *numbers in quoted:
            found = chosen(command, capsys)
            assert found[0] == name
            assert [float(n) for n in numbers] == pytest.approx(list(found[1:]), abs=0.05), command
    values = yaml.safe_load((RECIPES / "configs" / FILES[0]).read_text())
    assert (values["stage"], values["offload_optimizer"], values["offload_params"]) == (
        3,
        "nvme",
        "nvme",
    )
    sharding = yaml.safe_load((RECIPES / "configs" / FILES[1]).read_text())["fsdp_config"]
    assert sharding["fsdp_sharding_strategy"].startswith("shardplug:zero3_infinity,")
    assert values["activation_checkpointing"] and sharding["fsdp_activation_checkpointing"]
    assert Path(values["nvme_path"]) == Path(sharding["fsdp_sharding_strategy"].split("=")[1])
