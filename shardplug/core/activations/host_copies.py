"""Copies of device memory in CPU memory, made beside the computation."""

from __future__ import annotations

from typing import Any, Protocol

import torch

__all__ = ["Copies", "InPlaceCopies", "StreamCopies", "copies_for"]


class Copies(Protocol):
    """Moves flat byte tensors between a device and CPU memory."""

    @property
    def are_late(self) -> bool:
        """Whether a copy is under way after `out` or `back` has returned."""

    def out(self, source: torch.Tensor) -> torch.Tensor:
        """Start to copy a device's bytes; `source` has to stay as it is until then."""

    def back(self, host: torch.Tensor) -> torch.Tensor:
        """Start to copy bytes back to the device; `host` may be dropped at once."""

    def mark(self) -> Any:
        """Return a token for the copies started so far."""

    def wait(self, token: Any) -> None:
        """Let what the device computes next come after the copies of a token."""


class InPlaceCopies:
    """For CPU ranks, where the device's memory is CPU memory: one copy, which is used as it is."""

    are_late = False

    def out(self, source: torch.Tensor) -> torch.Tensor:
        """Copy."""
        return source.clone()

    def back(self, host: torch.Tensor) -> torch.Tensor:
        """Return the copy itself."""
        return host

    def mark(self) -> Any:
        """Nothing is under way."""

    def wait(self, token: Any) -> None:
        """Nothing is under way."""


class StreamCopies:
    """For devices with streams: pinned memory, and one stream beside that of the computation.

    Copies in both directions keep their order on that stream. torch's allocator of pinned memory
    gives a block out again only when the copies from and to it are done.

    Args:
        device: The device.
    """

    are_late = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._stream: Any = self._module.Stream(device)

    def out(self, source: torch.Tensor) -> torch.Tensor:
        """Start to copy into pinned memory, once what was computed so far is there."""
        host = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            host.copy_(source, non_blocking=True)
        return host

    def back(self, host: torch.Tensor) -> torch.Tensor:
        """Start to copy from pinned memory."""
        # Of the computation's stream, so that it may be freed there without more ado.
        made = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            made.copy_(host, non_blocking=True)
        return made

    def mark(self) -> Any:
        """Return an event after the copies started so far."""
        return self._stream.record_event()

    def wait(self, token: Any) -> None:
        """Let the current stream wait for an event."""
        self._module.current_stream(self._device).wait_event(token)


def copies_for(device: torch.device) -> Copies:
    """Return what copies from and to a device."""
    return InPlaceCopies() if device.type == "cpu" else StreamCopies(device)
