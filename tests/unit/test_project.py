"""The repository agrees with itself: commands, code in the docs, versions, names, imports."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from fnmatch import fnmatch
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch
import yaml
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import shardplug
from tests.support.slow import slow_tests

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "shardplug"
SOURCES = sorted(PACKAGE.rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FRAMEWORKS = (
    "accelerate",
    "datasets",
    "huggingface_hub",
    "lightning",
    "lightning_fabric",
    "matplotlib",
    "peft",
    "pytorch_lightning",
    "safetensors",
    "transformers",
    "trl",
    "wandb",
)
TORCH_BOUNDARY = PACKAGE / "core" / "_torch"


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_pytest_looks_into_every_folder_of_tests(pytestconfig: pytest.Config) -> None:
    """Its default leaves out folders named dist."""
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    names = {part for folder in folders for part in folder.relative_to(ROOT).parts}
    assert {"tests", "dist", "adapters"} <= names
    left_out = pytestconfig.getini("norecursedirs")
    assert left_out and not [n for n in names for pattern in left_out if fnmatch(n, pattern)]


def test_the_list_of_slow_tests_names_tests() -> None:
    lines = [line for lines in slow_tests().values() for line in lines]
    assert lines and slow_tests().keys() == {"slow", "matrix"}
    for line in lines:
        file, _, name = line.partition("::")
        text = (ROOT / file).read_text()
        assert not name or re.search(rf"^def {name.partition('[')[0]}", text, re.M), line


# -- README and documentation ---------------------------------------------------------------------


def _readme_command(name: str) -> str:
    match = re.search(
        rf"<!-- command: {name} -->\n```sh\n(.+)\n```\n<!-- /command -->",
        (ROOT / "README.md").read_text(),
    )
    assert match, f"README.md has no one-line command {name!r}"
    return match.group(1)


@pytest.mark.parametrize("name", ["recipe", "tests"])
def test_readme_command_is_one_line_and_names_files_that_exist(name: str) -> None:
    command = _readme_command(name)
    assert "\n" not in command
    install, run = command.split(" && ")
    assert install.startswith("pip install -c constraints.txt ")
    files = [word for word in run.split() if "/" in word or word.endswith(".py")]
    files.append("constraints.txt")
    missing = [file for file in files if not (ROOT / file).exists()]
    assert not missing


def test_ci_runs_the_readme_commands() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    for name in ("recipe", "tests"):
        assert f"$(readme_command {name})" in script


def _fences(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (language, code) of each fenced block, also those indented inside a tab."""
    pattern = re.compile(
        r"^(?P<indent>[ ]*)```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^(?P=indent)```$",
        re.MULTILINE | re.DOTALL,
    )
    for match in pattern.finditer(path.read_text()):
        indent = len(match["indent"])
        code = "\n".join(line[indent:] for line in match["code"].splitlines())
        yield match["language"], code


def _python_blocks() -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for path in PAGES:
        for index, (language, code) in enumerate(_fences(path)):
            if language == "python":
                found.append((f"{_name(path)}#{index}", code))
            elif language == "diff":
                # The lines as they are after the change.
                lines = [line[2:] for line in code.splitlines() if not line.startswith("- ")]
                after = "\n".join(lines)
                if "import" in after:
                    found.append((f"{_name(path)}#{index}", after))
    return found


PYTHON_BLOCKS = _python_blocks()


def test_documentation_has_python_blocks() -> None:
    assert len(PYTHON_BLOCKS) >= 10
    assert sum(name.startswith("README.md") for name, _ in PYTHON_BLOCKS) >= 3


@pytest.mark.parametrize("code", [pytest.param(code, id=name) for name, code in PYTHON_BLOCKS])
def test_python_block_parses_and_its_imports_exist(code: str) -> None:
    imports = 0
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
                imports += 1
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.util.find_spec(
                    f"{node.module}.{alias.name}"
                ), f"{node.module} has no {alias.name}"
                imports += 1
    assert imports


def test_yaml_blocks_parse() -> None:
    blocks = [code for path in PAGES for language, code in _fences(path) if language == "yaml"]
    assert blocks
    for block in blocks:
        assert isinstance(yaml.safe_load(block), dict)


