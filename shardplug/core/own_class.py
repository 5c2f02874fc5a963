"""Sharded modules go by the name of their own class.

`fully_shard` gives each unit a new class that is called `FSDP<Name>`. Libraries choose a loss, a
table or a branch by the class's name, so the units get a class that has the name of their own.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardplug.errors import ScheduleError

__all__ = ["keep_class_name"]


def keep_class_name(unit: nn.Module) -> None:
    """Name the class of a module that `fully_shard` has just sharded as it was named before.

    It stays an `FSDPModule` and an instance of the class that it had.
    """
    _, _, own, *_ = type(unit).__mro__  # FSDP<Name>, FSDPModule, <Name>
    unit.__class__ = _sharded_class(own)


@functools.cache
def _sharded_class(own: type[nn.Module]) -> type[nn.Module]:
    # The bases are those of FSDP2's class. That class itself is left as it is: other code in this
    # process may use fully_shard too.
    body: dict[str, Any] = {
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
        "__deepcopy__": _refuse_copy,
        "__reduce_ex__": _refuse_pickle,
    }
    return type(own.__name__, (FSDPModule, own), body)


def _refuse_copy(module: nn.Module, memo: dict[int, Any]) -> NoReturn:
    raise ScheduleError(
        f"Expected {type(module).__name__} to be copied before it was sharded: copy.deepcopy of a "
        "sharded module would copy this rank's shards and none of what gathers them. Copy the "
        "model first and shard the copy as well, or take whole weights on every rank: "
        "full_state_dict() of the engine, get_state_dict() of Accelerate."
    )


def _refuse_pickle(module: nn.Module, protocol: Any) -> NoReturn:
    raise ScheduleError(
        f"Expected the weights of {type(module).__name__} to be saved by name, not the module: a "
        "pickle of a sharded module (torch.save(model), pickle, copy.copy) would hold this rank's "
        "shards. Call on every rank: save() or full_state_dict() of the engine, save_state() or "
        "save_model() of Accelerate, save_checkpoint() of Lightning; `shardplug export` makes "
        "ordinary files of a checkpoint."
    )
