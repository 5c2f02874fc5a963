"""One micro-batch traced on tensors without memory: every allocation, in order.

The model's parameters are put on meta in the dtype they are computed with, a forward and a
backward run, and every storage that comes and goes is noted, with marks where FSDP2's hooks would
gather and reduce. No weights are needed and no memory is used; what is kept for the backward,
what lives only for a moment and when each gradient arrives are torch's own doing.

Repeated blocks are traced once: see `repeat`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import nn

from shardplug.core._torch import TorchDispatchMode, is_read_of_value, tree_leaves, tree_map
from shardplug.core.checkpointing import checkpoint_activations
from shardplug.errors import ModelError
from shardplug.memory.attention import as_on_device
from shardplug.memory.known import KnownValues, meta_like
from shardplug.memory.layout import Placed

__all__ = ["Event", "Mark", "Trace", "TraceSettings", "trace_step"]

Batch = Mapping[str, Any] | tuple[Any, ...] | torch.Tensor
Loss = Callable[[nn.Module, Any], torch.Tensor]


class Mark(IntEnum):
    """What an event is."""

    ALLOCATE = 0  # number: storage, size: bytes
    FREE = 1  # number: storage
    ENTER = 2  # number: unit; its forward begins
    LEAVE = 3  # number: unit; its forward has ended
    BACK = 4  # number: unit; its backward begins
    DONE = 5  # number: unit; its backward has ended
    GRADIENT = 6  # number: parameter, size: storage that now holds its whole gradient
    FLOPS = 7  # size: operations since the last such event
    LOSS = 8  # the forward has ended, the backward begins
    END = 9  # the backward has ended


class Event(NamedTuple):
    """One event of a trace."""

    mark: Mark
    number: int = -1
    size: int = 0


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """What a trace depends on besides the model and the batch."""

    device: str
    checkpointing: bool
    autocast: torch.dtype | None
    cast_inputs: torch.dtype | None
    """Cast float inputs of units to this dtype, as FSDP2 does under mixed precision."""
    outputs_in_fp32: bool = False
    """Whether float outputs of the model are cast to fp32, as Accelerate does."""
    keep_outputs: bool = False
    """Whether the training loop still holds the model's outputs in the backward."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The events of one micro-batch."""

    events: tuple[Event, ...]
    kernels: frozenset[str]
    """Attention kernels that were used."""
    traced_blocks: int
    """Blocks that were really run; the others repeat one of them."""

    @property
    def flops(self) -> int:
        """Floating point operations of forward and backward, recomputation included."""
        return sum(event.size for event in self.events if event.mark is Mark.FLOPS)


def default_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Call the model and take its `loss`, or the sum of its output where it has none."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple) else model(batch)
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if isinstance(loss, torch.Tensor):
        return loss
    tensors = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not tensors:
        raise ModelError(
            f"Expected {type(model).__name__} to return a loss, or a tensor that depends on its "
            f"parameters, got {type(output).__name__}: give `loss=`, a function of (model, batch)."
        )
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum()


