"""Says what to do where a parameter is used as a shard, or after its gathered copy is gone."""

from __future__ import annotations

import ast
import linecache
import re
import traceback
from collections.abc import Iterable, Iterator
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardplug.core._torch.gradients import current_backward
from shardplug.core._torch.groups import named_managed_parameters, parameters_of_fsdp
from shardplug.core._torch.tensors import ShardNotes
from shardplug.errors import ScheduleError

__all__ = ["advise", "note_names", "note_own_gradient", "refuse_mixed_scalar"]

_names = ShardNotes()
"""Names of the sharded parameters of all engines."""

_own_gradients: tuple[int, list[str]] = (-1, [])
"""A backward, and the parameters whose shards it has brought gradients to as DTensors."""

_ADVICE = (
    "Run what uses it inside `with engine.gathered(model, grad=True):` (Lightning: "
    "self.trainer.strategy, Fabric: fabric.strategy, Accelerate: accelerator), where parameters "
    "are whole and gradients flow to them."
)
_MOST_NODES = 10_000
_FRAMES = 6


def note_names(root: torch.nn.Module) -> None:
    """Remember the names of a model's sharded parameters."""
    named = named_managed_parameters(root)
    for param, (name, _) in zip(parameters_of_fsdp(root), named, strict=True):
        _names.set(param, name)


def note_own_gradient(parameter: torch.Tensor) -> None:
    """Remember that the backward under way brings a gradient to a shard by itself."""
    global _own_gradients
    backward = current_backward()
    if _own_gradients[0] != backward:
        _own_gradients = (backward, [])
    _own_gradients[1].append(_names.get(parameter))


def refuse_mixed_scalar(tensors: Iterable[Any], operation: str) -> None:
    """Refuse a loss to which a plain tensor and a shard contribute.

    Raises:
        ScheduleError: Naming the parameters, where tensors were computed from some.
    """
    if names := _origins_of(tensors):
        raise ScheduleError(f"{_used_as_shard(names)} {_ADVICE} ({operation})")


def _used_as_shard(names: list[str]) -> str:
    return (
        f"Expected a parameter to be used in the forward of its unit, got {_some(names)} as a "
        "shard (DTensor) among plain tensors."
    )


def _at_hand(frame: FrameType, line: int) -> Iterator[Any]:
    """Yield the values of the names and attributes in the line that a frame was at."""
    source = linecache.getline(frame.f_code.co_filename, line).strip()
    try:
        tree = ast.parse(source)
    except SyntaxError:  # one of several lines
        yield from frame.f_locals.values()
        return
    for node in ast.walk(tree):
        try:
            yield _value(node, frame)
        except (AttributeError, LookupError, TypeError):
            continue


def _value(node: ast.AST, frame: FrameType) -> Any:
    """Look up names, attributes and entries; calls and the like are not repeated."""
    if isinstance(node, ast.Name):
        return {**frame.f_globals, **frame.f_locals}[node.id]
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, frame), node.attr)
    if isinstance(node, ast.Subscript):
        return _value(node.value, frame)[_value(node.slice, frame)]
    if isinstance(node, ast.Constant):
        return node.value
    raise LookupError(type(node).__name__)


def _some(names: list[str]) -> str:
    if not names:
        return "a parameter"
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _origins(tensor: Any) -> Iterator[str]:
    """Yield the names of the parameters that a DTensor was computed from."""
    if not isinstance(tensor, DTensor):
        return
    if name := _names.get(tensor):
        yield name
    pending: list[Any] = [tensor.grad_fn]
    seen: set[Any] = set()
    while pending and len(seen) < _MOST_NODES:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and (name := _names.get(variable)):
            yield name
        pending += [following for following, _ in reversed(node.next_functions)]


def advise(error: BaseException) -> None:
    """Add what to do to torch's error, if it comes from a parameter that is not there."""
    if not isinstance(error, RuntimeError) or not _names.items() or _ADVICE in str(error):
        return
    text = str(error)
    if "got mixed torch.Tensor and DTensor" in text:
        names = _names_in(error.__traceback__)
        if not names and _own_gradients[0] == current_backward():
            names = _own_gradients[1]
        found = _used_as_shard(names)
    elif "appears to not have been used in the graph" in text:
        asked = (t for t in _asked_of_autograd(error) if isinstance(t, torch.Tensor))
        names = [name for t in asked if (name := _names.get(t))]
        found = f"{_some(names)} was asked for a gradient as a shard, which no forward uses."
    elif "storage of size 0" in text:
        names = _names_of_shape(text)
        found = (
            f"A gathered copy is gone, of a parameter of this shape ({_some(names)}): it is "
            "dropped after a unit's backward, and a gradient of a gradient needs it again."
        )
    else:
        return
    error.args = (f"{text}\n{found} {_ADVICE}",)


def _names_in(trace: TracebackType | None) -> list[str]:
    """Return the parameters that the code at the end of a traceback refers to."""
    frames = [] if trace is None else list(traceback.walk_tb(trace))
    found = (_at_hand(frame, line) for frame, line in reversed(frames[-_FRAMES:]))
    return next((names for names in map(_origins_of, found) if names), [])


def _origins_of(values: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(name for value in values for name in _origins(value)))


def _asked_of_autograd(error: BaseException) -> Iterator[torch.Tensor]:
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_name == "grad" and code.co_filename == torch.autograd.__file__:
            asked = trace.tb_frame.f_locals.get("inputs", ())
            yield from (asked,) if isinstance(asked, torch.Tensor) else asked
        trace = trace.tb_next


def _names_of_shape(text: str) -> list[str]:
    match = re.search(r"sizes \[([\d, ]*)\]", text)
    if match is None:
        return []
    sizes = sorted(int(size) for size in match[1].split(",") if size.strip())
    alike = [name for parameter, name in _names.items() if sorted(parameter.shape) == sizes]
    return list(dict.fromkeys(alike))