def test_files_named_in_the_documentation_exist() -> None:
    pattern = re.compile(r"(?<![\w/.-])(?:recipes|shardplug|tests|docs|\.ci)/[\w./-]*\w")
    named = {
        (page, match) for page in PAGES for match in pattern.findall(page.read_text()) if match
    }
    assert named
    missing = [f"{_name(page)}: {file}" for page, file in named if not (ROOT / file).exists()]
    assert not sorted(missing)


def test_python_commands_in_the_documentation_start_from_the_clone() -> None:
    """`python recipes/x.py --option`: the option is one that the recipe knows."""
    checked = 0
    for page in PAGES:
        for language, code in _fences(page):
            if language != "sh":
                continue
            for line in re.sub(r"\\\n\s*", " ", code).splitlines():
                script = re.search(r"\brecipes/[\w/]+\.py\b", line)
                if script is None:
                    continue
                source = (ROOT / script.group()).read_text()
                for option in re.findall(r"\s(--[a-z][\w-]*)", line[script.end() :]):
                    spelled = option.removeprefix("--").replace("-", "_")
                    assert option in source or spelled in source, f"{_name(page)}: {line}"
                checked += 1
    assert checked


def test_no_machine_paths() -> None:
    """Nothing in the project depends on, or mentions, the machine it was written on."""
    pattern = re.compile(r"(?<![\w.])/(?:work|root|home|opt|mnt/data|Users)/\S*|/tmp/(?:spec|v)\b")
    suffixes = {".py", ".md", ".toml", ".yml", ".yaml", ".txt", ".css", ""}
    skipped = {".git", "site", "runs", "wandb", "lightning_logs", "build", "dist"}
    checked, found = 0, []
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        if not path.is_file() or path.suffix not in suffixes or path == Path(__file__).resolve():
            continue
        if skipped & set(parts) or any(p.endswith(("cache", "__", "venv")) for p in parts[:-1]):
            continue
        checked += 1
        text = path.read_bytes().decode(errors="replace")  # checkpoints are among them
        found += [f"{_name(path)}: {hit}" for hit in pattern.findall(text)]
    assert checked > 20
    assert not found


# -- Versions and configuration files -------------------------------------------------------------


def test_changelog_and_package_agree_on_the_version() -> None:
    top = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert top is not None
    assert top.group(1).strip("[]") == shardplug.__version__


def test_pyproject_takes_the_version_from_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in text
    assert '[tool.hatch.version]\npath = "shardplug/__init__.py"' in text
    written = re.search(r'^__version__ = "(.+)"$', (PACKAGE / "__init__.py").read_text(), re.M)
    assert written is not None, "hatchling reads the literal in shardplug/__init__.py"
    assert written.group(1) == shardplug.__version__


def test_constraints_pin_exact_versions_without_local_parts() -> None:
    lines = [
        line.split(";")[0].strip()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.strip() and not line.startswith("#")
    ]
    assert "torch==2.13.0" in lines
    bad = [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line)]
    assert not bad


def test_every_yaml_of_the_recipes_parses() -> None:
    files = [path for path in (ROOT / "recipes").rglob("*") if path.suffix in {".yaml", ".yml"}]
    assert len(files) >= 3
    for path in files:
        assert isinstance(yaml.safe_load(path.read_text()), dict), _name(path)


def test_every_stage_has_an_accelerate_yaml() -> None:
    for stage in (1, 2, 3):
        content = yaml.safe_load((ROOT / "recipes" / "configs" / f"zero{stage}.yaml").read_text())
        assert content["fsdp_config"]["fsdp_sharding_strategy"] == f"shardplug:zero{stage}"


# -- Public names ---------------------------------------------------------------------------------


PUBLIC = ("accelerate", "checkpoint", "engine", "errors", "fabric", "hf", "lightning")
PUBLIC_MODULES = ["shardplug", *(f"shardplug.{name}" for name in (*PUBLIC, "memory", "monitor"))]


def _constants_classes_functions(name: str) -> tuple[int, str]:
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_all_is_sorted_and_equals_the_public_names(name: str) -> None:
    package = importlib.import_module(name)
    exported = list(package.__all__)
    assert exported
    public = [key for key in exported if key != "__version__"]
    assert public in (sorted(public), sorted(public, key=_constants_classes_functions))
    assert len(set(exported)) == len(exported)
    for key in exported:
        getattr(package, key)  # lazy names resolve
    visible = {
        key
        for key, value in vars(package).items()
        if not key.startswith("_")
        and not isinstance(value, types.ModuleType)
        and getattr(value, "__module__", "shardplug").split(".")[0] == "shardplug"
    }
    assert visible <= set(public), sorted(visible - set(public))


