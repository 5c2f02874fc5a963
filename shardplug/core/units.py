"""Which modules are gathered together.

A unit is a module whose parameters are gathered in one collective, used, and dropped. Repeated
blocks make good units: they have the same size, and only one or two are whole at a time. All
that is in no unit (an embedding tied to the head, final norm, head) belongs to the root, which is
gathered around the whole forward: its weights may then be read from anywhere in the model, as
fused losses and weight-tying do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from shardplug.errors import ModelError

__all__ = ["UnitPlan", "plan_units"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """What is gathered together in one model."""

    modules: tuple[nn.Module, ...]
    """Units below the root, inner ones before the outer ones that hold them."""

    blocks: tuple[nn.Module, ...]
    """The repeated blocks among them, in forward order: activations are recomputed per block."""

    moved_up: frozenset[nn.Parameter]
    """Parameters of a unit that the root owns, because modules outside the unit share them."""

    replicated: tuple[nn.Parameter, ...]
    """Parameters that cannot be split over ranks (no dimension, or no element)."""


def plan_units(
    model: nn.Module,
    units: Literal["auto"] | tuple[str, ...],
    *,
    child_units: bool = False,
    master_dtype: torch.dtype | None = None,
) -> UnitPlan:
    """Choose the units of a model.

    Args:
        model: The whole model; it is not changed.
        units: "auto", or the class names of the modules to gather together.
        child_units: Also make every direct child with parameters a unit, so that the root owns
            only parameters of its own.
        master_dtype: dtype that trainable parameters will be kept in, or None for their own.

    Raises:
        ModelError: When a class name matches no module, or a unit cannot be formed.
    """
    blocks = _named_blocks(model, units) if units != "auto" else _auto_blocks(model)
    chosen = list(blocks)
    if units == "auto":
        chosen += _untied_embeddings(model, chosen)
    if child_units:
        chosen += [child for child in model.children() if not isinstance(child, _CONTAINERS[:2])]
    chosen = [module for module in _unique(chosen) if any(True for _ in module.parameters())]
    chosen = [module for module in chosen if module is not model]
    chosen, moved_up = _resolve_sharing(model, chosen)
    chosen += _odd_dtype_modules(model, chosen, master_dtype)
    order = {module: index for index, module in enumerate(_post_order(model))}
    return UnitPlan(
        modules=tuple(sorted(_unique(chosen), key=order.__getitem__)),
        blocks=tuple(block for block in blocks if block in set(chosen)),
        moved_up=moved_up,
        replicated=tuple(p for p in model.parameters() if not _is_split(p)),
    )


def _is_split(parameter: torch.Tensor) -> bool:
    return parameter.ndim > 0 and parameter.numel() > 0


def _named_blocks(model: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
    found: list[nn.Module] = []
    for name in names:
        matches = [module for module in model.modules() if type(module).__name__ == name]
        if not matches:
            classes = sorted({type(module).__name__ for module in model.modules()})
            raise ModelError(
                f"Expected units to name classes of modules in the model, found no {name!r}. "
                f"The model has {', '.join(classes)}."
            )
        bare = next((m for m in matches if isinstance(m, _CONTAINERS[:2])), None)
        if bare is not None:
            raise ModelError(
                f"Expected units to name modules with a forward, got {name!r}, a plain "
                "container: name the class of its entries."
            )
        found += matches
    return found


def _auto_blocks(model: nn.Module) -> list[nn.Module]:
    """Hugging Face's no-split classes where the model declares them, else repeated blocks."""
    names: set[str] = set()
    for module in model.modules():
        declared = getattr(module, "_no_split_modules", None)
        if isinstance(declared, (list, tuple, set)):
            names.update(str(name) for name in declared)
    declared_blocks = [m for m in model.modules() if type(m).__name__ in names and _splits(m)]
    return declared_blocks or list(_repeated_blocks(model))


def _splits(module: nn.Module) -> bool:
    """Whether the module is a block: leaf modules may have their weight read by the parent."""
    return not isinstance(module, _CONTAINERS) and any(True for _ in module.children())


def _repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield entries of containers that hold two or more blocks of one class, outermost first."""
    if isinstance(module, _CONTAINERS):
        counts = Counter(type(child) for child in module.children() if _splits(child))
        for child in module.children():
            if counts[type(child)] >= 2 and _splits(child):
                yield child
            else:
                yield from _repeated_blocks(child)
        return
    for child in module.children():
        yield from _repeated_blocks(child)


def _untied_embeddings(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Input embeddings of Hugging Face models that no other module shares."""
    found: list[nn.Module] = []
    inside = {inner for block in blocks for inner in block.modules()}
    owners = _owners(model)
    for module in model.modules():
        get_embeddings = getattr(module, "get_input_embeddings", None)
        if not hasattr(module, "_no_split_modules") or not callable(get_embeddings):
            continue
        try:
            embedding = get_embeddings()
        except NotImplementedError:  # models without token embeddings declare it so
            continue
        if not isinstance(embedding, nn.Module) or embedding in inside:
            continue
        if all(len(owners[parameter]) == 1 for parameter in embedding.parameters()):
            found.append(embedding)
    return found


