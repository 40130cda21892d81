"""Operators that CUDA runs otherwise than other devices: attention, norms, 16-bit softmax, recurrent layers.

Without these the phantom would run their composite forms, and allocate what CUDA never does.
`tests/unit/phantom/test_same_operators.py` lists what the dispatcher still decides otherwise, and why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from memtrain.errors import UserError

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
AUTOGRAD_KEY = "AutogradPrivateUse1"

WHOLE = ("_fused_rms_norm", "mish_backward", "silu_backward")
"""Operators with a kernel of their own on CUDA, and a composite form for devices that have none.

Source: native_functions.yaml, entries with both CUDA (their own, or their structured delegate's)
and CompositeImplicitAutograd.
"""

RECURRENT = {
    getattr(getattr(aten, name), overload)
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for overload in ("input", "data")
}


def register(
    library: Any, compute_capability: Callable[[], float], refuse: Callable[..., Any]
) -> None:
    """Override them under `library` (aten, IMPL) for the phantom's autograd key.

    Where the device has a kernel autograd leaves an operator whole; ours is `refuse`, by its name:
    inside the `with` block none is reached.
    """

    for op, run in composites(compute_capability).items():
        library.impl(op.name(), run, AUTOGRAD_KEY)
    library.impl("softmax.int", _half_to_float(aten._softmax.default), AUTOGRAD_KEY)
    library.impl("log_softmax.int", _half_to_float(aten._log_softmax.default), AUTOGRAD_KEY)
    for name in WHOLE:
        if hasattr(aten, name):
            library.impl(name, partial(refuse, f"aten.{name}"), "PrivateUse1")


def composites(compute_capability: Callable[[], float]) -> dict[Any, Callable[..., Any]]:
    """Operators that autograd takes apart, and what does so as on a card of `compute_capability`."""
    recurrents = {op: partial(recurrent, op, compute_capability) for op in RECURRENT}
    attend = partial(scaled_dot_product_attention, compute_capability)
    return {aten.scaled_dot_product_attention.default: attend, **recurrents}


@dataclass(frozen=True)
class Attention:
    """One call of `scaled_dot_product_attention`, by its own signature."""

    q: torch.Tensor  # (B, H, T, D)
    k: torch.Tensor  # (B, K, S, D)
    v: torch.Tensor  # (B, K, S, E)
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def needs_grad(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.q, self.k, self.v))

    @property
    def same_heads(self) -> bool:
        return self.q.shape[1] == self.k.shape[1] == self.v.shape[1]


def scaled_dot_product_attention(
    compute_capability: Callable[[], float], *args: Any, **kwargs: Any
) -> torch.Tensor:
    """By the kernel that CUDA would choose (aten/src/ATen/native/transformers/attention.cpp)."""
    call = Attention(*args, **kwargs)
    if call.q.device.type == "cpu":
        return _math(call)
    kernel = choose_kernel(call, compute_capability())
    if kernel == "flash":
        return _flash(call)
    mask, q = call.attn_mask, call.q
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.full((), -torch.inf, dtype=q.dtype, device=q.device))
    call = replace(call, attn_mask=mask, scale=_scale(call))
    return _efficient(call) if kernel == "efficient" else _math(call)


def choose_kernel(call: Attention, capability: float) -> str:
    """`flash`, `efficient` or `math`, in that order (sdp_utils.cpp, `select_sdp_backend`).

    Where cuDNN's kernel comes first (Hopper, recent cuDNN) flash stands for it: same tensors.
    """
    q, k, v = call.q, call.k, call.v
    shapes_ok = q.dim() == k.dim() == v.dim() == 4 and 0 not in (*q.shape, *k.shape)
    if not shapes_ok or not _rows_are_dense(q, k, v, call.attn_mask):
        return "math"
    if _flash_takes(call, capability):
        return "flash"
    return "efficient" if _efficient_takes(call, capability) else "math"


def _rows_are_dense(*tensors: torch.Tensor | None) -> bool:
    """The fused kernels' `check_last_dim_stride_equals_1_dense` (sdp_utils_cpp.h)."""
    return all(t is None or t.shape[-1] == 1 or t.stride(-1) == 1 for t in tensors)


def _flash_takes(call: Attention, capability: float) -> bool:
    q, k, v = call.q, call.k, call.v
    flash_allowed = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    cudnn_allowed = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    grouped = call.enable_gqa and k.shape[1] == v.shape[1] and q.shape[1] % k.shape[1] == 0
    return (
        (flash_allowed or (cudnn_allowed and capability >= 9.0))
        and call.attn_mask is None
        and q.dtype in HALF
        and capability >= 8.0
        and q.shape[-1] == k.shape[-1] == v.shape[-1]
        and _flash_head_dim_ok(call, capability)
        and (call.same_heads or grouped)
        and not (call.is_causal and q.shape[2] != k.shape[2])
    )


def _flash_head_dim_ok(call: Attention, capability: float) -> bool:
    """At most 256; backward above 192 needs more shared memory than consumer cards have."""
    head_dim = call.q.shape[-1]
    if call.needs_grad and capability in (8.6, 8.9, 12.0, 12.1) and head_dim > 192:
        return 224 < head_dim <= 256 and call.dropout_p == 0.0
    return head_dim <= 256


def _efficient_takes(call: Attention, capability: float) -> bool:
    """fp32, fp16 and (from 8.0) bf16, with rows of a multiple of 16 bytes."""
    q, v = call.q, call.v
    dtypes = [torch.float32, torch.float16, *([torch.bfloat16] if capability >= 8.0 else [])]
    multiple = 16 // q.element_size()
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
        and call.same_heads
        and q.dtype in dtypes
        and q.shape[-1] % multiple == 0
        and v.shape[-1] % multiple == 0
    )


