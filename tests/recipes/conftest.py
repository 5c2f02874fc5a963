"""Makes the recipes' shared modules importable, as running a recipe from its folder does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

NEEDED = ("accelerate", "datasets", "jsonargparse", "lightning", "matplotlib", "transformers")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
# Without the packages of `pip install 'shardplug[recipes]'` nothing here can be imported.
collect_ignore_glob = ["test_*.py"] if MISSING else []
