"""Running a model on tensors without memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward

__all__ = [
    "attention_by_kernel",
    "backward_within_modes",
    "fused_attention_on_cpu",
    "grouped_product_flops",
    "is_copy",
    "is_read_of_value",
    "run_on_meta",
]


def fused_attention_on_cpu(
    query: tuple[tuple[int, ...], torch.dtype],
    key: tuple[tuple[int, ...], torch.dtype],
    value: tuple[tuple[int, ...], torch.dtype],
    masked: bool,
    dropout_p: float,
    grouped: bool,
) -> bool:
    """Ask torch whether attention on the CPU runs in one kernel, which keeps no scores.

    Args:
        query: Shape and dtype; a short sequence is enough, as it does not decide.
        key: As for the query.
        value: As for the query.
        masked: Whether a mask is given.
        dropout_p: Dropout of the scores.
        grouped: Whether several query heads share a key head.
    """
    q, k, v = (torch.empty(s, dtype=d, requires_grad=True) for s, d in (query, key, value))
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool) if masked else None
    choice = torch._fused_sdp_choice(q, k, v, mask, dropout_p, False, enable_gqa=grouped)
    return int(choice) == int(torch.nn.attention.SDPBackend.FLASH_ATTENTION.value)


def attention_by_kernel(
    kernel: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Run attention in one fused kernel, on meta tensors too, where torch would take none.

    Args:
        kernel: "flash", "efficient" (both GPU) or "cpu flash".
        query: (batch, heads, length, width).
        key: As the query, of its own length; heads may be fewer for "flash" and "cpu flash".
        value: As the key.
        bias: Added to the scores, for "efficient" and "cpu flash".
        dropout_p: Dropout of the scores.
        is_causal: Whether later positions are left out.
        scale: Factor of the scores.
    """
    ops = torch.ops.aten
    call: Any
    if kernel == "flash":
        call = ops._scaled_dot_product_flash_attention
        out = call(query, key, value, dropout_p, is_causal, False, scale=scale)
    elif kernel == "efficient":
        call = ops._scaled_dot_product_efficient_attention
        out = call(query, key, value, bias, True, dropout_p, is_causal, scale=scale)
    else:
        call = ops._scaled_dot_product_flash_attention_for_cpu
        out = call(query, key, value, dropout_p, is_causal, attn_mask=bias, scale=scale)
    first: torch.Tensor = out[0]
    return first


def is_read_of_value(func: Any) -> bool:
    """Whether a dispatched operation reads one number out of a tensor, as `.item()` does."""
    return func is torch.ops.aten._local_scalar_dense.default


def is_copy(func: Any) -> bool:
    """Whether a dispatched operation copies a tensor to another device or dtype."""
    return func is torch.ops.aten._to_copy.default


def backward_within_modes(value: torch.Tensor) -> None:
    """Run a scalar's backward with function modes on, for the forwards that it recomputes.

    `Tensor.backward()` and `torch.autograd.backward()` are seen by a mode, which is off in them.
    """
    start = (torch.ones_like(value),)
    _engine_run_backward(
        (value,), start, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def run_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a dispatched operation on meta as on a device.

    The kernels of grouped matrix products (mixtures of experts) take fp32 and fp16 as well as bf16,
    though torch's shapes for meta tensors are given for bf16 alone.
    """
    if not _is_grouped_product(func) or not args[0].is_meta or args[0].dtype == torch.bfloat16:
        return func(*args, **kwargs)
    dtype = kwargs.get("out_dtype") or args[0].dtype
    low = [value.to(torch.bfloat16) for value in args[:2]]
    return func(*low, *args[2:], **{**kwargs, "out_dtype": None}).to(dtype)


def _is_grouped_product(func: Any) -> bool:
    return getattr(func, "overloadpacket", None) is torch.ops.aten._grouped_mm


def grouped_product_flops(func: Any, args: tuple[Any, ...]) -> int:
    """Count the operations of a grouped matrix product, which torch's counter leaves out."""
    if not _is_grouped_product(func):
        return 0
    first, second = args[:2]
    groups = first.shape[0] if first.dim() == 3 and second.dim() == 2 else 1
    return 2 * int(first.numel()) // groups * int(second.shape[-1])
