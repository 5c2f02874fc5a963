"""Where the recipes log: W&B, if it is installed."""

from __future__ import annotations

import importlib.util
import os
import warnings


def wandb_project(name: str) -> str:
    """Return the W&B project to log to, or "off" where wandb is not installed.

    Args:
        name: The project that was asked for; "off" for none.
    """
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
