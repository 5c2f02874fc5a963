"""Which dtype parameters are kept, gathered and reduced in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardplug.config import ZeroConfig
from shardplug.core._torch.gradients import GradScaler

__all__ = ["PLAIN_FORWARD", "GradScaler", "Precision"]

PLAIN_FORWARD = "_shardplug_forward"
"""Attribute of a model whose forward was wrapped in autocast: what `vars` held before, or None."""


@dataclass(frozen=True, slots=True)
class Precision:
    """dtypes of the computation and of the gradient reduction.

    With `param_dtype` below fp32 the trainable parameters are kept in fp32 (master weights),
    gathered and computed with in `param_dtype`, and their gradients reduced in `reduce_dtype`.
    """

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None

    @classmethod
    def of(cls, config: ZeroConfig) -> Precision:
        """Read the two dtypes of a configuration, defaulting to an fp32 reduction."""
        param, reduce = config.param_dtype, config.reduce_dtype
        assert not isinstance(param, str) and not isinstance(reduce, str)
        if reduce is None and param is not None:
            reduce = torch.float32
        return cls(param_dtype=param, reduce_dtype=reduce)

    @property
    def keeps_masters(self) -> bool:
        """Whether trainable parameters are kept in fp32 whatever dtype they came in."""
        return self.param_dtype is not None

    def policy(self, *, cast_inputs: bool, complex_weights: bool = False) -> MixedPrecisionPolicy:
        """Translate to FSDP2's policy.

        Args:
            cast_inputs: Whether float inputs of the unit are cast to `param_dtype`.
            complex_weights: Whether the unit trains complex parameters, which are computed with
                and reduced in their own dtype.
        """
        if complex_weights:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(
            param_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
            cast_forward_inputs=cast_inputs,
        )
