"""The page of recipes names every recipe, with the launch line that its own docstring has."""

from __future__ import annotations

import ast
import re
import shlex

from tests.recipes.test_recipes import RECIPES, ROOT

PAGE = (ROOT / "docs" / "recipes.md").read_text()
ROWS = re.findall(r"^\| [^|]+ \| `([^`|]+)` \| ([^|]+) \|$", PAGE, re.M)


def test_every_recipe_has_a_row_with_its_docstrings_line() -> None:
    named = set()
    for command, _ in ROWS:
        (name,) = re.findall(r"recipes/(\w+\.py)", command)
        named.add(name)
        docstring = ast.get_docstring(ast.parse((RECIPES / name).read_text()))
        assert docstring is not None
        lines = [
            shlex.split(line, comments=True) for line in re.findall(r"^ {4}(.+)$", docstring, re.M)
        ]
        if name != "train_capped.py":  # shown there with its options
            assert shlex.split(command) in lines, name
    programs = {path.name for path in RECIPES.glob("*.py") if '"__main__"' in path.read_text()}
    assert named == programs and len(named) >= 8


def test_files_for_the_real_size_exist_and_name_their_recipe() -> None:
    for command, files in ROWS:
        (name,) = re.findall(r"recipes/(\w+\.py)", command)
        for file in re.findall(r"`(\w+\.yaml)`", files):
            assert f"recipes/{name}" in (RECIPES / "configs" / file).read_text(), file