def _scale(call: Attention) -> float:
    return call.q.shape[-1] ** -0.5 if call.scale is None else call.scale


def _math(call: Attention) -> torch.Tensor:
    return aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
        call.q, call.k, call.v, call.attn_mask, call.dropout_p, call.is_causal, None,
        scale=call.scale, enable_gqa=call.enable_gqa,
    )[0]  # fmt: skip


def _flash(call: Attention) -> torch.Tensor:
    q, k, v = call.q, call.k, call.v
    head_dim = q.shape[-1]
    if head_dim % 8:  # `pad_last_dim<8>`
        q, k, v = (F.pad(t, (0, 8 - head_dim % 8)) for t in (q, k, v))
    out = aten._scaled_dot_product_flash_attention(
        q, k, v, call.dropout_p, call.is_causal, False, scale=_scale(call)
    )[0]
    return out[..., :head_dim] if out.shape[-1] != head_dim else out  # type: ignore[no-any-return]


def _efficient(call: Attention) -> torch.Tensor:
    q, k, mask = call.q, call.k, call.attn_mask
    if mask is not None:
        mask = _aligned(mask).expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
        q, k, call.v, mask, call.needs_grad, call.dropout_p, call.is_causal, scale=_scale(call)
    )[0]


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """A mask whose rows do not start at multiples of 8 is copied with longer rows.

    Source: native/transformers/attention.cpp, `preprocess_mask` (`aligned_tensor<8>` looks at
    the strides, `pad_bias<8>` always adds 1 to 8 columns).
    """
    keys = mask.shape[-1]
    if mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    return F.pad(mask, (0, 8 - keys % 8))[..., :keys]


def recurrent(op: Any, compute_capability: Callable[[], float], x: Any, *args: Any) -> Any:
    """An LSTM, GRU or RNN step by step, as CUDA runs it without cuDNN.

    Raises UserError where it would run cuDNN's (native/RNN.cpp, `use_cudnn`): one operator, whose
    reserve only the library knows (`cudnnGetRNNTempSpaceSizes`).
    """
    dtypes = [torch.float16, torch.float32, torch.float64]
    if compute_capability() >= 8.0:
        dtypes.append(torch.bfloat16)
    if x.device.type != "cpu" and torch.backends.cudnn.enabled and x.dtype in dtypes and x.numel():
        raise UserError(
            f"{op.name()} runs in cuDNN, and how much memory it reserves for backward is not documented: "
            "plan and train it inside torch.backends.cudnn.flags(enabled=False), or leave the layer out"
        )
    # Not `decompose`: torch has another form in Python, without CUDA's cells.
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, x, *args)


def _half_to_float(op: Any) -> Callable[..., torch.Tensor]:
    """An fp32 softmax of fp16 on CUDA reads the fp16 tensor (native/SoftMax.cpp, `softmax`)."""

    def run(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        if x.dtype == torch.float16 and dtype == torch.float32 and x.device.type != "cpu":
            return op(x, dim, True)  # type: ignore[no-any-return]
        return op(x if dtype is None else x.to(dtype), dim, False)  # type: ignore[no-any-return]

    return run