# -- Boundaries -----------------------------------------------------------------------------------


def _imports(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """Yield (module, name) for every import statement, also those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            for alias in node.names:
                yield node.module, alias.name


def _torch_private_attributes() -> frozenset[str]:
    """Names with one underscore that torch's own objects have."""
    fsdp = importlib.import_module("torch.distributed.fsdp._fully_shard")
    classes: set[type] = {torch.Tensor, torch.nn.Module, torch.optim.Optimizer, DTensor}
    for info in pkgutil.iter_modules(fsdp.__path__):
        module = importlib.import_module(f"{fsdp.__name__}.{info.name}")
        classes |= {v for v in vars(module).values() if isinstance(v, type)}
    names: set[str] = set()
    for cls in classes:
        names |= set(dir(cls))
        for base in cls.__mro__:
            names |= set(getattr(base, "__annotations__", {}))
    names |= {name for name in dir(torch.optim.Optimizer) if name.startswith("_")}
    names |= {"_local_tensor", "_spec", "_fsdp_param_group", "_fsdp_param_groups", "_comm_ctx"}
    # The registries of nn.Module are private by name only: subclasses and torch's documentation
    # rely on them, and there is no other way to replace a parameter in place.
    names -= {"_parameters", "_buffers", "_modules"}
    return frozenset(n for n in names if n.startswith("_") and not n.startswith("__"))


def _private_torch_uses(path: Path, private: frozenset[str], own: set[str]) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    for module, name in _imports(tree):
        if module.split(".")[0] != "torch":
            continue
        parts = [*module.split("."), *([name] if name else [])]
        if any(part.startswith("_") for part in parts):
            yield f"import of {'.'.join(parts)}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            attribute, line = node.attr, node.lineno
            dotted = ast.unparse(node)
            if re.fullmatch(r"torch(\.\w+)*\._\w+", dotted) and not attribute.startswith("__"):
                yield f"line {line}: {dotted}"
                continue
            on_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if attribute in private and attribute not in own and not on_self:
                yield f"line {line}: {dotted}"
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "setattr", "hasattr")
            and len(node.args) > 1
            and isinstance(node.args[1], ast.Constant)
            and node.args[1].value in private - own
        ):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def _own_private_names() -> set[str]:
    names: set[str] = set()
    for path in SOURCES:
        if TORCH_BOUNDARY in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            ):
                names.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return names


def test_private_names_of_torch_are_used_in_one_folder_only() -> None:
    private = _torch_private_attributes()
    assert {"_local_tensor", "_get_fsdp_state"} <= private
    assert hasattr(FSDPModule, "_get_fsdp_state")
    own = _own_private_names()
    # The check sees what it is meant to see.
    inside = [path for path in SOURCES if TORCH_BOUNDARY in path.parents]
    assert any(list(_private_torch_uses(path, private, set())) for path in inside)
    found = [
        f"{_name(path)}: {use}"
        for path in SOURCES
        if TORCH_BOUNDARY not in path.parents
        for use in _private_torch_uses(path, private, own)
    ]
    assert not found, "move these to shardplug/core/_torch/"


_SIDE_EFFECTS = re.compile(  # on the process, on other libraries, or on objects that users hand in
    r"sys\.(excepthook|meta_path|path)\b.*=|sys\.meta_path\.insert|atexit\.register|Thread\(|"
    r"ThreadPoolExecutor\(|\.__class__ = |^\s+setattr\(|types\.MethodType\(|os\.environ\[.*\] =|"
    r"os\._exit|os\.kill|signal\.signal|mallopt|dist\.(new|init_process)_group\(|addHandler"
)


def test_the_page_on_the_process_names_every_file_with_a_side_effect() -> None:
    page = (ROOT / "docs" / "design" / "process.md").read_text()
    found = {
        str(path.relative_to(PACKAGE))
        for path in SOURCES
        if any(_SIDE_EFFECTS.search(line) for line in path.read_text().splitlines())
    } - {"run.py", "cli/plan.py"}  # commands, in a process of their own
    assert len(found) > 20 and "process/uncaught.py" in found
    missing = {name for name in found if name not in page and not name.startswith("core/_torch/")}
    assert not missing, "name these in docs/design/process.md, with why and how it is undone"
    named = set(re.findall(r"`([\w/]+\.py)`", page))
    assert {name for name in named if not (PACKAGE / name).is_file()} == set()


