"""A plan for low-rank adapters on a frozen model, before there is any.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021). The adapters are put in by
PEFT itself, on meta, so that what is planned has the names, shapes and dtypes of what will run.
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardplug.errors import ConfigError

__all__ = ["Lora", "with_adapters"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """Adapters that a plan puts on the model; all else is frozen.

    Raises:
        ConfigError: For a rank below 1, or names that are none.
    """

    rank: int = 16
    """Inner width of the adapters."""

    target_modules: tuple[str, ...] | str | None = None
    """Names (or name endings) of the layers that get one, "all-linear", or None for those that
    PEFT chooses for the kind of model."""

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ConfigError(
                f"Expected the rank of LoRA to be an integer >= 1, got {self.rank!r}."
            )
        names: Any = self.target_modules
        if isinstance(names, list):
            object.__setattr__(self, "target_modules", tuple(names))
        elif isinstance(names, str) and names != "all-linear":
            raise ConfigError(
                f'Expected target_modules "all-linear" or a sequence of names, got {names!r}; '
                f"write ({names!r},)."
            )
        names = self.target_modules
        if names is not None and (
            not names or not all(isinstance(name, str) and name for name in names)
        ):
            raise ConfigError(f"Expected target_modules to hold names of modules, got {names!r}.")

    @property
    def code(self) -> str:
        """The PEFT configuration, as it is written in a program."""
        names: Any = self.target_modules
        targets = "" if names is None else ", target_modules="
        if names is not None:
            targets += repr(names if isinstance(names, str) else list(names))
        return f"peft.LoraConfig(r={self.rank}{targets})"


def with_adapters(model: nn.Module, lora: Lora) -> nn.Module:
    """Return a copy on meta, frozen but for new adapters; the model is left as it was.

    The base keeps its dtype. Adapters are in fp32, as PEFT makes them.

    Args:
        model: Any module, on meta or not.
        lora: Rank, and the layers that get adapters.

    Raises:
        ConfigError: Without PEFT, or where the model has no layers of those names.
    """
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "Planning for LoRA needs peft, which is not installed; run pip install peft, or call "
            "shardplug.memory.plan() with a model that has its adapters already."
        )
    import peft

    if isinstance(model, peft.PeftModel):
        raise ConfigError(
            "Expected a model without adapters, got a PeftModel: leave lora out, it is planned "
            "as it is."
        )
    names: Any = lora.target_modules
    config = peft.LoraConfig(
        r=lora.rank, target_modules=names if isinstance(names, str | None) else list(names)
    )
    if isinstance(names, tuple):
        for name in names:
            if not any(f".{module}".endswith(f".{name}") for module, _ in model.named_modules()):
                raise _unknown(model, name, "no module ends so")
    with torch.device("meta"), warnings.catch_warnings():
        # PEFT looks at attributes that newer versions of transformers are about to rename.
        warnings.simplefilter("ignore", FutureWarning)
        try:
            return peft.get_peft_model(_on_meta(model), config)
        except ValueError as error:
            raise _unknown(model, names, str(error).partition("\n")[0].rstrip(".")) from error


def _unknown(model: nn.Module, names: Any, why: str) -> ConfigError:
    leaves = sorted(
        {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    )
    return ConfigError(
        f"Expected target_modules that {type(model).__name__} has, got {names!r} ({why}). Its "
        f"linear layers end in {', '.join(leaves) or 'nothing'}."
    )


def _on_meta(model: nn.Module) -> nn.Module:
    """Copy a module; its parameters have no data, ties stay ties."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    return copy.deepcopy(model, memo)


def described(lora: Lora | None) -> dict[str, Any] | None:
    """Return plain data, for a plan that is printed."""
    if lora is None:
        return None
    names: Sequence[str] | str | None = lora.target_modules
    return {"rank": lora.rank, "target_modules": list(names) if isinstance(names, tuple) else names}
