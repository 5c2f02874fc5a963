"""Opens checkpoints for the adapters: under new names, and with a way out of what fails."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardplug.checkpoint import Reader
from shardplug.checkpoint.read.renaming import Renaming
from shardplug.checkpoint.read.resume import survey
from shardplug.errors import CheckpointError, ConfigError

__all__ = [
    "check_rename",
    "naming_the_newest_whole",
    "open_renamed",
    "renamed",
    "steps_done",
]


@contextmanager
def naming_the_newest_whole(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add the newest whole checkpoint beside `path` to the message of a load that fails.

    Raises:
        CheckpointError: The one that was raised inside, with a way to go on.
    """
    try:
        yield
    except CheckpointError as error:
        found = _newest_whole_beside(Path(path))
        if found is None:
            raise
        raise CheckpointError(
            f"{error} The newest whole checkpoint beside it is {found}."
        ) from error


def _newest_whole_beside(path: Path) -> str | None:
    # On this rank alone: the error that brought us here may have been raised on one rank only.
    newest = survey(path.absolute().parent).newest({path.absolute(), path.resolve()})
    if newest is None:
        return None
    folder, manifest = newest
    step = manifest.get("step")
    return str(folder) if step is None else f"{folder} (step {step})"


def check_rename(rename: Mapping[str, str] | None) -> dict[str, str]:
    """Check a map of names that is applied to whatever checkpoint a strategy loads.

    Args:
        rename: New names of parameters, buffers or whole modules, by those in a checkpoint.

    Raises:
        ConfigError: When one entry's new name is what another renames: it could not be told
            whether a checkpoint has been renamed already.
    """
    rename = dict(rename or {})
    for old in rename:
        for other, new in rename.items():
            if other != old and (_within(new, old) or _within(old, new)):
                raise ConfigError(
                    f"Expected load_rename to give names that it does not rename again, but "
                    f"{other!r} becomes {new!r} and {old!r} becomes {rename[old]!r}. Rename in two "
                    "steps: load and save once with each map."
                )
    return rename


def open_renamed(path: Path, rename: Mapping[str, str]) -> Reader:
    """Open a folder under the names that `rename` gives. Collective.

    An entry whose new name is in the folder and whose old one is not has been applied before it
    was saved, and is left out: one option serves the first start and each that follows.

    Raises:
        CheckpointError: On every rank, when the folder cannot be read, or has neither name.
    """
    reader = Reader(path)
    names = [name for model in reader.manifest["models"] for name in model]
    wanted = {old: new for old, new in rename.items() if not _is_applied(old, new, names)}
    return Reader(path, rename=wanted) if wanted else reader


def renamed(path: Path, state: Mapping[str, Any], rename: Mapping[str, str]) -> dict[str, Any]:
    """Rename the keys of a state dict that was read from a file, as `open_renamed` does.

    Raises:
        CheckpointError: When the state has neither name of an entry.
    """
    names = list(state)
    wanted = {old: new for old, new in rename.items() if not _is_applied(old, new, names)}
    _, found = Renaming.of(path, {"models": [dict(state)], "optimizers": []}, wanted)
    new_state: dict[str, Any] = found["models"][0]
    return new_state


def steps_done(reader: Reader) -> int | None:
    """Return the optimizer steps behind a checkpoint, where whatever saved it knew them."""
    found = reader.meta.get("step", reader.meta.get("extra", {}).get("step"))
    return found if isinstance(found, int) else None


def _is_applied(old: str, new: str, names: list[str]) -> bool:
    has_old = any(_within(name, old) and not _within(name, new) for name in names)
    return not has_old and any(_within(name, new) for name in names)


def _within(name: str, module: str) -> bool:
    """Whether `name` is the tensor or module of that name, or in it."""
    return name == module or name.startswith(f"{module}.")