def trace_step(
    placed: Placed,
    model: nn.Module,
    batch: Batch,
    loss: Loss | None,
    settings: TraceSettings,
    skipped: Iterable[nn.Module] = (),
) -> Trace:
    """Run one forward and backward on meta and note what is allocated.

    The model is left as it was: on its device, with its hooks, its own modes and values.

    Args:
        placed: The model's units.
        model: The model.
        batch: What the model takes; tensors of any device, of which only shapes are used.
        loss: Computes the loss; by default the model's own.
        settings: Device, checkpointing, precision.
        skipped: Blocks that hand their first argument on instead of computing.

    Raises:
        Exception: Whatever the model raises on meta tensors, for example when it looks at values.
    """
    skipped = set(skipped)
    used: set[str] = set()
    recorder = _Recorder()
    with _restored(model), recorder.settled():
        if settings.checkpointing:
            checkpoint_activations(model, placed.blocks)
        model.train()
        hooks = _Hooks(recorder, placed, settings)
        recorder.ignore(hooks.to_meta(model))
        for block in skipped:
            block.forward = _hand_on
        if settings.outputs_in_fp32:
            model.register_forward_hook(lambda _, args, output: _in_fp32(output))
        hooks.attach(skipped)
        with as_on_device(settings.device, settings.autocast, used), recorder:
            inputs = tree_map(recorder.known.meta_like, batch)
            kept: list[Any] = []
            if settings.keep_outputs:
                model.register_forward_hook(lambda _, args, output: kept.append(output))
            value = (loss or default_loss)(model, inputs)
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                raise ModelError(
                    "Expected a loss that depends on trainable parameters, got "
                    f"{type(value).__name__}: give `loss=`, a function of (model, batch)."
                )
            recorder.add(Mark.LOSS)
            # Tensor.backward() would switch function modes off, for recomputed forwards too.
            torch.autograd.backward(value)
            hooks.finish()
            recorder.add(Mark.END)
            del value
            kept.clear()
    return Trace(tuple(recorder.events), frozenset(used), len(placed.blocks) - len(skipped))


