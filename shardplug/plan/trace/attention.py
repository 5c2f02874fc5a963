"""Operations as they will run on the target device, for a trace on tensors without memory.

On meta tensors torch takes the plainest route: attention as two matrix products and a softmax,
and no autocast. On a GPU fused kernels never make the matrix of scores, and on a CPU there is a
fused kernel too. What is kept for the backward differs by orders of magnitude, so the trace names
the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shardplug.core._torch.tracing import attention_by_kernel, fused_attention_on_cpu

__all__ = ["as_on_device"]

_LOW_PRECISION = {
    F.linear,
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
    F.multi_head_attention_forward,
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.addmm,
    torch.baddbmm,
    torch.einsum,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.__rmatmul__,
    torch.Tensor.mm,
    torch.Tensor.bmm,
}
_FULL_PRECISION = {
    F.layer_norm,
    F.group_norm,
    F.softmax,
    F.log_softmax,
    F.cross_entropy,
    F.nll_loss,
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.kl_div,
    F.normalize,
    F.cosine_similarity,
    torch.exp,
    torch.log,
    torch.pow,
    torch.softmax,
    torch.log_softmax,
    torch.sum,
    torch.prod,
    torch.cumsum,
    torch.norm,
    torch.rsqrt,
    torch.Tensor.exp,
    torch.Tensor.log,
    torch.Tensor.pow,
    torch.Tensor.softmax,
    torch.Tensor.log_softmax,
    torch.Tensor.sum,
    torch.Tensor.prod,
    torch.Tensor.norm,
}


def as_on_device(
    device: str, autocast: torch.dtype | None, used: set[str]
) -> AbstractContextManager[Any]:
    """Make the code inside choose operations as it would on `device`.

    Args:
        device: "cuda" or "cpu".
        autocast: Low dtype of an autocast around the forward, or None.
        used: Receives the attention kernels that were chosen.
    """
    stack = ExitStack()
    stack.enter_context(_Attention(device, autocast, used))
    if autocast is not None:
        stack.enter_context(_Autocast(autocast))
    return stack


class _Autocast(TorchFunctionMode):
    """Casts what autocast casts on a GPU: products to the low dtype, norms and losses to fp32."""

    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        self._low = low

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LOW_PRECISION:
            args, kwargs = _cast(args, self._low), _cast(kwargs, self._low)
        elif func in _FULL_PRECISION and "dtype" not in kwargs:
            args, kwargs = _cast(args, torch.float32), _cast(kwargs, torch.float32)
        return func(*args, **kwargs)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) in (list, tuple):
        return type(value)(_cast(item, dtype) for item in value)
    if type(value) is dict:
        return {key: _cast(item, dtype) for key, item in value.items()}
    return value


class _Attention(TorchFunctionMode):
    """Replaces torch's attention function, for callers outside and inside of torch.

    Inside, `F.multi_head_attention_forward` calls it by its global name and with function modes
    off, so the name is replaced as well while the mode is on.
    """

    def __init__(self, device: str, autocast: torch.dtype | None, used: set[str]) -> None:
        super().__init__()
        self._device = device
        self._autocast = autocast
        self._used = used
        self._original: Callable[..., torch.Tensor] = F.scaled_dot_product_attention

    def __enter__(self) -> _Attention:
        F.scaled_dot_product_attention = self._attend
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        F.scaled_dot_product_attention = self._original
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is self._original:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._autocast is not None:
            args, kwargs = _cast(args, self._autocast), _cast(kwargs, self._autocast)
        kernel = _kernel(self._device, *args, **kwargs)
        self._used.add(kernel)
        if kernel == "math":
            return self._original(*args, **kwargs)
        return _fused(kernel, *args, **kwargs)


def _kernel(
    device: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str:
    """Name the kernel that `scaled_dot_product_attention` will choose."""
    if device == "cpu":
        q, k, v = (_small(x) for x in (query, key, value))
        fused = fused_attention_on_cpu(q, k, v, attn_mask is not None, dropout_p, enable_gqa)
        return "cpu flash" if fused else "math"
    same_width = query.shape[-1] == key.shape[-1] == value.shape[-1]
    if query.dim() != 4 or not all(x.is_floating_point() for x in (query, key, value)):
        return "math"
    half = query.dtype in (torch.float16, torch.bfloat16)
    if half and attn_mask is None and same_width and query.shape[-1] <= 256:
        return "flash"
    if enable_gqa and query.shape[1] != key.shape[1]:
        return "math"  # the memory-efficient kernel has no grouped heads
    return "efficient"


def _small(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    shape = tuple(tensor.shape)
    return ((1, *shape[1:-2], 2, shape[-1]) if len(shape) == 4 else shape), tensor.dtype


def _fused(
    kernel: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Call a fused kernel after what torch does to its arguments."""
    width = query.shape[-1]
    pad = -width % 8 if kernel == "flash" else 0
    if pad:
        query, key, value = (F.pad(x, (0, pad)) for x in (query, key, value))
        scale = scale or width**-0.5
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
        if kernel == "efficient":
            attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    out = attention_by_kernel(kernel, query, key, value, attn_mask, dropout_p, is_causal, scale)
    return out[..., :width] if pad else out


def describe(kernels: Iterable[str]) -> str:
    """Say in words which attention kernels a trace used."""
    names = {
        "flash": "flash attention (GPU)",
        "efficient": "memory-efficient attention (GPU)",
        "cpu flash": "the fused CPU kernel",
        "math": "plain products that keep the matrix of scores",
    }
    return ", ".join(names[kernel] for kernel in sorted(kernels)) or "none by torch's own function"
