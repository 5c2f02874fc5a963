"""Makes the recipes' shared modules importable, as running a recipe from its folder does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"

for name in ("transformers", "datasets", "jsonargparse"):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"the recipes need {name}", allow_module_level=True)
sys.path.insert(0, str(RECIPES))
