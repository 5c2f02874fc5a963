"""Without wandb the recipes train, after one warning."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import tracking

RECIPES = sorted(
    path.stem
    for path in (Path(__file__).parents[2] / "recipes").glob("*.py")
    if "    wandb: str = " in path.read_text(encoding="utf-8")
)


@pytest.fixture
def without_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    missing = {"wandb": None}
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: missing[name] if name in missing else find(name, *rest),
    )


def test_rank_0_warns_once_and_the_run_goes_on(
    without_wandb: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, rank in (("RANK", "0"), ("LOCAL_RANK", "0"), ("RANK", "1"), ("LOCAL_RANK", "1")):
        with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            patch.delenv("RANK", raising=False)
            patch.setenv(variable, rank)
            assert tracking.wandb_project("shardplug") == "off"
            assert tracking.wandb_project("off") == "off"
        assert [str(w.message).partition(",")[0] for w in caught] == (
            ["wandb is not installed"] if rank == "0" else []
        )


def test_wandb_is_used_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert tracking.wandb_project("mine") == "mine"


class Stop(Exception):
    """Ends a recipe where it first needs anything else."""


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_asks_first(
    name: str, monkeypatch: pytest.MonkeyPatch, without_wandb: None
) -> None:
    recipe = importlib.import_module(name)
    asked: list[str] = []

    def ask(project: str) -> Any:
        asked.append(project)
        raise Stop

    monkeypatch.setattr(tracking, "wandb_project", ask)
    with pytest.raises(Stop):
        recipe.main(recipe.Options(wandb="mine"))
    assert asked == ["mine"] and len(RECIPES) >= 6
