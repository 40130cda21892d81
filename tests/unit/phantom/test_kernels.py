"""Each entry of the kernel table, and the attention kernel that is chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from memtrain.phantom import PhantomGPU, kernels

MIB = 2**20
BF16 = torch.bfloat16


def heads(gpu: PhantomGPU, heads: int = 4, dtype: torch.dtype = BF16, length: int = 100) -> Any:
    return torch.empty(
        2, heads, length, 64, device=gpu.device, dtype=dtype, requires_grad=True
    )  # (B, H, T, D)


def op_names(gpu: PhantomGPU) -> set[str]:
    return {op.name.removeprefix("aten.") for op in gpu.report().ops}


def temporaries(gpu: PhantomGPU, op: str) -> list[int]:
    """Sizes of the blocks that `op` took for itself."""
    events = gpu.meter.ledger.events
    own = [r for r, change in events if r.op == f"aten.{op}" and change > 0 and not r.key]
    return [record.size_bytes for record in own]


def test_flash_backward_accumulates_in_fp32() -> None:
    with PhantomGPU() as gpu:
        q, k, v = heads(gpu), heads(gpu), heads(gpu)
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    got = temporaries(gpu, "_scaled_dot_product_flash_attention_backward")
    assert got == [2 * 4 * 128 * 4, 2 * 128 * 4 * 64 * 4]


def test_flash_backward_of_grouped_queries_expands_keys_and_values() -> None:
    with PhantomGPU() as gpu:
        q, k, v = heads(gpu, 8), heads(gpu, 2), heads(gpu, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out.sum().backward()
        assert k.grad.shape == k.shape
    got = temporaries(gpu, "_scaled_dot_product_flash_attention_backward")
    assert got[2:] == 2 * [2 * 100 * 8 * 64 * 2]


def test_efficient_backward_has_delta_and_an_accumulator() -> None:
    with PhantomGPU() as gpu:
        q, k, v = heads(gpu), heads(gpu), heads(gpu)
        mask = torch.zeros(100, 100, device=gpu.device, dtype=BF16)
        F.scaled_dot_product_attention(q, k, v, mask).sum().backward()
    got = temporaries(gpu, "_scaled_dot_product_efficient_attention_backward")
    assert got == [-(-2 * 4 * 100 * 4 // 512) * 512, 2 * 4 * 128 * 64 * 4]


def test_embedding_backward_sorts_many_tokens_only() -> None:
    def run(tokens: int) -> list[int]:
        with PhantomGPU() as gpu:
            weight = torch.empty(1000, 256, device=gpu.device, requires_grad=True)
            ids = torch.zeros(tokens, dtype=torch.long, device=gpu.device)
            F.embedding(ids, weight).sum().backward()
        return temporaries(gpu, "embedding_dense_backward")

    assert run(3072) == []
    partials = 4096 // 10 + 1000
    expected = [4096 * 8] * 3 + [8192] * 2 + [-(-partials * 8 // 512) * 512]
    assert run(4096)[:6] == expected
    assert run(4096)[6] >= partials * 256 * 4


def test_layer_norm_backward_of_many_short_rows() -> None:
    with PhantomGPU() as gpu:
        norm = torch.nn.LayerNorm(64, device=gpu.device)
        norm(torch.empty(2**17, 64, device=gpu.device)).sum().backward()
    assert temporaries(gpu, "native_layer_norm_backward") == 2 * [4096 * 64 * 4]
    with PhantomGPU() as gpu:
        norm = torch.nn.LayerNorm(64, device=gpu.device)
        norm(torch.empty(2**10, 64, device=gpu.device)).sum().backward()
    assert temporaries(gpu, "native_layer_norm_backward") == []


def test_rms_norm_is_fused_and_keeps_its_input_alone() -> None:
    with PhantomGPU() as gpu:
        memory = torch.get_device_module("phantom").memory_allocated
        weight = torch.empty(64, device=gpu.device, requires_grad=True)
        x = torch.empty(2**17, 64, device=gpu.device, requires_grad=True)
        before = memory()
        y = F.rms_norm(x, (64,), weight)
        assert memory() - before == 32 * MIB + 512 * 1024
        y.sum().backward()
        assert x.grad.shape == x.shape and weight.grad.shape == weight.shape
    assert {"_fused_rms_norm", "_fused_rms_norm_backward"} <= op_names(gpu)
    assert temporaries(gpu, "_fused_rms_norm_backward") == [4096 * 64 * 4]


def test_foreach_norm_has_a_partial_norm_per_chunk() -> None:
    with PhantomGPU() as gpu:
        tensors = [torch.empty(n, device=gpu.device) for n in (65536 * 3 + 1, 10)]
        torch._foreach_norm(tensors)
    assert temporaries(gpu, "_foreach_norm.Scalar") == [512]
    assert kernels.foreach_norm((tensors,), None) == [2 * 4 * 4]


def test_indexing_backward_sorts_its_indices() -> None:
    with PhantomGPU() as gpu:
        x = torch.empty(100, 8, device=gpu.device, requires_grad=True)
        x[torch.zeros(1000, dtype=torch.long, device=gpu.device)].sum().backward()
    assert temporaries(gpu, "index_put") == 3 * [8192]


def test_cublas_workspaces_stay() -> None:
    with PhantomGPU() as gpu:
        memory = torch.get_device_module("phantom").memory_allocated
        w = torch.empty(8, 8, device=gpu.device, requires_grad=True)
        before = memory()
        loss = (w @ w).sum()
        loss.backward()
        del loss
        w.grad = None
        assert memory() - before == 2 * gpu.meter.card.workspace_bytes


@pytest.mark.parametrize(
    ("card", "dtype", "options", "expected"),
    [
        ("a100_80gb", BF16, {}, "flash"),
        ("a100_80gb", torch.float16, {"is_causal": True}, "flash"),
        ("a100_80gb", BF16, {"dropout_p": 0.1}, "flash"),
        ("a100_80gb", torch.float32, {"is_causal": True}, "efficient"),
        ("a100_80gb", torch.float64, {}, "math"),
        ("a100_80gb", BF16, {"mask": torch.bool}, "efficient"),
        ("a100_80gb", BF16, {"mask": BF16}, "efficient"),
    ],
)
def test_the_kernel_is_the_one_cuda_would_choose(
    card: str, dtype: torch.dtype, options: dict[str, Any], expected: str
) -> None:
    with PhantomGPU(card) as gpu:
        q, k, v = (heads(gpu, dtype=dtype) for _ in range(3))
        mask_dtype = options.pop("mask", None)
        if mask_dtype is not None:
            options["attn_mask"] = torch.zeros(100, 100, device=gpu.device, dtype=mask_dtype)
        out = F.scaled_dot_product_attention(q, k, v, **options)
        out.sum().backward()
        assert out.shape == q.shape == q.grad.shape
        if mask_dtype is not None:
            options["attn_mask"] = None
            options["mask"] = mask_dtype
    assert chosen(gpu) == expected


def chosen(gpu: PhantomGPU) -> str:
    for kernel in ("flash", "efficient"):
        if f"_scaled_dot_product_{kernel}_attention" in op_names(gpu):
            return kernel
    return "math"


def test_grouped_queries_with_a_mask_take_the_math_kernel() -> None:
    with PhantomGPU() as gpu:
        q, k, v = heads(gpu, 8), heads(gpu, 2), heads(gpu, 2)
        mask = torch.zeros(100, 100, device=gpu.device, dtype=torch.bool)
        out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        out.sum().backward()
        assert out.shape == q.shape
    assert chosen(gpu) == "math"


def test_head_dimensions_are_padded_to_eight() -> None:
    with PhantomGPU() as gpu:
        q = torch.empty(1, 2, 16, 20, device=gpu.device, dtype=BF16, requires_grad=True)
        out = F.scaled_dot_product_attention(q, q, q)
        out.sum().backward()
        assert out.shape == q.shape == q.grad.shape
    assert chosen(gpu) == "flash"


def test_the_programs_choice_of_kernel_counts() -> None:
    with PhantomGPU() as gpu, sdpa_kernel(SDPBackend.MATH):
        q = heads(gpu)
        F.scaled_dot_product_attention(q, q, q)
    assert chosen(gpu) == "math"


def test_no_attention_without_a_square_of_the_length() -> None:
    with PhantomGPU() as gpu:
        q, k, v = (heads(gpu, length=4096) for _ in range(3))
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    assert gpu.report().peak_allocated_bytes < 2 * 4 * 4096 * 4096 * 2


def test_dropout_keeps_a_mask_of_one_byte() -> None:
    with PhantomGPU() as gpu:
        memory = torch.get_device_module("phantom").memory_allocated
        x = torch.empty(4 * MIB, device=gpu.device, requires_grad=True)
        before = memory()
        y = F.dropout(x, 0.1)
        assert y.shape == x.shape
        assert memory() - before == 16 * MIB + 4 * MIB


def test_half_precision_softmax_makes_no_fp32_copy_of_its_input() -> None:
    with PhantomGPU() as gpu:
        memory = torch.get_device_module("phantom")
        x = torch.empty(16, MIB, device=gpu.device, dtype=torch.float16, requires_grad=True)
        before = memory.memory_allocated()
        y = x.softmax(-1, dtype=torch.float32)
        assert y.dtype == torch.float32
        assert memory.max_memory_allocated() - before == 64 * MIB
        y.sum().backward()
        assert x.grad.dtype == torch.float16


def test_convolutions_are_counted_as_torch_counts_them() -> None:
    def run(device: Any) -> None:
        nets = (nn.Conv2d(3, 8, 3, padding=1), nn.ConvTranspose2d(8, 4, 2, stride=2))
        x = torch.empty(2, 3, 8, 8, device=device, requires_grad=True)
        for net in nets:
            x = net.to(device)(x)
        x.sum().backward()

    with FlopCounterMode(display=False) as counter:
        run("cpu")
    with PhantomGPU() as gpu:
        run(gpu.device)
    assert gpu.report().flops == {"convolution": counter.get_total_flops()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_grouped_products_of_every_type(dtype: torch.dtype) -> None:
    with PhantomGPU() as gpu:
        x = torch.empty(8, 16, device=gpu.device, dtype=dtype, requires_grad=True)  # (T, K)
        w = torch.empty(2, 16, 32, device=gpu.device, dtype=dtype, requires_grad=True)  # (G, K, N)
        ends = torch.tensor([4, 8], dtype=torch.int32, device=gpu.device)
        out = torch._grouped_mm(x, w, offs=ends)
        assert (out.shape, out.dtype) == ((8, 32), dtype)
        out.sum().backward()
        assert (x.grad.shape, w.grad.shape) == (x.shape, w.shape)
    assert gpu.report().flops == {"matmul": 3 * 2 * 8 * 16 * 32}


def test_columns_of_a_head_must_lie_together_for_the_fused_kernels() -> None:
    with PhantomGPU() as gpu:
        q = heads(gpu, length=64).transpose(-1, -2)
        F.scaled_dot_product_attention(q, q, q)
    assert "bmm" in op_names(gpu)
    assert not any("scaled_dot_product" in name for name in op_names(gpu))


def test_cudnn_alone_is_as_good_as_flash_on_hopper() -> None:
    for card, kernel in (("h100", True), ("a100_80gb", False)):
        with PhantomGPU(card) as gpu, sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            q = heads(gpu)
            F.scaled_dot_product_attention(q, q, q)
        assert ("_scaled_dot_product_flash_attention" in op_names(gpu)) == kernel


def test_a_mask_is_copied_to_rows_of_a_multiple_of_8() -> None:
    def padded_bytes(shape: tuple[int, ...], keys: int) -> list[int]:
        with PhantomGPU() as gpu:
            q, k = heads(gpu, length=64), heads(gpu, length=keys)
            mask = torch.zeros(shape, device=gpu.device, dtype=BF16)[..., :keys]
            F.scaled_dot_product_attention(q, k, k, mask)
        events = gpu.meter.ledger.events
        return [r.asked_bytes for r, change in events if "pad" in r.op and change > 0]

    assert padded_bytes((64, 96), 96) == []
    assert padded_bytes((64, 96), 93) == []  # rows start at multiples of 8 all the same
    assert padded_bytes((64, 100), 100) == [64 * 104 * 2]
    assert padded_bytes((64, 100), 96) == [64 * 104 * 2]
