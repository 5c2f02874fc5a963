"""Lightning's precision plugins, with gradient clipping done by the engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from shardplug.engine import ZeroEngine

__all__ = ["clip_through_engine"]

_ENGINE = "_shardplug_engine"


def clip_through_engine(plugin: Any, engine: Callable[[], ZeroEngine]) -> Any:
    """Make a precision plugin clip over all ranks; in place.

    The plugin becomes an instance of a subclass of its own class, under the same name, which is
    the key of its state in checkpoints. Clipping that the class defines itself is kept.

    Args:
        plugin: A precision plugin of Lightning's, or of the user's.
        engine: Returns the engine; called when clipping, as it does not exist before.

    Returns:
        The same object.
    """
    if not hasattr(plugin, _ENGINE):
        kind: Any = type(plugin)
        plugin.__class__ = _clipping(kind)
    setattr(plugin, _ENGINE, engine)
    return plugin


@functools.cache
def _clipping(kind: Any) -> type:
    body: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    own = {"clip_grad_by_norm": _clip_grad_by_norm, "clip_grad_by_value": _clip_grad_by_value}
    body.update({name: method for name, method in own.items() if _is_lightnings(kind, name)})
    if _is_lightnings(kind, "clip_gradients"):
        body["clip_gradients"] = _clip_gradients(kind)
    return type(kind.__name__, (kind,), body)


def _is_lightnings(kind: type, name: str) -> bool:
    owner = next(base for base in kind.__mro__ if name in vars(base))
    return owner.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")


def _clip_grad_by_norm(self: Any, optimizer: Any, clip_val: float) -> None:
    engine: ZeroEngine = getattr(self, _ENGINE)()
    engine.clip_grad_norm(float(clip_val), parameters=self.main_params(optimizer))


def _clip_grad_by_value(self: Any, optimizer: Any, clip_val: float) -> None:
    engine: ZeroEngine = getattr(self, _ENGINE)()
    engine.clip_grad_value(float(clip_val), parameters=self.main_params(optimizer))


def _clip_gradients(kind: type) -> Callable[..., None]:
    """Lightning refuses to clip for fused optimizers, which is needed with a GradScaler only."""
    base = next(b for b in reversed(kind.__mro__) if "clip_gradients" in vars(b))

    def clip_gradients(self: Any, *args: Any, **kwargs: Any) -> None:
        chosen = kind if getattr(self, "scaler", None) is not None else base
        chosen.clip_gradients(self, *args, **kwargs)  # type: ignore[attr-defined]

    return clip_gradients
