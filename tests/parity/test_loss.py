"""The chunked loss against plain cross-entropy over all logits, and against torch's own chunked form."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memtrain.model.layers import Linear
from memtrain.model.loss import IGNORE_INDEX, MIN_ROWS, Terms, chunk_rows, chunked_loss, full_loss
from memtrain.phantom import PhantomGPU
from memtrain.units import GIB, MIB

N, C, V = 3 * MIN_ROWS + 17, 24, 97


def inputs(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(1, N, C, generator=generator).to(dtype).requires_grad_()
    head = (0.3 * torch.randn(V, C, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (1, N), generator=generator)
    targets[0, ::7] = IGNORE_INDEX
    return hidden, head, targets


def run(loss_function, dtype=torch.float32, autocast=None, scale=1.0, **settings):
    hidden, head, targets = inputs(dtype)
    factor = torch.tensor(scale / 100)
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        loss = loss_function(hidden, head, targets, factor, **settings)
    loss.backward()
    return loss.detach(), hidden.grad, head.grad


@pytest.mark.parametrize("terms", [Terms(), Terms(0.1), Terms(0.0, 1e-2), Terms(0.2, 1e-3)])
def test_fp32_equals_full(terms):
    ours = run(chunked_loss, terms=terms, chunk_bytes=1)
    theirs = run(full_loss, terms=terms)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_under_autocast_equals_full_to_its_rounding(dtype, scale):
    """Against fp64: the chunked loss is as close as the full one."""
    exact = run(full_loss, dtype=torch.float64, scale=scale)
    for name, chunked, full, true in zip(
        ("loss", "hidden", "head"),
        run(chunked_loss, autocast=dtype, scale=scale, chunk_bytes=1),
        run(full_loss, autocast=dtype, scale=scale),
        exact,
        strict=True,
    ):
        ours, theirs = ((found.double() - true).norm() for found in (chunked, full))
        assert ours <= 1.1 * theirs + 1e-6 * true.norm(), name


def test_bf16_weights_are_summed_in_fp32():
    """As close to fp64 as the full loss, however many chunks there are."""
    errors = []
    exact = run(full_loss, dtype=torch.float64)[2]
    for loss_function, settings in ((chunked_loss, {"chunk_bytes": 1}), (full_loss, {})):
        found = run(loss_function, dtype=torch.bfloat16, **settings)[2]
        errors.append((found.double() - exact).norm() / exact.norm())
    assert errors[0] <= 1.2 * errors[1]


@pytest.mark.parametrize("terms", [Terms(), Terms(0.1), Terms(0.2, 1e-3)])
def test_a_large_bf16_head_is_as_close_as_the_full_loss(monkeypatch, terms):
    """128 chunks, as 8 x 4096 tokens of Llama-3's vocabulary have: one rounding, not one for each."""
    monkeypatch.setattr("memtrain.model.loss.SUM_BYTES", 0)
    monkeypatch.setattr("memtrain.model.loss.MIN_ROWS", 16)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 128 * 16, C, generator=generator)
    head = 0.3 * torch.randn(V, C, generator=generator)
    targets = torch.randint(0, V, (1, 128 * 16), generator=generator)
    targets[0, ::7] = IGNORE_INDEX
    found = {}
    for name, loss_function, dtype, settings in (
        ("exact", full_loss, torch.float64, {}),
        ("full", full_loss, torch.bfloat16, {}),
        ("chunked", chunked_loss, torch.bfloat16, {"chunk_bytes": 1}),
    ):
        given = [x.bfloat16().to(dtype).requires_grad_() for x in (hidden, head)]
        loss_function(*given, targets, torch.tensor(0.01), terms=terms, **settings).backward()
        found[name] = [x.grad.double() for x in given]
    for chunked, full, exact in zip(found["chunked"], found["full"], found["exact"], strict=True):
        assert (chunked - exact).norm() <= 1.1 * (full - exact).norm()