def _owners(model: nn.Module) -> dict[nn.Parameter, list[nn.Module]]:
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and module not in owners.setdefault(parameter, []):
                owners[parameter].append(module)
    return owners


def _home(model: nn.Module, chosen: Iterable[nn.Module]) -> dict[nn.Module, nn.Module]:
    """Map every module to the innermost unit that holds it; modules of the root are left out."""
    home: dict[nn.Module, nn.Module] = {}
    order = {module: index for index, module in enumerate(_post_order(model))}
    for unit in sorted(chosen, key=order.__getitem__, reverse=True):
        for module in unit.modules():
            home[module] = unit
    return home


def _resolve_sharing(
    model: nn.Module, chosen: list[nn.Module]
) -> tuple[list[nn.Module], frozenset[nn.Parameter]]:
    """Make each shared parameter belong to one unit.

    A parameter shared with a module of the root moves up to the root. Units that share a
    parameter only among themselves are dissolved into the root.
    """
    kept = list(chosen)
    while True:
        homes = _homes(model, kept)
        moved_up: set[nn.Parameter] = set()
        dissolved: set[nn.Module] = set()
        for parameter, owners in _owners(model).items():
            units = {unit for owner in owners for unit in homes[owner]}
            if len(units) == 1:
                continue
            if None in units:
                moved_up.add(parameter)
            else:
                dissolved.update(unit for unit in units if unit is not None)
        if not dissolved:
            return kept, frozenset(moved_up)
        kept = [unit for unit in kept if unit not in dissolved]


def _homes(model: nn.Module, chosen: Iterable[nn.Module]) -> dict[nn.Module, set[nn.Module | None]]:
    """Map every module to the innermost units around it; a module in several places has several.

    None stands for the root.
    """
    units = set(chosen)
    homes: dict[nn.Module, set[nn.Module | None]] = {}
    pending: list[tuple[nn.Module, nn.Module | None]] = [(model, None)]
    while pending:
        module, unit = pending.pop()
        unit = module if module in units else unit
        if unit not in homes.setdefault(module, set()):
            homes[module].add(unit)
            pending += [(child, unit) for child in module.children()]
    return homes


def _odd_dtype_modules(
    model: nn.Module, chosen: list[nn.Module], master_dtype: torch.dtype | None
) -> list[nn.Module]:
    """Modules that need a unit of their own because their trainable dtype is not the unit's.

    Gradients of one unit are reduced in one buffer, hence in one dtype.
    """

    def kept_in(parameter: nn.Parameter) -> torch.dtype:
        low = master_dtype is not None and parameter.is_floating_point()
        return master_dtype if low and master_dtype is not None else parameter.dtype

    names = {module: name for name, module in model.named_modules()}
    home = _home(model, chosen)
    sizes: dict[nn.Module | None, Counter[torch.dtype]] = {}
    for module in model.modules():
        counter = sizes.setdefault(home.get(module), Counter())
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and _is_split(parameter):
                counter[kept_in(parameter)] += parameter.numel()
    odd: list[nn.Module] = []
    # A unit has the dtype of the parameters of its own module, else the most common one; an odd
    # module becomes a unit with all below it, so that what lies below has to agree with it.
    pending: list[tuple[nn.Module, torch.dtype | None]] = [(model, None)]
    seen: set[nn.Module] = set()
    while pending:
        module, dtype = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        own = {
            kept_in(p) for p in module.parameters(recurse=False) if p.requires_grad and _is_split(p)
        }
        if module is model or home.get(module) is module:
            counter = sizes[home.get(module)]
            dtype = next(iter(own)) if own else max(counter, key=counter.__getitem__, default=None)
        if own - {dtype} and (len(own) > 1 or isinstance(module, _WITHOUT_FORWARD)):
            raise ModelError(
                f"Trainable parameters of {names[module] or 'the model itself'} "
                f"({type(module).__name__}) mix "
                f"{', '.join(sorted(map(str, own | {dtype})))} in one unit. Give them one dtype, "
                "train real ones with a param_dtype (bf16-mixed) so that all masters are fp32, or "
                "put them into modules of their own."
            )
        if own - {dtype}:
            odd.append(module)
            dtype = own.pop()
        pending += [(child, dtype) for child in module.children()]
    return odd


def _post_order(module: nn.Module, seen: set[nn.Module] | None = None) -> Iterator[nn.Module]:
    seen = set() if seen is None else seen
    for child in module.children():
        if child not in seen:
            seen.add(child)
            yield from _post_order(child, seen)
    yield module


def _unique(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return list(dict.fromkeys(modules))
