"""What CUDA kernels allocate for themselves while they run, and what they return in its own way.

Only what a named source justifies. An entry of `TEMPORARIES` maps an operator to a function of
its arguments and result that gives the sizes of the blocks (bytes) alive together at its peak.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

aten = torch.ops.aten
Temporaries = Callable[[Any, Any], list[int]]

FP32_BYTES = 4
INDEX_BYTES = 8
CHUNK_ELEMENTS = 65536  # `kChunkSize` of aten/src/ATen/native/cuda/MultiTensorApply.cuh
A100_SMS = 108


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def flash_attention_backward(args: Any, out: Any) -> list[int]:
    """softmax_d, dq_accum and, for grouped queries, dk and dv for every query head.

    Source: flash_attn/flash_api.cpp, `mha_bwd`.
    """
    q, k = args[1], args[2]  # (B, H, T, D), (B, K, S, D)
    batch, heads, length, head_dim = q.shape
    rounded = _round_up(length, 128)
    rounded_dim = _round_up(head_dim, 32) if head_dim <= 192 else 256
    softmax_d = batch * heads * rounded * FP32_BYTES
    blocks = [softmax_d, batch * rounded * heads * rounded_dim * FP32_BYTES]
    if k.shape[1] != heads:
        blocks += 2 * [batch * k.shape[2] * heads * head_dim * k.element_size()]
    return blocks


def efficient_attention_backward(args: Any, out: Any) -> list[int]:
    """delta and, for 16-bit tensors, the fp32 accumulator of the query's gradient.

    Source: native/transformers/cuda/attention_backward.cu, `_efficient_attention_backward`, and
    mem_eff_attention/kernel_backward.h, `workspace_size`; the block sizes are those of sm80.
    """
    q = args[1]  # (B, H, T, D)
    batch, heads, length, head_dim = q.shape
    blocks = [batch * heads * length * FP32_BYTES]
    if q.dtype != torch.float32:
        rows, columns = (64, 64) if head_dim <= 64 else (128, 64) if head_dim <= 96 else (128, 128)
        elements = _round_up(length, rows) * _round_up(head_dim, columns)
        blocks.append(batch * heads * elements * FP32_BYTES)
    return blocks


def embedding_backward(args: Any, out: Any) -> list[int]:
    """Above 3072 tokens the indices are sorted, and partial sums of rows are kept in fp32.

    Source: native/cuda/Embedding.cu, `embedding_dense_backward_cuda`, and
    EmbeddingBackwardKernel.cu, `embedding_backward_cuda_kernel` (NROWS_PER_THREAD = 10).
    """
    grad, indices, rows = args[:3]
    tokens, width = indices.numel(), grad.shape[-1]
    by_frequency = len(args) > 4 and args[4]
    if tokens <= 3072 and not by_frequency:
        return []
    index_bytes = indices.element_size()
    segments = min(tokens, rows)
    partials = tokens // 10 + segments
    partial_bytes = partials * width * max(FP32_BYTES, grad.element_size())
    per_token = [tokens * index_bytes] * (4 if by_frequency else 3)
    return [
        *per_token,  # sorted and original indices, segment offsets (and counts)
        *[segments * index_bytes] * 2,  # partials per segment and their offsets
        partials * index_bytes,
        partial_bytes,
    ]


def layer_norm_backward(args: Any, out: Any) -> list[int]:
    """Many short rows: partial sums of the gradients of weight and bias.

    Source: native/cuda/layer_norm_kernel.cu, `LaunchGammaBetaBackwardCUDAKernel`.
    """
    x, shape = args[1], args[2]
    return [_partial_rows_bytes(x, prod(shape), t.element_size()) for t in out[1:] if t is not None]


def rms_norm_backward(args: Any, out: Any) -> list[int]:
    """As `layer_norm_backward`, of the weight alone."""
    return layer_norm_backward(args, out[:2])


def _partial_rows_bytes(x: torch.Tensor, width: int, element_bytes: int) -> int:
    rows = x.numel() // width
    blocks_x = -(-width // 32)
    if rows <= 64 * 1024 or width // 32 >= A100_SMS // 2:
        return 0
    blocks_y = min(32 * 1024 // blocks_x, -(-rows // 32))
    return blocks_y * width * element_bytes


def foreach_norm(args: Any, out: Any) -> list[int]:
    """One partial norm per tensor and chunk of the largest tensor, in fp32.

    Source: native/cuda/ForeachReduceOp.cu, `foreach_tensor_norm_cuda`.
    """
    tensors = args[0]
    chunks = max(-(-t.numel() // CHUNK_ELEMENTS) for t in tensors)
    return [len(tensors) * chunks * max(FP32_BYTES, tensors[0].element_size())]


def index_put_accumulate(args: Any, out: Any) -> list[int]:
    """Linear, sorted and original indices (the backward of indexing by a tensor).

    Source: native/cuda/Indexing.cu, `index_put_with_sort_kernel`.
    """
    if len(args) < 4 or not args[3]:
        return []
    shapes = [index.shape for index in args[1] if index is not None]
    broadcast = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return 3 * [prod(broadcast) * INDEX_BYTES]


def _overloads(names: dict[str, Temporaries]) -> dict[Any, Temporaries]:
    """By overload; an operator that the installed torch lacks is left out."""
    table = {}
    for name, function in names.items():
        packet_name, _, overload = name.partition(".")
        packet = getattr(aten, packet_name, None)
        if packet is not None:
            table[getattr(packet, overload)] = function
    return table


TEMPORARIES = _overloads(
    {
        "_scaled_dot_product_flash_attention_backward.default": flash_attention_backward,
        "_scaled_dot_product_efficient_attention_backward.default": efficient_attention_backward,
        "embedding_dense_backward.default": embedding_backward,
        "native_layer_norm_backward.default": layer_norm_backward,
        "_fused_rms_norm_backward.default": rms_norm_backward,
        "_foreach_norm.Scalar": foreach_norm,
        "_index_put_impl_.default": index_put_accumulate,
        "index_put_.default": index_put_accumulate,
        "index_put.default": index_put_accumulate,
    }
)

CUBLAS = {
    getattr(aten, name).default
    for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "_scaled_mm")
    if hasattr(aten, name)
}
"""Operators that call cuBLAS, and so make it allocate the workspace of their handle and stream.

