"""Where the recipes log: W&B, if it is installed; and what of other libraries they leave out."""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings


def wandb_project(name: str) -> str:
    """Return the W&B project to log to, or "off" where wandb is not installed.

    W&B's own summary at the end is left out: the recipes print what they have written.

    Args:
        name: The project that was asked for; "off" for none.
    """
    os.environ.setdefault("WANDB_SILENT", "true")
    if name == "off" or importlib.util.find_spec("wandb") is not None:
        return name
    if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
        warnings.warn(
            "wandb is not installed, so this run is not logged to W&B: pip install wandb, or "
            "--wandb off to hide this warning.",
            UserWarning,
            stacklevel=2,
        )
    return "off"


def quiet_lightning() -> None:
    """Leave out what Lightning says at the start that a reader of these recipes cannot act on."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*have no `val_dataloader`")  # it is given later
    warnings.filterwarnings("ignore", message=".*treespec.*LeafSpec")  # Lightning's own use
