"""NF4 matrices: bitsandbytes' values, in one layer for several of its own, wherever a layer can run."""

import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from memtrain.errors import UserError
from memtrain.memory.selective import selective_contexts
from memtrain.model.adapters.nf4 import NF4Linear
from memtrain.phantom import PhantomGPU

bnb = pytest.importorskip("bitsandbytes", reason="needs pip install -e '.[quantized]'")

WIDTH, ROWS = 96, (128, 64, 32)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def weights():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, WIDTH, generator=generator) * 0.02 for rows in ROWS]


def packed(weights, double=True, bias=None, device="cpu"):
    layer = NF4Linear([len(w) for w in weights], weights[0].shape[1], bias, double)
    layer = layer.to_empty(device=device) if bias is None else layer
    for index, weight in enumerate(weights):
        layer.quantize(index, weight)
    return layer


def theirs(weight, dtype, double):
    layer = bnb.nn.Linear4bit(
        *reversed(weight.shape),
        bias=False,
        compute_dtype=dtype,
        quant_type="nf4",
        compress_statistics=double,
    )
    layer.weight = bnb.nn.Params4bit(
        weight.to(dtype), requires_grad=False, quant_type="nf4", compress_statistics=double
    )
    return layer.to("cpu").train()


@pytest.mark.parametrize("double", [True, False], ids=["double", "single"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_part_is_bitsandbytes_own_layer(weights, dtype, double):
    x = torch.randn(2, 7, WIDTH, dtype=dtype)
    layer = packed([weight.to(dtype) for weight in weights], double)
    for part, weight in zip(layer(x).split(ROWS, dim=-1), weights, strict=True):
        assert torch.equal(part, theirs(weight, dtype, double)(x))


@pytest.mark.parametrize("width", [95, 90])
def test_sizes_that_fill_no_block(width):
    weight = torch.randn(33, width)
    linear = theirs(weight, torch.float32, True)
    expected = bnb.functional.dequantize_4bit(linear.weight, linear.weight.quant_state)
    assert torch.equal(packed([weight]).dequantized(torch.float32), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_and_backward_are_those_of_the_dense_matrix(weights, dtype):
    layer = packed(weights)
    layer.bias = nn.Parameter(torch.randn(sum(ROWS)), requires_grad=False)
    dense = layer.dequantized(dtype)
    x = torch.randn(2, 7, WIDTH, dtype=dtype, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    y, expected = layer(x), F.linear(other, dense, layer.bias.to(dtype))
    assert torch.equal(y, expected)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    expected.backward(gradient)
    assert torch.equal(x.grad, other.grad)


def test_multiplies_in_the_type_of_autocast(weights):
    x = torch.randn(3, WIDTH, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = packed(weights)(x)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype) == (torch.bfloat16, torch.float32)


def contexts():
    return selective_contexts(["matmul", "attention"], 1.0)


@pytest.mark.parametrize("options", [{}, {"context_fn": contexts}], ids=["recompute", "selective"])
def test_recomputed(weights, options):
    layer, last = packed(weights), nn.Linear(sum(ROWS), 8)
    x = torch.randn(3, WIDTH, requires_grad=True)

    def run(x):
        return last(torch.tanh(layer(x)))

    expected = torch.autograd.grad(run(x).sum(), x)
    found = torch.autograd.grad(checkpoint(run, x, use_reentrant=False, **options).sum(), x)
    assert torch.equal(expected[0], found[0])


def test_keeps_nothing_and_takes_little_on_the_phantom(weights):
    rows, width, tokens = 4096, 2048, 64
    with PhantomGPU("a100_80gb") as gpu:
        layer = NF4Linear([rows // 2] * 2, width, None, True).to_empty(device=gpu.device)
        for index in range(2):
            layer.quantize(index, torch.zeros(rows // 2, width, dtype=torch.bfloat16))
        held = torch.get_device_module("phantom").memory_allocated()
        x = torch.zeros(tokens, width, device=gpu.device, requires_grad=True)
        with torch.autocast(gpu.device.type, dtype=torch.bfloat16):
            y = layer(x)
        y.sum().backward()
    n = rows * width
    assert n // 2 + n // 64 < held < 1.02 * (n // 2 + n // 64)
    dense = 2 * n
    assert gpu.report().peak_allocated_bytes < held + 1.1 * dense + 2**25


def test_without_bitsandbytes_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UserError, match=r"memtrain\[quantized\]"):
        NF4Linear([8], 64, None, True)


def test_parameters_are_frozen_matrices_on_meta():
    layer = NF4Linear(ROWS, WIDTH, None, True)
    for parameter in layer.parameters():
        assert parameter.ndim == 2 and parameter.is_meta and not parameter.requires_grad
