"""A compiled model against the same model as written: loss, gradients, bytes kept, names, and when it compiles."""

import itertools

import pytest
import torch
from torch._dynamo.utils import counters

from memtrain.config.effects import no_effect_warnings
from memtrain.engine.build import build_loss
from memtrain.engine.checkpoint import load_weights, save_weights
from memtrain.engine.loop import mean_loss
from memtrain.errors import UserError
from memtrain.model.loss import Terms

TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 2e-3, "bf16_true": 3e-2}
"""Largest relative error of a parameter's gradient: fused kernels round less often."""
LLAMA = ("model.positions=rope", "model.norm=rmsnorm", "model.activation=swiglu",
         "model.n_kv_heads=1", "model.tied=false", "loss=full")  # fmt: skip


@pytest.fixture(autouse=True)
def backend(request):
    """Trace and partition as always, then run torch's own kernels: a second. None: make kernels, as a run does."""
    torch._dynamo.reset()
    counters.clear()
    chosen = getattr(request, "param", "aot_eager")
    with torch.compiler.set_stance("default", force_backend=chosen):
        yield


@pytest.fixture
def small(tiny):
    return lambda *overrides: tiny("model.n_layers=2", "offload.min_tensor_bytes=0", *overrides)


def assert_close(bench, compiled, plain, window, tolerance):
    """Gradients of a window; then both make a step and agree on its loss and norm."""
    ours, theirs = bench.gradients(compiled, window), bench.gradients(plain, window)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        error = (gradient.float() - theirs[name].float()).norm() / theirs[name].float().norm()
        assert error <= tolerance, name
    for step in (compiled, plain):
        step.model.zero_grad()
    torch.testing.assert_close(compiled(window), plain(window), rtol=max(tolerance, 1e-4), atol=0)


def assert_one_graph():
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None], ids=["kernels"], indirect=True)
@pytest.mark.parametrize("overrides", [
    ("compile=blocks", "precision=fp32", "checkpoint_every=1"),
    ("compile=blocks", "precision=bf16", "offload=activations"),
    ("compile=model", "precision=bf16"),
], ids=" ".join)  # fmt: skip
def test_kernels_compute_what_the_model_does(small, bench, overrides):
    window = bench.window(bench.samples(4), 2)
    precision = overrides[1].removeprefix("precision=")
    compiled, plain = bench.step(small(*overrides)), bench.step(small(*overrides[1:]))
    assert_close(bench, compiled, plain, window, TOLERANCE[precision])
    assert_one_graph()


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["blocks", "model"])
@pytest.mark.parametrize("precision", TOLERANCE)
def test_every_switch_works_on_what_is_traced(small, bench, parts, precision):
    window = bench.window(bench.samples(), 4)
    switches = itertools.product(
        ("checkpoint_every=0", "checkpoint_every=2"), ("none", "activations", "optimizer")
    )
    for (recompute, offload), kind in zip(switches, itertools.cycle(((), LLAMA)), strict=False):
        if (parts, offload) == ("model", "activations"):
            continue
        torch._dynamo.reset()
        counters.clear()
        overrides = (f"precision={precision}", recompute, f"offload={offload}", *kind)
        compiled, plain = (
            bench.step(small(f"compile={parts}", *overrides)),
            bench.step(small(*overrides)),
        )
        assert_close(bench, compiled, plain, window, TOLERANCE[precision])
        assert_one_graph()


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["blocks", "model"])
def test_dropout_is_drawn_alike_when_recomputed(small, bench, parts):
    window = bench.window(bench.samples(), 4)
    plain, recomputed = (
        bench.gradients(bench.step(small(f"compile={parts}", "model.dropout=0.5", every)), window)
        for every in ("checkpoint_every=0", "checkpoint_every=1")
    )
    for name, gradient in recomputed.items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["blocks", "model"])
def test_only_the_first_training_shape_is_compiled(small, bench, parts):
    """Neither a smaller last micro-batch, nor validation, nor a later step starts the compiler."""
    config = small(f"compile={parts}", "model.dropout=0.1")
    step, loss = bench.step(config), build_loss(config, Terms())
    losses = []
    for n_samples in (8, 7, 8, 5):
        step(bench.window(bench.samples(n_samples), 2))
        losses.append(mean_loss(step, loss, bench.window(bench.samples(3), 2)))
        step.model.eval()
        step.model(torch.zeros((1, n_samples), dtype=torch.int64))
        step.model.train()
        assert_one_graph()
    assert len(set(losses)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["blocks", "model"])
def test_no_copy_of_the_weights_waits_for_backward(small, bench, parts):
    """The bytes that autograd keeps are at most those without compiling."""
    kept = []
    for compiled in (parts, "off"):
        step = bench.step(small(f"compile={compiled}", "precision=bf16"))
        own = {p.untyped_storage()._cdata for p in step.model.parameters()}
        found = {}

        def pack(tensor, found=found, own=own):
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                found[storage._cdata] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            step.accumulate(bench.window(bench.samples(), 8))
        kept.append(sum(found.values()))
    assert 0 < kept[0] <= kept[1]


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["blocks", "model"])
def test_weights_are_saved_under_the_models_own_names(small, bench, parts, tmp_path):
    window = bench.window(bench.samples(), 4)
    step, plain = bench.step(small(f"compile={parts}")), bench.step(small())
    step(window)
    names = [name for name, _ in plain.model.named_parameters()]
    assert [name for name, _ in step.model.named_parameters()] == names
    assert list(step.model.state_dict()) == list(plain.model.state_dict())
    save_weights(step.model, tmp_path)
    plain.model.load_state_dict(load_weights(tmp_path, torch.device("cpu")).state_dict())
    assert_equal_weights(plain, step, bench)
    plain(window)
    save_weights(plain.model, tmp_path)
    step.model.load_state_dict(load_weights(tmp_path, torch.device("cpu")).state_dict())
    assert_equal_weights(plain, step, bench)
    torch.testing.assert_close(step.accumulate(window), plain.accumulate(window))
    assert_one_graph()


def assert_equal_weights(first, second, bench):
    ours, theirs = bench.weights(first), bench.weights(second)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_without_a_compiler_it_is_refused(small, bench, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"^compile: needs a C\+\+ compiler"):
        bench.step(small("compile=blocks"))


def test_a_plan_says_that_it_is_of_the_run_as_written(tiny):
    def small(*overrides):
        return tiny("model.n_layers=2", *overrides)

    for task in ("task=plan", "task=train"):
        (line,) = no_effect_warnings(small(task, "compile=blocks"))
        assert line.startswith("compile=blocks is planned as eager")
    (line,) = no_effect_warnings(small("task=plan", "compile=model", "accum=2"))
    assert "too low by the gradients" in line
    assert not no_effect_warnings(small("compile=blocks", "plan=off"))
    lines = no_effect_warnings(small("task=generate", "compile=model", "data=stdlib"))
    (line,) = [line for line in lines if line.startswith("compile")]
    assert line == "compile=model has no effect with task=generate"
