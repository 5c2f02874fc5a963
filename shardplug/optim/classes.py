"""Which optimizers can run on a part of their parameters at a time, and what state they make."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from shardplug.errors import OptimizerError

__all__ = ["INSTANCE_ATTRIBUTES", "Runner", "is_elementwise", "is_like"]

_ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Each element's update looks at that element alone, so a part of a tensor is as good as all."""

_UPDATE = ("step", "_init_group")
"""Methods that make up the update of torch's classes."""

_PROBE_ELEMENTS = 3

State = Mapping[str, Any]


def is_like(value: Any, tensor: torch.Tensor) -> bool:
    """Whether a state value has one element for each of the parameter's."""
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == tensor.shape


def is_elementwise(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether an optimizer's update is known to treat each element alone.

    Args:
        kind: Its class; a subclass of a known one counts as long as it leaves the update as it is.
    """
    owners = {next((c for c in kind.__mro__ if name in vars(c)), None) for name in _UPDATE}
    return all(owner is None or owner in _ELEMENTWISE for owner in owners)


class Runner:
    """Runs an optimizer's own `step` on tensors that stand for parts of its parameters.

    The arithmetic is that of the class, with the implementation that its options choose (single
    tensor, foreach or fused). Where they leave the choice to torch it is the single-tensor one,
    which torch takes for sharded parameters.

    Args:
        optimizer: The user's optimizer.

    Raises:
        OptimizerError: When its update cannot be done in parts.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        kind = type(optimizer)
        owner = next(c for c in kind.__mro__ if "step" in vars(c))
        if not is_elementwise(kind):
            names = ", ".join(c.__name__ for c in _ELEMENTWISE)
            raise OptimizerError(
                f"Expected an optimizer whose update treats each element alone, as {names} of "
                f"torch.optim do, got {kind.__name__}: its state cannot be kept outside the device "
                'and brought in part by part. Use one of these, or offload_optimizer="none".'
            )
        step: Any = owner.__dict__["step"]
        # Without the wrapper in which torch runs the hooks: these run once per step, not per part.
        self._step: Callable[[Any], Any] = step.__wrapped__ if hasattr(step, "hooked") else step
        self._kind, self._owner = kind, owner

    def run(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Iterable[Mapping[str, Any]],
        states: Mapping[torch.Tensor, State],
    ) -> Mapping[torch.Tensor, dict[str, Any]]:
        """Step tensors that have a gradient, in place.

        Args:
            optimizer: The user's optimizer, for everything but groups and state; not changed.
            groups: Options, with the tensors under "params".
            states: State of the tensors that have one; its tensors are changed in place.

        Returns:
            The state after the step.
        """
        stand_in = object.__new__(self._kind)
        own = {
            name: value
            for name, value in vars(optimizer).items()
            if name not in INSTANCE_ATTRIBUTES
        }
        vars(stand_in).update(own)
        stand_in.param_groups = [_with_choice_made(group) for group in groups]
        stand_in.state = defaultdict(dict, {t: dict(state) for t, state in states.items()})
        self._step(stand_in)
        return stand_in.state

    def layout(
        self,
        optimizer: torch.optim.Optimizer,
        group: Mapping[str, Any],
        dtype: torch.dtype,
        device: torch.device,
    ) -> dict[str, torch.dtype]:
        """Find out which state with the parameter's shape a first step will make.

        Raises:
            OptimizerError: When it makes state that is neither of that shape nor one number.
        """
        probe = torch.zeros(_PROBE_ELEMENTS, dtype=dtype, device=device)
        probe.grad = torch.zeros_like(probe)
        if self._owner is torch.optim.Adagrad:
            return {}  # made with the optimizer, not in a step
        made = self.run(optimizer, [{**group, "params": [probe]}], {}).get(probe, {})
        return self.streamed(made, probe)

    def streamed(self, state: State, tensor: torch.Tensor) -> dict[str, torch.dtype]:
        """Return key and dtype of the values that have one element for each of the tensor's.

        Raises:
            OptimizerError: When a value is neither of that shape nor one number.
        """
        found: dict[str, torch.dtype] = {}
        for key, value in state.items():
            if is_like(value, tensor):
                found[key] = value.dtype
            elif isinstance(value, torch.Tensor) and value.numel() != 1:
                raise OptimizerError(
                    f"Expected the state of {self._kind.__name__} to have one element for each "
                    f"element of the parameter, but {key} has the shape {tuple(value.shape)} for a "
                    f"parameter of shape {tuple(tensor.shape)}: it cannot be kept outside the "
                    'device in parts. Use offload_optimizer="none".'
                )
        return found


INSTANCE_ATTRIBUTES = frozenset({"step", "zero_grad", "add_param_group", "param_groups", "state"})
"""What belongs to the one object: replaced methods, and what a stand-in has of its own."""


def _with_choice_made(group: Mapping[str, Any]) -> dict[str, Any]:
    own = {key: value for key, value in group.items() if key != "param_names"}
    if own.get("foreach", False) is None and not own.get("fused"):
        own["foreach"] = False
    params: Sequence[torch.Tensor] = own["params"]
    own["params"] = list(params)
    return own
