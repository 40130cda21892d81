"""Autocast by CUDA's rules, for the phantom's dispatch key.

The lists are those of aten/src/ATen/autocast_mode.h and autocast_mode.cpp (torch 2.11 to 2.15);
a test holds them against the operators that the installed torch registers for `AutocastCUDA`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

KEY = "AutocastPrivateUse1"

# fmt: off
LOWER_PRECISION = [
    "_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc",
    "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "convolution",
    "cudnn_convolution", "cudnn_convolution_transpose", "prelu", "addmm", "addmv", "addr",
    "matmul", "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm",
    "chain_matmul", "linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell",
    "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
]
# fmt: on

# fmt: off
FP32 = [
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p",
    "reciprocal", "rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar",
    "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "frobenius_norm.dim",
    "nuclear_norm", "nuclear_norm.dim", "cosine_similarity", "poisson_nll_loss",
    "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div",
    "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss",
    "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
    "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp",
    "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d",
    "_upsample_nearest_exact2d", "upsample_nearest3d", "_upsample_nearest_exact3d",
    "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d",
    "upsample_bicubic2d", "_upsample_bicubic2d_aa",
]
# fmt: on

# fmt: off
FP32_SET_OPT_DTYPE = [
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum",
    "linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum",
    "sum.dim_IntList",
]
# fmt: on

FP32_APPEND_DTYPE = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
}

# fmt: off
PROMOTE = [
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler",
    "index_put", "tensordot", "scatter_add",
]
# fmt: on

BANNED = ["binary_cross_entropy"]

_copies: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
"""The weight cache: one low-precision copy per leaf, until the outermost autocast block ends."""

on_weight_copy: list[Callable[[torch.Tensor], None]] = []
"""Called with every new copy in the weight cache."""


def clear_weight_cache() -> None:
    _copies.clear()


def known_operators() -> set[str]:
    """Names of all operators with a rule, as the dispatcher writes them (`aten::mm`)."""
    names = (*LOWER_PRECISION, *FP32, *FP32_SET_OPT_DTYPE, *FP32_APPEND_DTYPE, *PROMOTE, *BANNED)
    return {f"aten::{name}" for name in names}


def register(library: Any, device_type: str) -> None:
    """Give each operator of the installed torch its rule under `library` (aten, IMPL)."""
    keys = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(KEY))
    rules = _Rules(device_type, keys)
    for names, rule in (
        (LOWER_PRECISION, rules.lower_precision),
        (FP32, rules.fp32),
        (FP32_SET_OPT_DTYPE, rules.fp32_set_opt_dtype),
        (list(FP32_APPEND_DTYPE), rules.fp32_append_dtype),
        (PROMOTE, rules.promote),
        (BANNED, rules.banned),
    ):
        for name in names:
            op = _find(name)
            if op is not None:
                library.impl(name, rule(op), KEY)


def _find(name: str) -> Any:
    """The overload `name` ("softmax.int"; without a dot, the default); None if torch lacks it."""
    packet_name, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, packet_name, None)
    return getattr(packet, overload or "default", None)


class _Rules:
    """The cast policies of autocast_mode.h, each a wrapper of one operator."""

    def __init__(self, device_type: str, keys: Any) -> None:
        self.device_type = device_type
        self.keys = keys

    def lower_precision(self, op: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(self.keys):
                to = torch.get_autocast_dtype(self.device_type)
                return self._call(op, args, kwargs, to)

        return run

    def fp32(self, op: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(self.keys):
                return self._call(op, args, kwargs, torch.float32)

        return run

    def fp32_set_opt_dtype(self, op: Any) -> Callable[..., Any]:
        """No cast of the input: the operator is asked for an fp32 result."""
        names = [argument.name for argument in op._schema.arguments]
        at = names.index("dtype")

        def run(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(self.keys):
                given = args[at] if len(args) > at else kwargs.get("dtype")
                if given is None and self._eligible(args[0]):
                    if len(args) > at:
                        args = (*args[:at], torch.float32, *args[at + 1 :])
                    else:
                        kwargs["dtype"] = torch.float32
                return op(*args, **kwargs)

        return run

    def fp32_append_dtype(self, op: Any) -> Callable[..., Any]:
        name = op._schema.name.removeprefix("aten::") + "." + op._schema.overload_name
        with_dtype = _find(FP32_APPEND_DTYPE[name])
        defaults = [argument.default_value for argument in op._schema.arguments]

        def run(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(self.keys):
                dtype = torch.float32 if self._eligible(args[0]) else args[0].dtype
                return with_dtype(*args, *defaults[len(args) :], **kwargs, dtype=dtype)

        return run

    def promote(self, op: Any) -> Callable[..., Any]:
        """Everything in the widest type among the inputs (fp64 is left alone)."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(self.keys):
                dtypes = {t.dtype for t in _tensors((*args, *kwargs.values())) if self._eligible(t)}
                wide = torch.float32 in dtypes
                to = torch.float32 if wide else torch.get_autocast_dtype(self.device_type)
                return self._call(op, args, kwargs, to)

        return run

    def banned(self, op: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(
                f"{op._schema.name} is unsafe to autocast: use "
                "binary_cross_entropy_with_logits, or disable autocast around it"
            )

        return run

    def _call(self, op: Any, args: Any, kwargs: Any, to: torch.dtype) -> Any:
        cast_args = [self._cast(value, to) for value in args]
        cast_kwargs = {name: self._cast(value, to) for name, value in kwargs.items()}
        return op(*cast_args, **cast_kwargs)

    def _eligible(self, value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.dtype != torch.float64
            and value.device.type == self.device_type
        )

    def _cast(self, value: Any, to: torch.dtype) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._cast(item, to) for item in value)
        if not self._eligible(value) or value.dtype == to:
            return value
        if not self._cacheable(value, to):
            return value.to(to)
        entry = _copies.get(id(value))
        if entry is not None and entry[0]() is value:
            return entry[1]
        copy = value.to(to)
        _copies[id(value)] = (weakref.ref(value), copy)
        for report in on_weight_copy:
            report(copy)
        return copy

    def _cacheable(self, value: torch.Tensor, to: torch.dtype) -> bool:
        """`cached_cast` of autocast_mode.cpp."""
        return (
            value.dtype == torch.float32
            and value.requires_grad
            and value.is_leaf
            and to == torch.get_autocast_dtype(self.device_type)
            and not value._is_view()
            and torch.is_autocast_cache_enabled()
        )


def _tensors(values: Any) -> list[torch.Tensor]:
    flat: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            flat.append(value)
        elif isinstance(value, list | tuple):
            flat.extend(_tensors(value))
    return flat
