"""What a step costs: tokens per second, and the share of the device's peak that a model uses.

Model FLOPs utilisation (MFU) is that of Chowdhery et al., "PaLM" (2022), appendix B: the
operations that forward and backward need, without recomputation, by what the device could do in
the time. Operations are counted as torch's FlopCounterMode does, in the plan's trace of the first
micro-batch; later ones are taken to need as many for each token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardplug.core._torch.tensors import tree_leaves
from shardplug.errors import ConfigError

__all__ = ["PEAK_TFLOPS", "BatchSize", "costs_of", "peak_flops", "batch_size_of"]

PEAK_TFLOPS: dict[str, tuple[float, float, float]] = {
    # Dense products in 16 bits, in TF32, and in fp32, in 10^12 per second, from the vendors' data
    # sheets. The first name that is among the words of torch's name of the device counts.
    "B200": (2250.0, 1100.0, 75.0),
    "GH200": (989.4, 494.7, 66.9),
    "H200": (989.4, 494.7, 66.9),
    "H100 PCIE": (756.0, 378.0, 51.2),
    "H100 NVL": (835.0, 417.5, 60.0),
    "H100": (989.4, 494.7, 66.9),
    "H800": (989.4, 494.7, 66.9),
    "A100": (312.0, 156.0, 19.5),
    "A800": (312.0, 156.0, 19.5),
    "A40": (149.7, 74.8, 37.4),
    "A30": (165.0, 82.0, 10.3),
    "L40S": (362.0, 183.0, 91.6),
    "L40": (181.0, 90.5, 90.5),
    "L4": (121.0, 60.0, 30.3),
    "RTX 4090": (165.2, 82.6, 82.6),
    "RTX 3090": (71.0, 35.6, 35.6),
    "MI300X": (1307.4, 653.7, 163.4),
}
"""Peak speeds of known devices: 16 bits, TF32, fp32."""


@dataclass(frozen=True, slots=True)
class BatchSize:
    """How much one micro-batch has."""

    tokens: int = 0
    """Elements of its first matrix of integers, (samples, positions); 0 where there is none."""
    samples: int = 0
    """Rows of its first tensor."""

    def __add__(self, other: BatchSize) -> BatchSize:
        return BatchSize(self.tokens + other.tokens, self.samples + other.samples)

    def share_of(self, other: BatchSize) -> float:
        """How many times another's work this is."""
        if self.tokens and other.tokens:
            return self.tokens / other.tokens
        return self.samples / other.samples if other.samples else 0.0


def batch_size_of(batch: Any) -> BatchSize:
    """Count the tokens and samples of a micro-batch, by the shapes of its tensors.

    Args:
        batch: Tensors in containers, or the arguments of a call as (args, kwargs).
    """
    if isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[1], Mapping):
        batch = batch[1] if "input_ids" in batch[1] else batch
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), torch.Tensor):
        batch = batch["input_ids"]
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not tensors:
        return BatchSize()
    ids = [t for t in tensors if t.dim() == 2 and not t.is_floating_point()]
    tokens = next((t for t in ids if t.dtype != torch.bool), None)
    if tokens is None:
        return BatchSize(0, tensors[0].shape[0])
    return BatchSize(tokens.numel(), tokens.shape[0])


def peak_flops(
    device: torch.device, dtype: torch.dtype, given_tflops: float | None = None
) -> float | None:
    """Return the operations per second that a device could do, or None where nobody knows.

    Args:
        device: The device.
        dtype: dtype of the computation.
        given_tflops: What the user says, in 10^12.

    Raises:
        ConfigError: For a speed that is not above 0.
    """
    if given_tflops is not None:
        if isinstance(given_tflops, bool) or not given_tflops > 0:
            raise ConfigError(f"Expected peak_tflops above 0, got {given_tflops!r}.")
        return given_tflops * 1e12
    if device.type == "cpu":
        return None
    name = str(torch.get_device_module(device).get_device_name(device)).upper()
    found = (speeds for key, speeds in PEAK_TFLOPS.items() if re.search(rf"\b{key}\b", name))
    known = next(found, None)
    if known is None or "LAPTOP" in name:
        return None
    if dtype in (torch.bfloat16, torch.float16):
        return known[0] * 1e12
    if dtype != torch.float32:
        return None
    precise = torch.get_float32_matmul_precision() == "highest"
    return known[2 if precise else 1] * 1e12


def costs_of(
    ranks: Sequence[Sequence[int]], model: tuple[BatchSize, int], peak: float | None
) -> list[dict[str, Any]]:
    """Turn what the ranks did in one step into rates.

    Args:
        ranks: Of each rank the nanoseconds of a step, its tokens and its samples.
        model: Work of a micro-batch, and how many operations it needs; 0 where nobody knows.
        peak: Operations per second that a device could do.

    Returns:
        For each rank the values of `shardplug.process.memory_row.COSTS`; empty where a rank has
        no time.
    """
    if not all(nanoseconds for nanoseconds, _, _ in ranks):
        return [{} for _ in ranks]
    seconds = max(nanoseconds for nanoseconds, _, _ in ranks) / 1e9  # the slowest is waited for
    found: list[dict[str, Any]] = []
    for _, tokens, samples in ranks:
        flops = BatchSize(tokens, samples).share_of(model[0]) * model[1] / seconds
        found.append(
            {
                "step_seconds": seconds,
                "tokens_per_second": sum(t for _, t, _ in ranks) / seconds,
                "samples_per_second": sum(s for _, _, s in ranks) / seconds,
                "flops_per_second": flops,
                "mfu": flops / peak if peak else 0.0,
            }
        )
    return found
