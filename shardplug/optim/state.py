"""The state of an optimizer whose tensors are not in the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Protocol

import torch

from shardplug.optim.blocks import Entry

__all__ = ["ParameterState", "StateStore", "StreamedState"]


class StateStore(Protocol):
    """Where the values are."""

    entries: dict[torch.Tensor, Entry]

    def read(self, entry: Entry, key: str) -> torch.Tensor:
        """Return a copy of this rank's part of a value, on the CPU."""

    def tensor(self, entry: Entry, key: str) -> torch.Tensor:
        """Return a value laid out like the parameter; touching it reads or writes the tier."""

    def write_rows(self, entry: Entry, key: str, first: int, values: torch.Tensor) -> None:
        """Replace rows of a value, whether or not the parameter has state yet."""

    def target(self, parameter: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the tensor to load a value into, or None where it has no place of this dtype."""

    def distrust(self, why: str) -> None:
        """Refuse the state until it is replaced as a whole."""

    def write(self, entry: Entry, key: str, value: Any) -> None:
        """Replace a value, or add it."""

    def forget(self, entry: Entry) -> None:
        """Drop all state of a parameter."""

    def clear(self) -> None:
        """Drop all state of all parameters."""

    def require_sound(self) -> None:
        """Raise when the state cannot be trusted."""

    def entry_of(self, parameter: torch.Tensor) -> Entry:
        """Return the parameter's entry; made when it is new."""


class ParameterState(MutableMapping[str, Any]):
    """State of one parameter: assigning a value stores it.

    The values are tensors that read the tier when they are touched, and write what an operation
    changes in place.
    """

    def __init__(self, store: StateStore, entry: Callable[[], Entry]) -> None:
        self._store = store
        self._entry = entry

    def copied(self) -> dict[str, Any]:
        """Return all values as they are now, in memory, in a dictionary of the caller's own."""
        return {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in self.items()
        }

    def _keys(self) -> list[str]:
        entry = self._entry()
        return [*entry.scalars, *entry.keys] if entry.has_state else []

    def __getitem__(self, key: str) -> Any:
        entry = self._entry()
        if entry.has_state and key in entry.scalars:
            return entry.scalars[key]
        if not entry.holds(key):
            raise KeyError(key)
        return self._store.tensor(entry, key)

    def __setitem__(self, key: str, value: Any) -> None:
        self._store.write(self._entry(), key, value)

    def __delitem__(self, key: str) -> None:
        entry = self._entry()
        if key in entry.scalars:
            del entry.scalars[key]
        elif key in entry.keys:
            del entry.keys[key]
        else:
            raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys())

    def __len__(self) -> int:
        return len(self._keys())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._keys())})"


class StreamedState(MutableMapping[torch.Tensor, MutableMapping[str, Any]]):
    """What stands in `optimizer.state`.

    As in the dictionary that it replaces, looking up a parameter without state gives an empty
    mapping to put some in.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store

    def __getitem__(self, parameter: torch.Tensor) -> MutableMapping[str, Any]:
        return ParameterState(self._store, lambda: self._store.entry_of(parameter))

    def __setitem__(self, parameter: torch.Tensor, values: Mapping[str, Any]) -> None:
        entry = self._store.entry_of(parameter)
        if isinstance(values, ParameterState):
            values = dict(values)
        self._store.forget(entry)
        for key, value in values.items():
            self._store.write(entry, key, value)

    def __delitem__(self, parameter: torch.Tensor) -> None:
        if parameter not in self:
            raise KeyError(parameter)
        self._store.forget(self._store.entries[parameter])

    def __contains__(self, parameter: object) -> bool:
        if not isinstance(parameter, torch.Tensor):
            return False
        entry = self._store.entries.get(parameter)
        return entry is not None and entry.has_state

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._store.require_sound()
        return iter([p for p, entry in self._store.entries.items() if entry.has_state])

    def __len__(self) -> int:
        return sum(entry.has_state for entry in self._store.entries.values())

    def target(self, parameter: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the tensor to load a value into, in the tier; None for one that is not there."""
        return self._store.target(parameter, key, dtype)

    def begin_load(self) -> None:
        """Refuse the state until what is being read is in place."""
        self._store.distrust("A checkpoint was being read into it.")

    def clear(self) -> None:
        """Drop all state."""
        self._store.clear()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} parameters)"
