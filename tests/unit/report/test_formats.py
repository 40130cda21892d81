import math

import numpy as np
import pytest
import torch
from rich.console import Console

from memtrain.report import formats

BY_NAME = {form.name: form for form in formats.float_formats()}
TORCH = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8 E4M3": torch.float8_e4m3fn,
    "fp8 E5M2": torch.float8_e5m2,
}


@pytest.mark.parametrize(("name", "dtype"), TORCH.items())
def test_formats_agree_with_torch(name, dtype):
    form, info = BY_NAME[name], torch.finfo(dtype)
    assert form.bits == info.bits
    assert form.largest == info.max
    assert form.smallest_normal == info.smallest_normal
    assert form.epsilon == info.eps
    assert 10.0**-form.decimal_digits == pytest.approx(info.resolution)


@pytest.mark.parametrize(("name", "dtype"), TORCH.items())
def test_smallest_subnormal_is_the_smallest_that_survives_a_cast(name, dtype):
    smallest = torch.tensor(BY_NAME[name].smallest_subnormal, dtype=torch.float64)
    assert smallest.to(dtype).double() == smallest
    assert (smallest / 2).to(dtype).double() == 0


def test_tf32_has_the_range_of_fp32_and_the_digits_of_fp16():
    tf32 = BY_NAME["tf32"]
    assert tf32.bits == 19
    assert tf32.smallest_normal == BY_NAME["fp32"].smallest_normal
    assert tf32.epsilon == BY_NAME["fp16"].epsilon


def test_layer_kinds():
    names = {
        "tok_emb.weight": "embedding",
        "positions.weight": "embedding",
        "blocks.0.attn.qkv.weight": "attention",
        "blocks.0.attn_norm.weight": "norm",
        "blocks.0.mlp.down.weight": "mlp",
        "lm_head.weight": "head",
        "scale": "other",
    }
    assert {name: formats.layer_kind(name) for name in names} == names
    assert formats.layer_kind("scale", {"scale": "gain"}) == "gain"


def test_histograms_count_every_element_once():
    grads = {
        "a.attn.weight": torch.tensor([[1.0, 1.5, -2.0], [0.0, math.inf, math.nan]]),
        "b.attn.weight": np.array([2.0**-149, 3.4e38], dtype=np.float32),
        "mlp": torch.tensor([2.0**-10], dtype=torch.bfloat16, requires_grad=True),
    }
    histograms = formats.gradient_histograms(grads)
    attention = histograms["attention"]
    assert (attention.total, attention.zeros, attention.not_finite) == (8, 1, 2)
    filled = {
        int(attention.edges[i]): int(attention.counts[i]) for i in attention.counts.nonzero()[0]
    }
    assert filled == {-149: 1, 0: 2, 1: 1, 127: 1}
    assert histograms["mlp"].counts.sum() == 1


def test_histograms_do_not_depend_on_the_chunk(monkeypatch):
    grads = {"mlp": torch.randn(1000, generator=torch.Generator().manual_seed(0))}
    whole = formats.gradient_histograms(grads, bins=50)["mlp"]
    monkeypatch.setattr(formats, "CHUNK", 7)
    pieces = formats.gradient_histograms(grads, bins=50)["mlp"]
    assert np.array_equal(whole.counts, pieces.counts)


def test_quantiles():
    histogram = formats.gradient_histograms({"mlp": torch.full((100,), 2.0**-7)})["mlp"]
    assert -7 <= histogram.quantile(0.5) <= -6
    assert math.isnan(formats.gradient_histograms({"mlp": torch.zeros(3)})["mlp"].quantile(0.5))


def test_underflow_shares():
    # fp16 keeps 2**-24 and more, E5M2 2**-16 and more; half of that is rounded to zero.
    grads = {"w": torch.tensor([0.0, math.inf, 2.0**-30, 2.0**-20, 2.0**-10, 4.0])}
    shares = formats.underflow_shares(grads, 2.0**14)
    found = [(s.format, s.loss_scale, s.underflow, s.overflow) for s in shares]
    assert found == [
        ("fp16", 1.0, 0.25, 0.0),
        ("fp16", 2.0**14, 0.0, 0.25),
        ("fp8 E5M2", 1.0, 0.5, 0.0),
        ("fp8 E5M2", 2.0**14, 0.0, 0.25),
    ]


def test_shares_without_gradients_are_not_a_number():
    (share, *_) = formats.underflow_shares({"w": torch.zeros(2)}, 2.0)
    assert math.isnan(share.underflow)


def test_tables():
    grads = {"mlp": torch.tensor([2.0**-30, 2.0**-20, 1.0])}
    console = Console(width=160)
    with console.capture() as capture:
        console.print(formats.formats_table(formats.float_formats()))
        console.print(formats.histograms_table(formats.gradient_histograms(grads)))
        console.print(formats.shares_table(formats.underflow_shares(grads, 1024.0)))
    text = capture.get()
    rows = [line.replace("│", " ").split() for line in text.splitlines() if "│" in line]
    fp16 = ["fp16", "16", "5", "10", "65504", "6.1035e-05", "5.9605e-08", "0.00097656", "3"]
    assert fp16 in rows
    assert ["fp16", "1", "33.3333%", "0.0000%"] in rows
    assert ["mlp", "3", "0.00%", "0", "2^-30.0", "2^-19.5", "2^1.0"] in rows
