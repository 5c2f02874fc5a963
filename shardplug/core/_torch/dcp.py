"""torch.distributed.checkpoint."""

from __future__ import annotations

from typing import Any

__all__ = ["save_tensors"]


def save_tensors(tensors: dict[str, Any], **options: Any) -> None:
    """Do what torch.distributed.checkpoint.save does, without its warning for one rank.

    The warning could only be silenced for all threads, and saves run in threads.

    Args:
        tensors: Nested dictionaries of tensors.
        options: storage_writer, planner, process_group and no_dist, as for save.
    """
    from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

    _save_state_dict(tensors, **options)