def _hand_on(first: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return first


def _in_fp32(output: Any) -> Any:
    return tree_map(
        lambda v: v.float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v, output
    )


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Put every module back as it was: attributes, registries, hooks."""
    before = [
        (module, dict(vars(module)), {k: v.copy() for k, v in vars(module).items() if _is_dict(v)})
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, attributes, registries in before:
            vars(module).clear()
            vars(module).update(attributes)
            for name, content in registries.items():
                registry = attributes[name]
                registry.clear()
                registry.update(content)


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every storage that an operation makes, and when it goes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self._storages: dict[int, tuple[Any, int]] = {}
        self._next = 0
        self._silent: set[int] = set()
        self._flops = 0
        self.known = KnownValues()

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Forget the storages at the end: what goes later is in no trace."""
        try:
            yield
        finally:
            self._storages.clear()

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave the storages of parameters and buffers out."""
        for tensor in tensors:
            self._silent.add(self._note(tensor))
        self.events.clear()

    def add(self, mark: Mark, number: int = -1, size: int = 0) -> None:
        """Add a mark."""
        if self._flops:
            self.events.append(Event(Mark.FLOPS, -1, self._flops))
            self._flops = 0
        self.events.append(Event(mark, number, size))

    def gradient(self, parameter: int, grad: torch.Tensor) -> None:
        """Note that a storage has become the whole gradient of a parameter."""
        number = self._note(grad)
        if number in self._silent:
            return  # it has grown, in place
        self._silent.add(number)
        self.add(Mark.GRADIENT, parameter, number)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_read_of_value(func):
            return self.known.read(args[0])
        output = func(*args, **kwargs)
        self.known.follow(func, args, kwargs, output)
        self._flops += flops_of(func, args, kwargs, output)
        for value in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(value, torch.Tensor):
                self._note(value)
            elif isinstance(value, (tuple, list)):
                for inner in value:
                    if isinstance(inner, torch.Tensor):
                        self._note(inner)
        return output

    def _note(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key = id(storage)  # torch keeps the Python object as long as the storage lives
        known = self._storages.get(key)
        if known is not None:
            return known[1]
        number = self._next
        self._next += 1
        self._storages[key] = (weakref.ref(storage, lambda _: self._gone(key)), number)
        self.events.append(Event(Mark.ALLOCATE, number, storage.nbytes()))
        return number

    def _gone(self, key: int) -> None:
        known = self._storages.pop(key, None)
        if known is not None and known[1] not in self._silent:
            self.events.append(Event(Mark.FREE, known[1]))


def flops_of(func: Any, args: Any, kwargs: Any, output: Any) -> int:
    """Count an operation's floating point operations as torch's FlopCounterMode does."""
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(getattr(func, "overloadpacket", None))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=output))


class _Hooks:
    """Marks where FSDP2 gathers and reduces, from hooks in the same places."""

    def __init__(self, recorder: _Recorder, placed: Placed, settings: TraceSettings) -> None:
        self._recorder = recorder
        self._placed = placed
        self._cast_to = settings.cast_inputs
        self._in_backward: set[int] = set()
        self._forwarded: set[int] = set()
        self._done: set[int] = set()
        self._meta: list[nn.Parameter] = []

    def to_meta(self, model: nn.Module) -> list[torch.Tensor]:
        """Put parameters, in the dtype of the computation, and buffers on meta, in place."""
        made: dict[int, torch.Tensor] = {}
        plans = self._placed.layout.parameters
        for plan, parameter in zip(plans, self._placed.parameters, strict=True):
            new = torch.empty(plan.shape, dtype=plan.compute, device="meta")
            self._meta.append(nn.Parameter(new, requires_grad=plan.trainable))
            made[id(parameter)] = self._meta[-1]
        for module in model.modules():
            for name, value in module._parameters.items():
                if value is not None:
                    module._parameters[name] = made[id(value)]  # type: ignore[assignment]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    if id(buffer) not in made:
                        made[id(buffer)] = meta_like(buffer)
                    module._buffers[name] = made[id(buffer)]
        return list(made.values())

    def attach(self, skipped: set[nn.Module]) -> None:
        """Hook the units, and their parameters' gradients."""
        outside = set(self._placed.modules) - {m for block in skipped for m in block.modules()}
        for number, module in enumerate(self._placed.modules):
            if module in outside:
                module.register_forward_pre_hook(
                    self._enter(number), prepend=True, with_kwargs=True
                )
                module.register_forward_hook(self._leave(number))
        for number, parameter in enumerate(self._meta):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._gradient(number)
                )

    def finish(self) -> None:
        """Close units that the backward did not leave, as their inputs need no gradient."""
        for number in sorted(self._forwarded - self._done):
            self._close(number)
        for parameter in self._meta:
            parameter.grad = None

    def _gradient(self, number: int) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            self._recorder.gradient(number, parameter.grad)

        return hook

    def _enter(self, number: int) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if number in self._in_backward:  # recomputation
                return self._cast((args, kwargs))
            self._recorder.add(Mark.ENTER, number)
            self._forwarded.add(number)
            args, kwargs = self._cast((args, kwargs))
            tensors = [
                value
                for value in tree_leaves((args, kwargs))
                if isinstance(value, torch.Tensor) and value.requires_grad
            ]
            if not tensors or not torch.is_grad_enabled():
                return args, kwargs
            passed = _Passed.apply(self, number, *tensors)  # type: ignore[no-untyped-call]
            through = {id(old): new for old, new in zip(tensors, passed, strict=True)}
            return tree_map(lambda value: through.get(id(value), value), (args, kwargs))

        return hook

    def _cast(self, values: Any) -> Any:
        if self._cast_to is None:
            return values
        return tree_map(
            lambda v: (
                v.to(self._cast_to) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            ),
            values,
        )

    def _leave(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if number in self._in_backward:
                return
            self._recorder.add(Mark.LEAVE, number)
            for value in tree_leaves(output):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    value.register_hook(  # type: ignore[no-untyped-call]
                        lambda _: self._back(number)
                    )

        return hook

    def _back(self, number: int) -> None:
        if number not in self._in_backward:
            self._in_backward.add(number)
            self._recorder.add(Mark.BACK, number)

    def _close(self, number: int) -> None:
        self._in_backward.discard(number)
        self._done.add(number)
        self._recorder.add(Mark.DONE, number)
        for index in self._placed.layout.units[number].parameters:
            self._meta[index].grad = None


class _Passed(torch.autograd.Function):
    """Hands inputs of a unit on; its backward comes when the unit's backward has ended."""

    @staticmethod
    def forward(ctx: Any, hooks: _Hooks, number: int, *tensors: torch.Tensor) -> Any:
        ctx.hooks, ctx.number = hooks, number
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.hooks._close(ctx.number)
        return (None, None, *grads)