def test_a_large_head_alone_has_its_gradient(monkeypatch):
    monkeypatch.setattr("memtrain.model.loss.SUM_BYTES", 0)
    hidden, head, targets = inputs(torch.bfloat16)
    for given in (hidden, hidden.detach()):
        chunked_loss(given, head, targets, torch.tensor(0.01), chunk_bytes=1).backward()
    assert head.grad is not None
    twice, head.grad = head.grad, None
    chunked_loss(hidden, head, targets, torch.tensor(0.01), chunk_bytes=1).backward()
    assert torch.equal(twice, 2 * head.grad)


@pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="torch >= 2.13 has the reference"
)
def test_equals_torchs_linear_cross_entropy():
    ours = run(chunked_loss, chunk_bytes=1)
    hidden, head, targets = inputs()
    loss = F.linear_cross_entropy(hidden[0], head, targets[0], reduction="sum") / 100
    loss.backward()
    for mine, other in zip(ours, (loss.detach(), hidden.grad, head.grad), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_without_gradients_nothing_is_kept():
    hidden, head, targets = inputs()
    factor = torch.tensor(1.0)
    with torch.no_grad():
        quiet = chunked_loss(hidden, head, targets, factor, chunk_bytes=1)
    assert not quiet.requires_grad
    torch.testing.assert_close(quiet, full_loss(hidden, head, targets, factor).detach())
    frozen = chunked_loss(hidden, head.detach(), targets, factor, chunk_bytes=1)
    frozen.backward()
    assert hidden.grad is not None


def test_deterministic_and_all_masked():
    first, second = run(chunked_loss, chunk_bytes=1), run(chunked_loss, chunk_bytes=1)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    hidden, head, targets = inputs()
    loss = chunked_loss(hidden, head, torch.full_like(targets, IGNORE_INDEX), torch.tensor(1.0))
    loss.backward()
    assert loss == 0
    assert not hidden.grad.any()
    assert not head.grad.any()


def test_a_second_backward_is_refused():
    """The gradients were handed out, and scaled in place."""
    hidden, head, targets = inputs()
    loss = chunked_loss(hidden, head, targets, torch.tensor(1.0), chunk_bytes=1)
    loss.backward(retain_graph=True)
    once = hidden.grad.clone()
    with pytest.raises(RuntimeError, match="the first backward took its gradients"):
        loss.backward()
    assert torch.equal(hidden.grad, once)


def test_gradients_of_the_gradients_are_refused():
    hidden, head, targets = inputs()
    loss = chunked_loss(hidden, head, targets, torch.tensor(1.0), chunk_bytes=1)
    with pytest.raises(RuntimeError, match="none of their own"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("target", [-1, V])
@pytest.mark.parametrize("loss_function", [chunked_loss, full_loss])
def test_a_target_that_is_no_class_is_refused(loss_function, target):
    hidden, head, targets = inputs()
    targets[0, 5] = target
    with pytest.raises((IndexError, RuntimeError), match=f"{target} is out of bounds"):
        loss_function(hidden, head, targets, torch.tensor(1.0))


@pytest.mark.parametrize("overrides", list(itertools.product(
    ("precision=fp32", "precision=bf16", "precision=fp16", "precision=bf16_true"),
    ("checkpoint_every=0", "checkpoint_every=2"),
    ("model.tied=true", "model.tied=false"),
)), ids=" ".join)  # fmt: skip
def test_a_training_step_with_either_loss(tiny, bench, overrides):
    """The whole step: gradients of every parameter agree to the rounding of the precision."""
    window = bench.window(bench.samples(n=40), 20)  # 320 tokens a micro-batch: two chunks
    base = (*overrides, "loss.chunk_mib=1")
    ours = bench.gradients(bench.step(tiny("loss=chunked", *base)), window)
    theirs = bench.gradients(bench.step(tiny("loss=full", *base)), window)
    exact = "fp32" in overrides[0]
    for name, gradient in ours.items():
        error = (gradient.float() - theirs[name].float()).norm() / theirs[name].float().norm()
        assert error < (1e-5 if exact else 3e-2), name


def test_chunks_are_even_and_bounded():
    for rows, vocab, dtype in itertools.product(
        (1, 300, 2048, 32768), (97, 32000, 128256), (torch.float32, torch.bfloat16)
    ):
        step = chunk_rows(rows, vocab, dtype, 64 * MIB)
        assert step <= max(MIN_ROWS, 64 * MIB // (vocab * (4 if dtype == torch.float32 else 6)))
        n_chunks = -(-rows // step)
        assert rows - (n_chunks - 1) * step > 0


def loss_bytes(loss_function, dtype, n_tokens=8 * 4096, dim=4096, vocab=128256, autocast=False):
    """Peak above hidden states, head and the gradients of both, on the phantom."""
    with PhantomGPU(enforce_capacity=False) as gpu:
        hidden = torch.empty(
            8, n_tokens // 8, dim, device=gpu.device, dtype=dtype, requires_grad=True
        )
        head = torch.empty(vocab, dim, device=gpu.device, dtype=dtype, requires_grad=True)
        targets = torch.zeros(8, n_tokens // 8, device=gpu.device, dtype=torch.int64)
        with torch.autocast(gpu.device.type, dtype=torch.bfloat16, enabled=autocast):
            loss = loss_function(hidden, head, targets, torch.ones((), device=gpu.device))
        loss.backward()
    held = 2 * (hidden.numel() + head.numel()) * hidden.element_size()
    return gpu.report().peak_allocated_bytes - held


def test_llama3_sized_loss_takes_under_a_gib():
    assert loss_bytes(chunked_loss, torch.bfloat16) < 0.25 * GIB
    assert loss_bytes(chunked_loss, torch.float32, autocast=True) < 1 * GIB
    assert loss_bytes(full_loss, torch.bfloat16) > 30 * GIB


def test_bytes_fall_as_arithmetic_says():
    """Full: at the peak fp32 logits, log-softmax and its gradient, and the 16-bit logits; chunked: one chunk's."""
    n, vocab = 8192, 32000
    found = loss_bytes(chunked_loss, torch.bfloat16, n, 512, vocab)
    rows = chunk_rows(n, vocab, torch.bfloat16, 64 * MIB)
    small = 8 * n + 20 * 2 * MIB  # targets, workspaces, per-token figures
    assert rows * vocab * 6 * 0.98 <= found <= rows * vocab * 6 * 1.02 + small


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("half_input", [True, False])
def test_linear_gives_the_bits_of_autocast(dtype, bias, half_input):
    torch.manual_seed(0)
    ours = Linear(24, 40, bias=bias)
    theirs = nn.Linear(24, 40, bias=bias)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 5, 24, dtype=dtype if half_input else torch.float32)
    results = []
    for layer in (ours, theirs):
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=dtype):
            y = layer(given)
            y.float().square().sum().backward()
        results.append((y, given.grad, *(p.grad for p in layer.parameters())))
    for mine, other in zip(*results, strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)


def test_no_copy_of_the_weights_waits_for_backward(config):
    """bf16 autocast saves no low-precision weight: the bytes kept fall by 2 per weight of the linear layers."""
    kept = []
    for kind in (Linear, nn.Linear):
        layer = kind(64, 64, bias=False)
        own = layer.weight.untyped_storage()._cdata
        sizes = []

        def pack(tensor, sizes=sizes, own=own):
            if tensor.untyped_storage()._cdata != own:
                sizes.append(tensor.numel() * tensor.element_size())
            return tensor

        with (
            torch.autocast("cpu", dtype=torch.bfloat16),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        ):
            layer(torch.randn(2, 64, requires_grad=True))
        kept.append(sum(sizes))
    assert kept[1] - kept[0] == 64 * 64 * 2
