"""The autocast table against the dispatcher of the installed torch, and its rules in action."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memtrain.phantom import PhantomGPU, autocast


def cuda_operators() -> set[str]:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = torch._C._dispatch_get_all_op_names()
    return {n for n in names if n.startswith("aten::") and has_kernel(n, "AutocastCUDA")}


def test_every_operator_with_a_cuda_rule_has_one_here() -> None:
    assert len(cuda_operators()) >= 100
    assert cuda_operators() - autocast.known_operators() == set()


def test_every_rule_is_registered_where_torch_has_the_operator() -> None:
    with PhantomGPU():
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        missing = {n for n in cuda_operators() if not has_kernel(n, "AutocastPrivateUse1")}
    assert missing == set()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("linear", torch.bfloat16),
        ("matmul", torch.bfloat16),
        ("einsum", torch.bfloat16),
        ("layer_norm", torch.float32),
        ("exp", torch.float32),
        ("softmax", torch.float32),
        ("sum", torch.float32),
        ("norm", torch.float32),
        ("norm_dim", torch.float32),
        ("cumsum", torch.float32),
        ("sum_explicit", torch.float16),
        ("promote", torch.float32),
        ("gelu", torch.bfloat16),
        ("mse", torch.float32),
    ],
)
def test_result_types_are_those_of_cuda(name: str, expected: torch.dtype) -> None:
    calls = {
        "linear": lambda x, h: F.linear(x, x),
        "matmul": lambda x, h: x @ x,
        "einsum": lambda x, h: torch.einsum("ij,jk->ik", x, x),
        "layer_norm": lambda x, h: F.layer_norm(h, (8,)),
        "exp": lambda x, h: torch.exp(h),
        "softmax": lambda x, h: h.softmax(-1),
        "sum": lambda x, h: h.sum(),
        "norm": lambda x, h: h.norm(2),
        "norm_dim": lambda x, h: torch.ops.aten.norm(h, 2, [1]),
        "cumsum": lambda x, h: h.cumsum(0),
        "sum_explicit": lambda x, h: h.sum(dtype=torch.float16),
        "promote": lambda x, h: torch.addcmul(x, h, h),
        "gelu": lambda x, h: F.gelu(h),
        "mse": lambda x, h: F.mse_loss(h, h),
    }
    with PhantomGPU() as gpu:
        x = torch.empty(8, 8, device=gpu.device)
        with torch.autocast("phantom", dtype=torch.bfloat16):
            assert calls[name](x, x.bfloat16()).dtype == expected


def test_a_loss_that_is_unsafe_is_refused() -> None:
    with PhantomGPU() as gpu:
        x = torch.empty(4, device=gpu.device)
        with (
            torch.autocast("phantom", dtype=torch.float16),
            pytest.raises(RuntimeError, match="unsafe to autocast"),
        ):
            F.binary_cross_entropy(x, x)


def test_one_weight_copy_until_the_outermost_block_ends() -> None:
    with PhantomGPU() as gpu:
        layer = nn.Linear(1024, 1024, bias=False, device=gpu.device)
        x = torch.empty(1, 1024, device=gpu.device, dtype=torch.bfloat16)
        memory = torch.get_device_module("phantom").memory_allocated
        before = memory()
        with torch.autocast("phantom", dtype=torch.bfloat16):
            with torch.autocast("phantom", dtype=torch.bfloat16), torch.no_grad():
                layer(x)
                layer(x)
            held = memory() - before
        assert 2 * 2**20 <= held < 2 * 2**20 + 9 * 2**20  # one copy, and the cuBLAS workspace
        assert held - (memory() - before) == 2 * 2**20


def test_gradients_flow_through_the_copy() -> None:
    with PhantomGPU() as gpu:
        layer = nn.Linear(8, 8, device=gpu.device)
        with torch.autocast("phantom", dtype=torch.bfloat16):
            loss = layer(torch.empty(2, 8, device=gpu.device)).sum()
        loss.backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.dtype == torch.float32


def test_the_cpu_keeps_its_own_rules() -> None:
    x = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
