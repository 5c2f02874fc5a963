"""What a rank should hold: the formulas of model-state memory, without running anything.

With N shards, Adam and fp32 master weights, in bytes per parameter and rank:

    compute/reduce  stage  after forward  backward, not the last  after the last  at rest
    fp32/fp32       1      4 + 12/N       4 + 4 + 12/N            16/N            12/N
    fp32/fp32       2      4 + 12/N       4 + 16/N                16/N            12/N
    any             3      12/N           16/N                    16/N            12/N
    bf16/fp32       1      2 + 12/N       2 + 4 + 12/N            16/N            12/N
    bf16/bf16       1      2 + 12/N       2 + 2 + 12/N            16/N            12/N
    bf16/any        2      2 + 12/N       2 + 16/N                16/N            12/N

Not in the table: the units in flight (a unit has two to three copies while it is gathered, and
its whole gradients have a staging copy while they are reduced, the last one until the next
reduction or the window's end), activations, and the padding of dim 0 to a multiple of N, which
`model_states` states separately.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020),
figure 1, counts 4 + 12/N, 2 + 14/N and 16/N for fp16 training. See `paper_bytes`. Ours
differs in three ways: the 2-byte weights are a gathered copy that exists only inside a step, so
no stage holds full weights at rest; gradient shards are kept in master precision (4 bytes, not
2); and stage 1 with one micro-batch per window reduces each gradient as it arrives, so full
gradients are held only while they accumulate, in the reduction's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from shardplug.core.stage import STAGES
from shardplug.errors import ConfigError
from shardplug.process.memory_row import MODEL_STATE_KINDS

__all__ = [
    "ElementBytes",
    "Moment",
    "ParameterSize",
    "StateBytes",
    "bytes_per_parameter",
    "model_states",
    "paper_bytes",
]

_ADAM_BYTES = 12  # K of the paper: fp32 weight, momentum and variance


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementBytes:
    """Bytes of one element of each kind of state; the defaults are fp32 with Adam."""

    compute: int = 4
    """Gathered parameters (2: bf16)."""

    reduce: int = 4
    """Whole gradients that accumulate, in the dtype of the reduction."""

    master: int = 4
    """Parameters at rest and gradient shards (2: pure bf16)."""

    optimizer: int = 8
    """All optimizer state of one parameter (Adam in fp32: 8; SGD with momentum: 4; SGD: 0)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A point in an accumulation window, the micro-batches of one optimizer step."""

    phase: Literal["after_forward", "after_backward", "after_step", "at_rest"]
    """Where in the micro-batch; "at_rest" is after the step and `zero_grad`."""

    first: bool = True
    """Whether the micro-batch is the window's first."""

    last: bool = True
    """Whether the micro-batch is the window's last."""

    stepped: bool = True
    """Whether the optimizer has its state, which it makes in its first step."""

    grads_kept_through_forward: bool = False
    """Whether the last window's gradients are still there in the first micro-batch's forward:
    true where `zero_grad` comes between forward and backward, as in Lightning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSize:
    """Shape of a whole parameter, and whether it is trained."""

    shape: tuple[int, ...]
    trainable: bool = True


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Model states of one rank, by kind."""

    exact: dict[str, Fraction]
    """Bytes without padding."""

    padding: dict[str, int]
    """Bytes that padding adds, since dim 0 is cut into chunks of equal size."""

    @property
    def total(self) -> float:
        """Bytes of all kinds, without padding."""
        return float(sum(self.exact.values()))


def bytes_per_parameter(
    stage: int, num_shards: int, moment: Moment, sizes: ElementBytes | None = None
) -> dict[str, Fraction]:
    """Give the bytes one trainable parameter takes on each rank, by kind, without padding.

    Args:
        stage: ZeRO stage, 1 to 3.
        num_shards: Ranks that share one copy of the parameters (N); with replicas, the ranks of
            one replica.
        moment: Point in the accumulation window.
        sizes: Bytes per element; by default fp32 with Adam.

    Returns:
        Exact bytes for "master_shards", "gathered", "gradients" and "optimizer_state".

    Raises:
        ConfigError: For a stage or a number of shards that does not exist.
    """
    if stage not in STAGES:
        raise ConfigError(f"Expected stage 1, 2 or 3, got {stage!r}.")
    if num_shards < 1:
        raise ConfigError(f"Expected num_shards >= 1, got {num_shards!r}.")
    sizes = sizes or ElementBytes()
    row = STAGES[stage]
    forward, backward = moment.phase == "after_forward", moment.phase == "after_backward"
    gathered = (forward and not row.reshard_after_forward) or (
        backward and not moment.last and not row.reshard_every_backward
    )
    # A window's gradients exist from its first backward until zero_grad.
    pending = (forward and not moment.first) or (backward and not moment.last)
    whole_gradients = pending and not row.reduce_every_backward
    reduced = (pending and not whole_gradients) or (backward and moment.last)
    reduced = reduced or moment.phase == "after_step"
    reduced = reduced or (forward and moment.first and moment.grads_kept_through_forward)
    shard = Fraction(1, num_shards)
    gradients = Fraction(sizes.reduce) if whole_gradients else sizes.master * shard * reduced
    return {
        "master_shards": sizes.master * shard,
        "gathered": Fraction(sizes.compute if gathered else 0),
        "gradients": gradients,
        "optimizer_state": sizes.optimizer * shard * moment.stepped,
    }


