"""Activations in CPU memory, in a trace: the run's own code, with copies that have no memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from shardplug.core.activations.activation_offload import ActivationOffload
from shardplug.core.activations.unit_hooks import follow_model
from shardplug.plan.trace.recorder import Recorder
from shardplug.plan.trace.trace_hooks import TraceSettings

__all__ = ["traced_offload"]


@contextmanager
def traced_offload(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    states: Sequence[torch.Tensor],
    recorder: Recorder,
    settings: TraceSettings,
) -> Iterator[None]:
    """Move what is saved inside, as `ZeroEngine` would.

    Args:
        model: On meta.
        blocks: Its repeated blocks.
        states: Its parameters and buffers, which stay.
        recorder: Told what is in CPU memory.
        settings: The device, and how far ahead activations come back.

    Raises:
        ModelError: When there are no repeated blocks.
    """
    offload = ActivationOffload(
        _Copies(recorder, settings.device),
        torch.device("meta"),
        settings.prefetch,
        lambda: [state.untyped_storage() for state in states],
    )
    follow_model(offload, (), blocks)
    # A step may go on after the model has returned; the model may be called by another method.
    model.register_forward_pre_hook(lambda *_: offload.begin())
    model.register_forward_hook(lambda *_: offload.end())
    offload.begin()
    try:
        yield
    finally:
        offload.end()


class _Copies:
    """Copies without memory, of which those in CPU memory are marked."""

    def __init__(self, recorder: Recorder, device: str) -> None:
        self._recorder = recorder
        self.are_late = device != "cpu"

    def out(self, source: torch.Tensor) -> torch.Tensor:
        host = torch.empty_like(source)
        self._recorder.away(host)
        return host

    def back(self, host: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(host) if self.are_late else host

    def mark(self) -> None:
        pass

    def wait(self, token: None) -> None:
        pass
