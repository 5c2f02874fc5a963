"""One value of the optimizer's state that lives in a tier, as a tensor."""

from __future__ import annotations

import torch

from shardplug.core._torch.tensors import laid_out_like, local_tensor
from shardplug.core.tier_tensor import TierTensor, in_tier
from shardplug.optim.blocks import Entry
from shardplug.optim.state import StateStore

__all__ = ["StateValue", "value_tensor"]


class StateValue:
    """Holds this rank's part of a value, such as one parameter's "exp_avg".

    Args:
        store: Where it is.
        entry: The parameter.
        key: The value's name.
        dtype: Its dtype.
    """

    device = torch.device("cpu")

    def __init__(self, store: StateStore, entry: Entry, key: str, dtype: torch.dtype) -> None:
        self.store, self.entry, self.key = store, entry, key
        self.shape = local_tensor(entry.parameter).shape
        self.dtype = dtype

    def read(self) -> torch.Tensor:
        """Return a copy of the value."""
        return self.store.read(self.entry, self.key)

    def write(self, values: torch.Tensor) -> None:
        """Replace the value."""
        self.store.write(self.entry, self.key, values)

    def write_rows(self, first: int, values: torch.Tensor) -> None:
        """Replace the rows from `first` on."""
        self.store.write_rows(self.entry, self.key, first, values)

    def is_in(self, store: object, entry: Entry, key: str) -> bool:
        """Whether this is the value of that name, already in its place."""
        return self.store is store and self.entry is entry and self.key == key


def value_tensor(store: StateStore, entry: Entry, key: str, dtype: torch.dtype) -> torch.Tensor:
    """Return the value laid out like its parameter; touching it reads or writes the tier."""
    return laid_out_like(TierTensor(StateValue(store, entry, key, dtype)), entry.parameter)


def stored_value(value: object) -> StateValue | None:
    """Return where a value is, if it is one of these."""
    stored = in_tier(local_tensor(value)) if isinstance(value, torch.Tensor) else None
    holder = None if stored is None else stored.holder
    return holder if isinstance(holder, StateValue) else None
