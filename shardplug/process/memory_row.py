"""One line of a memory curve: what a rank holds at one phase of one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MODEL_STATE_KINDS", "COSTS", "KINDS", "PHASES", "TIER_KINDS", "MemoryRow"]

MODEL_STATE_KINDS = ("master_shards", "gathered", "gradients", "optimizer_state")
"""Kinds of model state that the engine accounts for."""

KINDS = (*MODEL_STATE_KINDS, "snapshot", "other")
"""Every kind; "other" is what is measured and not accounted for: activations, buffers, caches."""

TIER_KINDS = (
    "activations_cpu",
    "master_shards_cpu",
    "master_shards_nvme",
    "compute_copies_nvme",
    "gradients_cpu",
    "gradients_nvme",
    "optimizer_state_cpu",
    "optimizer_state_nvme",
    "staging",
)
"""What is outside the device, in CPU memory and in files, and the memory it is moved through."""

PHASES = ("after_forward", "after_backward", "after_step")
"""Moments of an optimizer step at which memory is read, in order."""

COSTS = ("step_seconds", "tokens_per_second", "samples_per_second", "flops_per_second", "mfu")
"""What a step costs, in the row of its last phase."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRow:
    """Bytes held by one rank at one phase of one optimizer step."""

    step: int
    """Optimizer steps done, this one included."""

    phase: str
    """One of `PHASES`."""

    rank: int
    """Global rank."""

    master_shards_bytes: int
    """Parameters as they rest: this rank's rows in master precision."""

    gathered_bytes: int
    """Whole parameters gathered for the computation."""

    gradients_bytes: int
    """Gradients, whole ones that accumulate and reduced shards."""

    optimizer_state_bytes: int
    """Optimizer state of this rank's rows."""

    snapshot_bytes: int
    """Copy of the shards that a save in the background writes. On a GPU 0: it is CPU memory there,
    which is not what the row measures."""

    other_bytes: int
    """Measured, but not accounted for: activations, buffers, communication and allocator caches."""

    peak_bytes: int
    """Highest total since the last logged step ended, up to this phase."""

    held_bytes: int
    """Raw reading: resident set size (CPU) or memory reserved by the allocator (GPU)."""

    activations_cpu_bytes: int = 0
    """Activations that wait in CPU memory."""

    master_shards_cpu_bytes: int = 0
    """Parameters that rest in CPU memory."""

    master_shards_nvme_bytes: int = 0
    """Parameters that rest in swap files."""

    compute_copies_nvme_bytes: int = 0
    """Copies of them in the dtype of the computation, in swap files."""

    gradients_cpu_bytes: int = 0
    """Reduced gradients in CPU memory."""

    gradients_nvme_bytes: int = 0
    """Reduced gradients in swap files."""

    optimizer_state_cpu_bytes: int = 0
    """Optimizer state in CPU memory."""

    optimizer_state_nvme_bytes: int = 0
    """Optimizer state in swap files."""

    staging_bytes: int = 0
    """Buffers that state outside the device is moved through."""

    tiers_measured_bytes: int = 0
    """Of `by_tier`, what is in the memory that is measured here: on CPU ranks all but files."""

    step_seconds: float = 0.0
    """Wall time of an optimizer step, the mean since the last logged one; 0 where it is not known,
    and in the rows of phases before the last."""

    tokens_per_second: float = 0.0
    """Tokens that all ranks together train on; 0 where batches have none."""

    samples_per_second: float = 0.0
    """Rows of batches, of all ranks together."""

    flops_per_second: float = 0.0
    """Operations of the model per device, recomputation left out; 0 where there is no plan."""

    mfu: float = 0.0
    """`flops_per_second` by what the device could do; 0 where its speed is not known."""

    @property
    def by_cost(self) -> dict[str, float]:
        """What the step cost, as far as it is known."""
        return {name: value for name in COSTS if (value := float(getattr(self, name)))}

    @property
    def by_tier(self) -> dict[str, int]:
        """Bytes of each of `TIER_KINDS`, in that order."""
        return {kind: getattr(self, f"{kind}_bytes") for kind in TIER_KINDS}

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes of each of `KINDS`, in that order."""
        return {kind: getattr(self, f"{kind}_bytes") for kind in KINDS}

    @property
    def states_bytes(self) -> int:
        """Model states: all kinds but "other"."""
        return sum(self.by_kind[kind] for kind in MODEL_STATE_KINDS)

    @property
    def total_bytes(self) -> int:
        """What was measured, or the accounting where they hold more; files are not memory."""
        return sum(self.by_kind.values()) + self.tiers_measured_bytes
