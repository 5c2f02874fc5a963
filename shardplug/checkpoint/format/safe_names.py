"""Checks names that came from a file before they become paths."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["check_component", "check_inside", "check_relative", "shown"]

_LONGEST = 255
"""Bytes of a file's name, on the file systems in use."""


def shown(value: object) -> str:
    """Write a value that came from a file for a message: on one line, and not too long."""
    try:
        text = ascii(value) if isinstance(value, str) else repr(value)
    except RecursionError:
        text = f"a deep {type(value).__name__}"
    text = "".join(char if char.isprintable() else "?" for char in text)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_component(name: object) -> str:
    """Return `name` if it names one file or folder in a given folder, and nothing elsewhere.

    Raises:
        ValueError: For anything but a plain name: no text, empty, ".", "..", too long, or with a
            separator or a control character in it.
    """
    if not isinstance(name, str):
        raise ValueError(f"is {shown(name)}, expected a name")
    plain = (
        name not in ("", ".", "..")
        and "/" not in name
        and "\\" not in name
        and not any(ord(char) < 32 or ord(char) == 127 for char in name)
    )
    try:
        plain = plain and len(os.fsencode(name)) <= _LONGEST
    except UnicodeEncodeError:
        plain = False
    if not plain:
        raise ValueError(f"is {shown(name)}, expected the plain name of a file or folder")
    return name


def check_relative(name: object) -> str:
    """Return `name` if it is a path of plain names with "/" between them.

    Raises:
        ValueError: For anything else, such as an absolute path, or one with "..".
    """
    if not isinstance(name, str):
        raise ValueError(f"is {shown(name)}, expected a path")
    try:
        for part in name.split("/"):
            check_component(part)
    except ValueError as error:
        raise ValueError(
            f"is {shown(name)}, expected a path of plain names inside the folder"
        ) from error
    return name


def check_inside(folder: Path, name: object) -> Path:
    """Return the path of a file that is named relative to a folder.

    In the Hugging Face cache the files of a snapshot are links to files beside the snapshots.

    Args:
        folder: The folder; it may itself be reached through a link.
        name: The relative path.

    Raises:
        ValueError: When it does not lead to a place inside the folder: it is no relative path, or
            goes through a link that leaves the folder.
    """
    path = folder / check_relative(name)
    try:
        root, target = folder.resolve(), path.resolve()
        caches = [above.parent / "blobs" for above in root.parents if above.name == "snapshots"]
        inside = any(target.is_relative_to(place) for place in (root, *caches))
    except (OSError, RuntimeError):  # a loop of links
        inside = False
    if not inside:
        raise ValueError(f"is {shown(name)}, a link that leads out of the folder")
    return path
