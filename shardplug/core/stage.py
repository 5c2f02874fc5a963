"""The ZeRO stages as data: when parameters are gathered and gradients reduced.

Every stage keeps the same state at rest: parameters, gradients and optimizer state are sharded
over the data-parallel ranks. The stages differ only in this table.

    stage  gathered                   copy dropped            gradients reduced
    1      once per window            after the last backward once per window
    2      once per window            after the last backward every micro-batch
    3      each forward and backward  right after use         every micro-batch

A window is the micro-batches accumulated into one optimizer step. With parameters of P bytes in
the dtype sent, N ranks and k micro-batches, a rank moves (N-1)/N times 2P, P + kP and 3kP bytes
per optimizer step (k = 1: 2P, 2P, 3P, as in Rajbhandari et al., "ZeRO: Memory Optimizations
Toward Training Trillion Parameter Models", 2020, section 7).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["STAGES", "Stage"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One row of the table."""

    reshard_after_forward: bool
    """Whether the gathered copy is dropped between forward and backward."""

    reshard_every_backward: bool
    """Whether the copy is dropped after each backward, or only after the window's last."""

    reduce_every_backward: bool
    """Whether gradients are reduced after each backward, or only after the window's last."""


STAGES: dict[int, Stage] = {
    1: Stage(
        reshard_after_forward=False, reshard_every_backward=False, reduce_every_backward=False
    ),
    2: Stage(reshard_after_forward=False, reshard_every_backward=False, reduce_every_backward=True),
    3: Stage(reshard_after_forward=True, reshard_every_backward=True, reduce_every_backward=True),
}