def test_no_process_is_sent_a_signal() -> None:
    for path in SOURCES:
        assert not re.search(r"os\.kill|killpg|send_signal|\.terminate\(", path.read_text()), path


_ORDER = (  # from the lowest layer to the highest; a part imports only parts of lower layers
    {"errors"},
    {"config", "_launch", "_messages", "_undistributed", "windows", "collective", "process"},
    {"tiers"},
    {"core"},
    {"params"},
    {"optim", "checkpoint"},
    {"engine"},
    {"plan", "monitor", "watchdog"},
    {"oom", "tracking"},
    {"listeners", "memory"},
    {"integrations"},
    {"lightning", "fabric", "accelerate", "hf"},
    {"run"},
    {"cli"},
    {"__main__"},
)
_NAMES_IN_STRINGS = {"_registration"}  # puts integrations where the frameworks look them up
_MAY_USE = {  # the frameworks that a part is about, imported on use where they are optional
    "integrations/lightning": {"lightning", "pytorch_lightning", "lightning_fabric"},
    "integrations/fabric": {"lightning", "lightning_fabric", "pytorch_lightning"},
    "integrations/accelerate": {"accelerate", "transformers"},
    "integrations/hf": {"transformers", "accelerate", "huggingface_hub"},
    "run": {"accelerate", "transformers"},
    "plan": {"peft", "transformers"},
    "tracking": {"matplotlib", "wandb"},
}
_MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in SOURCES
}


def _part(module: str) -> str:
    return module.partition(".")[2].partition(".")[0]


def _runtime_imports(path: Path) -> Iterator[tuple[str, str | None]]:
    """Imports that run: those for the type checker alone are left out."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = [ast.Pass()]
    yield from _imports(tree)
    for node in ast.walk(tree):  # by string
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, str) and value in _MODULES and value.count(".") > 1:
            yield value, None


def _arrows(path: Path) -> set[str]:
    """Modules of the package that one of its files imports."""
    found: set[str] = set()
    for module, name in _runtime_imports(path):
        if module.split(".")[0] == "shardplug":
            whole = f"{module}.{name}" if name else module
            found.add(whole if whole in _MODULES else module)
    return found & set(_MODULES)


@pytest.mark.parametrize("module", sorted(_MODULES))
def test_imports_point_down(module: str) -> None:
    path, part = _MODULES[module], _part(module)
    place = next((key for key in _MAY_USE if f"shardplug/{key}" in _name(path)), "")
    for imported, _ in _runtime_imports(path):
        top = imported.split(".")[0]
        if top in FRAMEWORKS or top in ("lightning_utilities", "torchmetrics"):
            assert top in _MAY_USE.get(place, set()), f"{module} imports {imported}"
    if part == "" or part in _NAMES_IN_STRINGS:
        return
    level = next((i for i, parts in enumerate(_ORDER) if part in parts), None)
    assert level is not None, f"give {part} its place in _ORDER"
    lower = {part}.union(*_ORDER[:level])
    for imported in _arrows(path):
        if imported != "shardplug":
            assert _part(imported) in lower, f"{module} imports {imported}"


def test_the_import_graph_has_no_circle() -> None:
    graph = {module: _arrows(path) - {module} for module, path in _MODULES.items()}
    for module in _NAMES_IN_STRINGS:
        graph[f"shardplug.{module}"] = set()
    graph["shardplug"] = set()
    assert sum(len(arrows) for arrows in graph.values()) > 500
    assert tuple(TopologicalSorter(graph).static_order())


def test_import_shardplug_loads_no_framework() -> None:
    code = (
        "import sys, shardplug\n"
        "from shardplug import ZeroConfig, ZeroEngine\n"
        f"print(*sorted(set({FRAMEWORKS!r}) & set(sys.modules)))\n"
        "assert 'torch' in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_docstrings_are_markdown() -> None:
    """The reference pages show Sphinx roles such as :class: as they are written."""
    role = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`[^`]*`")
    found = [f"{_name(path)}: {hit}" for path in SOURCES for hit in role.findall(path.read_text())]
    assert not found, "write the name in backticks only"


def test_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()