def model_states(
    parameters: Iterable[ParameterSize | Sequence[int]],
    stage: int,
    num_shards: int,
    moment: Moment,
    sizes: ElementBytes | None = None,
    shard: int | None = None,
) -> StateBytes:
    """Give the model states a rank holds, for parameters of these shapes.

    Dim 0 of each parameter is cut into N chunks of equal size, the last ones shorter or empty, and
    shards are stored at the full chunk's size. So 257 rows on 2 ranks take 129 rows on each, which
    is one row of padding on the second. Optimizer state is made for a rank's own rows only. A
    0-dim parameter is whole on every rank.

    Args:
        parameters: Shapes of the whole parameters, tied ones once; a bare shape is trained.
        stage: ZeRO stage, 1 to 3.
        num_shards: Ranks that share one copy of the parameters (N).
        moment: Point in the accumulation window.
        sizes: Bytes per element; by default fp32 with Adam.
        shard: Which of the N shards the rank has, from 0. None gives the average rank, and the
            padding of the one that holds most.

    Returns:
        Bytes by kind, and what padding adds to each.

    Raises:
        ConfigError: For a stage, a number of shards or a shard that does not exist.
    """
    sharded = bytes_per_parameter(stage, num_shards, moment, sizes)
    element = bytes_per_parameter(stage, 1, moment, sizes)
    if shard is not None and not 0 <= shard < num_shards:
        raise ConfigError(f"Expected a shard from 0 to {num_shards - 1}, got {shard!r}.")
    exact = dict.fromkeys(MODEL_STATE_KINDS, Fraction(0))
    padding = dict.fromkeys(MODEL_STATE_KINDS, 0)
    for item in parameters:
        size = item if isinstance(item, ParameterSize) else ParameterSize(shape=tuple(item))
        kinds = MODEL_STATE_KINDS if size.trainable else MODEL_STATE_KINDS[:2]
        if not size.shape:
            # Replicated: it is not gathered, and its gradient has the dtype that it rests in.
            has = {**element, "gathered": Fraction(0)}
            has["gradients"] = element["master_shards"] if element["gradients"] else Fraction(0)
            for kind in kinds:
                exact[kind] += has[kind]
            continue
        rows, columns = size.shape[0], math.prod(size.shape[1:])
        chunk = -(-rows // num_shards)
        own = Fraction(rows, num_shards)
        if shard is not None:
            own = Fraction(min(max(rows - shard * chunk, 0), chunk))
        for kind in kinds:
            whole = sharded[kind] == element[kind]
            held = Fraction(rows) if whole else own
            stored = held
            if kind == "gathered":
                stored = Fraction(chunk * num_shards)
            elif not whole and not (kind == "optimizer_state" and shard is not None):
                stored = Fraction(chunk)
            exact[kind] += element[kind] * held * columns
            padding[kind] += math.ceil(element[kind] * (stored - held) * columns)
    return StateBytes(exact, padding)


def paper_bytes(stage: int, num_parameters: float, num_ranks: int) -> float:
    """Give the bytes per rank that the ZeRO paper counts for fp16 training with Adam.

    Args:
        stage: 1, 2 or 3, or 0 for plain data parallelism (16 bytes per parameter).
        num_parameters: Parameters of the model.
        num_ranks: Data-parallel ranks.

    Returns:
        Bytes per rank; 7.5e9 parameters on 64 ranks give 120, 31.4, 16.6 and 1.9 GB (1e9 bytes).

    Raises:
        ConfigError: For a stage out of 0 to 3.
    """
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"Expected stage 0, 1, 2 or 3, got {stage!r}.")
    weights, gradients, optimizer = (
        width / (num_ranks if stage >= sharded_from else 1)
        for width, sharded_from in ((2, 3), (2, 2), (_ADAM_BYTES, 1))
    )
    return num_parameters * (weights + gradients + optimizer)
