"""LayerDrop: modules that leave out layers at random draw the same numbers on every rank.

A layer that is left out is a unit that is not gathered, so every rank has to leave out the same
ones, as one process does for its whole batch. transformers' own answer is to run every layer where
it sees FSDP2's mark on the module, which is another training.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from shardplug.core._torch.calls import hide_managed_mark
from shardplug.core.hooks import outside_of_graphs
from shardplug.errors import ModelError

__all__ = ["drop_same_layers"]


def drop_same_layers(root: nn.Module, group: dist.ProcessGroup) -> None:
    """Let the modules that drop layers in training draw rank 0's numbers.

    They are known by their forward, which reads an attribute called `layerdrop`, or
    `<something>_layerdrop`, of the module or its config.

    Args:
        root: The sharded model.
        group: All ranks, on the CPU.
    """
    for name, module in root.named_modules():
        code = _code_of_forward(module)
        if code is None:
            continue
        if "is_fsdp_managed_module" in code.co_names:
            hide_managed_mark(module)
        if _rate_names(code) and dist.get_world_size(group) > 1:
            _SameDraws(name or "the model", module, code, group)


def _code_of_forward(module: nn.Module) -> CodeType | None:
    forward: Any = getattr(type(module), "forward", None)
    code = None if forward is None else getattr(inspect.unwrap(forward), "__code__", None)
    return code if isinstance(code, CodeType) else None


class _SameDraws(TorchFunctionMode):
    """Replaces each number that `torch.rand` draws in one module's forward by rank 0's.

    Every rank draws all the same: its generator moves on as it does unsharded.

    Args:
        name: The module's name in the model.
        module: Drops layers in its forward.
        code: Of the forward.
        group: All ranks, on the CPU.
    """

    def __init__(
        self, name: str, module: nn.Module, code: CodeType, group: dist.ProcessGroup
    ) -> None:
        super().__init__()
        self._name = name
        self._group = group
        self._rates = _rate_names(code)
        self._draws_elsewhere = "rand" not in code.co_names and bool(
            {"random", "uniform"} & {*code.co_names}
        )
        self._entered = 0
        module.register_forward_pre_hook(outside_of_graphs(self._begin), prepend=True)
        module.register_forward_hook(outside_of_graphs(self._end), always_call=True)

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the call, and send rank 0's number to the others if it drew one number."""
        result = func(*args, **(kwargs or {}))
        if func is not torch.rand or result.numel() != 1:
            return result
        number = result.detach().to("cpu", torch.float64)
        dist.broadcast(number, group=self._group, group_src=0)
        return number.to(result)

    def _begin(self, module: nn.Module, *_: Any) -> None:
        rate = _rate(module, self._rates)
        if not module.training or not rate:
            return
        if self._draws_elsewhere:
            raise ModelError(
                f"Expected layerdrop=0 in {self._name} ({type(module).__name__}), got {rate}: it "
                "draws the layers to leave out from Python's or numpy's random numbers, which "
                "differ between ranks. Set its layerdrop to 0."
            )
        self._entered += 1
        self.__enter__()  # type: ignore[no-untyped-call]

    def _end(self, *_: Any) -> None:
        if self._entered:
            self._entered -= 1
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _rate_names(code: CodeType) -> list[str]:
    return [name for name in code.co_names if name.endswith("layerdrop")]


def _rate(module: nn.Module, names: Sequence[str]) -> float:
    for name in names:
        for holder in (module, getattr(module, "config", None)):
            rate = getattr(holder, name, None)
            if isinstance(rate, (int, float)) and rate:
                return float(rate)
    return 0.0
