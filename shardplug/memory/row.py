"""One line of a memory curve: what a rank holds at one phase of one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BOOK_KINDS", "KINDS", "PHASES", "MemoryRow"]

BOOK_KINDS = ("master_shards", "gathered", "gradients", "optimizer_state")
"""Kinds of model state that the engine keeps books of."""

KINDS = (*BOOK_KINDS, "snapshot", "other")
"""Every kind; "other" is what is measured and not in the books: activations, buffers, caches."""

PHASES = ("after_forward", "after_backward", "after_step")
"""Moments of an optimizer step at which memory is read, in order."""


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
    """Measured, but in no book: activations, buffers, communication and allocator caches."""

    peak_bytes: int
    """Highest total since the last logged step ended, up to this phase."""

    held_bytes: int
    """Raw reading: resident set size (CPU) or memory reserved by the allocator (GPU)."""

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes of each of `KINDS`, in that order."""
        return {kind: getattr(self, f"{kind}_bytes") for kind in KINDS}

    @property
    def books_bytes(self) -> int:
        """Model states: all kinds but "other"."""
        return sum(self.by_kind[kind] for kind in BOOK_KINDS)

    @property
    def total_bytes(self) -> int:
        """Sum over the kinds: what was measured, or the books where they hold more."""
        return sum(self.by_kind.values())