Source: ATen/cuda/CublasHandlePool.cpp (`getCUDABlasWorkspace`); sizes: cuBLAS documentation,
`CUBLAS_WORKSPACE_CONFIG`. Each thread has its handle: the program's, and that of backward.
"""


def fused_rms_norm(x: Any, shape: Any, weight: Any = None, eps: Any = None) -> tuple[Any, Any]:
    """Result and one fp32 number per row: native/cuda/layer_norm_kernel.cu, `_fused_rms_norm_cuda`."""
    rows = x.shape[: x.dim() - len(shape)]
    rstd = torch.empty((*rows, *[1] * len(shape)), dtype=torch.float32, device=x.device)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), rstd


def fused_rms_norm_backward(
    grad: Any, x: Any, shape: Any, rstd: Any, weight: Any, mask: Any
) -> tuple[Any, Any]:
    """native/cuda/layer_norm_kernel.cu, `_fused_rms_norm_backward_cuda`."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if mask[0] else None
    with_weight = mask[1] and weight is not None
    dweight = (
        torch.empty(weight.shape, dtype=weight.dtype, device=x.device) if with_weight else None
    )
    return dx, dweight


def grouped_mm(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """One product per group, of any floating type (torch's shape function takes bf16 only).

    Rows are padded to 16 bytes: native/GroupedMMUtils.h, `create_grouped_gemm_output_tensor`.
    """
    groups = []  # (M, K) x (G, K, N) with M in groups, or (G, M, K) x (K, N) with N in groups
    if a.dim() == b.dim():  # (G, M, K) x (G, K, N), or (M, K) x (K, N) with K in groups
        groups = [a.shape[0] if a.dim() == 3 else offs.shape[0]]
    dtype = out_dtype or a.dtype
    rows, columns = a.shape[-2], b.shape[-1]
    width = _round_up(columns, 16 // dtype.itemsize)
    strides = [rows * width] * len(groups) + [width, 1]
    return torch.empty_strided([*groups, rows, columns], strides, dtype=dtype, device=a.device)


def fused_gru_cell(
    input_gates: Any, hidden_gates: Any, hx: Any, input_bias: Any = None, hidden_bias: Any = None
) -> tuple[Any, Any]:
    """New state and a workspace of five rows each: native/cuda/RNN.cu, `_thnn_fused_gru_cell_cuda`."""
    return torch.empty_like(hx), hx.new_empty(hx.shape[0], 5 * hx.shape[1])


def fused_gru_cell_backward(grad: Any, workspace: Any, has_bias: bool) -> tuple[Any, ...]:
    """native/cuda/RNN.cu, `_thnn_fused_gru_cell_backward_cuda`: of both gates, the state and both biases."""
    batch, hidden = grad.shape
    gates = [grad.new_empty(batch, 3 * hidden) for _ in range(2)]
    biases = [grad.new_empty(3 * hidden) if has_bias else None for _ in range(2)]
    return *gates, torch.empty_like(grad), *biases


def log_sigmoid(x: Any) -> tuple[Any, Any]:
    """The CPU keeps a buffer, CUDA an empty one: native/cuda/Activation.cpp."""
    return torch.empty_like(x), x.new_empty(0)


def gradient_of_second(grad: Any, x: Any, *args: Any) -> Any:
    """native/cuda/MultiMarginLoss.cu and MultiLabelMarginCriterion.cu, which have no shape function."""
    return torch.empty_like(x)


def _defaults(names: dict[str, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    return {getattr(aten, n).default: f for n, f in names.items() if hasattr(aten, n)}


RESULTS = _defaults(
    {
        "_fused_rms_norm": fused_rms_norm,
        "_fused_rms_norm_backward": fused_rms_norm_backward,
        "_grouped_mm": grouped_mm,
        "_thnn_fused_gru_cell": fused_gru_cell,
        "_thnn_fused_gru_cell_backward": fused_gru_cell_backward,
        "log_sigmoid_forward": log_sigmoid,
        "multi_margin_loss_backward": gradient_of_second,
        "multilabel_margin_loss_backward": gradient_of_second,
    }
)
"""Operators whose CUDA kernel returns other tensors than torch's shape function says."""
