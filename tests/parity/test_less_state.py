"""State elsewhere, or never all at once: the same training over 20 steps, bit for bit where the arithmetic is the same.

A reference run keeps everything on the device. Every step has another learning rate, gradients are clipped, one window
overflows. The products of everything with everything are `slow`, and so are 20 steps of what is in files; without them
there are some pairs, and a few steps where the 20 of another test say the same.
"""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from allpairspy import AllPairs
from torch import Tensor, nn

from memtrain.engine.step import TrainStep

N_STEPS, FEW_STEPS, OVERFLOW = 12, 5, 2
PRECISIONS = ("fp32", "bf16", "fp16", "bf16_true")
ELEMENTWISE = ("adamw", "sgd", "lion")
WHOLE = ("adafactor", "muon")
"""Need a whole matrix, so no file is stepped in pieces for them."""

HOST = {
    "optimizer": ("offload=optimizer",),
    "optimizer with gradients": ("offload=optimizer", "offload.gradients=true"),
    "half of the optimizer": ("offload=optimizer", "offload.optimizer_fraction=0.5"),
    "params": ("offload=params",),
    "all": ("offload=all", "offload.min_tensor_bytes=0"),
}
FILES = {
    "optimizer_nvme": ("offload=optimizer_nvme",),
    "params_nvme": ("offload=params_nvme",),
    "all_nvme": ("offload=all_nvme", "offload.min_tensor_bytes=0"),
}
IN_BACKWARD = {"in_backward": ("optimizer.in_backward=true",)}
FORMS = HOST | FILES | IN_BACKWARD
HARD = ("clip=0.1", "model.dropout=0.1", "optimizer.weight_decay=0.5")
"""What every run has: a clip that is always active, dropout, and a weight decay that shows."""


@dataclass(frozen=True)
class Trained:
    figures: Tensor
    """(steps, 3): loss, norm, stepped."""
    weights: dict[str, Tensor]
    state: dict[str, Tensor]
    """Moments and masters, by parameter and name."""
    step: TrainStep


@pytest.fixture
def trained(tiny, bench, tmp_path):
    folders = itertools.count()

    def trained(*overrides, micro_batch=8, n_steps=N_STEPS, prepare=lambda step: None) -> Trained:
        folder = tmp_path / str(next(folders))
        files = (f"offload.nvme_dir={folder}", "offload.nvme_buffer_mib=16")
        step = bench.step(tiny(*overrides, *files))
        prepare(step)
        poisoned = poison(step)
        torch.manual_seed(5)
        figures = []
        for number in range(n_steps):
            poisoned[0] = math.inf if number == OVERFLOW else 1.0
            set_rate(step, 1e-3 * (1 + number % 7))
            figures.append(step(bench.window(bench.samples(seed=number), micro_batch)))
        found = torch.stack(figures) if figures else torch.empty(0, 3)
        return Trained(found, bench.weights(step), state_of(step), step)

    return trained


@pytest.fixture
def plain(trained):
    """What keeps everything on the device: made once for all forms."""

    def plain(*overrides, micro_batch=8, n_steps=N_STEPS) -> Trained:
        key = (overrides, micro_batch, n_steps)
        if key not in PLAIN:
            PLAIN[key] = trained(*overrides, micro_batch=micro_batch, n_steps=n_steps)
        return PLAIN[key]

    return plain


PLAIN: dict[tuple[object, ...], Trained] = {}


def poison(step) -> list[float]:
    """What the loss is multiplied by."""
    factor, whole = [1.0], step.loss_function
    step.loss_function = lambda *arguments: whole(*arguments) * factor[0]
    return factor


def set_rate(step, rate: float) -> None:
    for update in step.updates:
        for group in update.param_groups:
            group["lr"] = rate


def groups(step):
    return ((update, group) for update in step.updates for group in update.param_groups)


def state_of(step) -> dict[str, Tensor]:
    names = {parameter: name for name, parameter in step.model.named_parameters()}
    return {
        f"{names[parameter]}.{key}": value.clone()
        for update, group in groups(step)
        for parameter in group["params"]
        for key, value in update.state(parameter).items()
        if isinstance(value, Tensor) and key != "master"
    }


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def assert_same_training(ours: Trained, plain: Trained) -> None:
    figures = plain.figures
    finite = torch.isfinite(figures).all(dim=1)
    assert not finite[OVERFLOW]
    assert finite.sum() >= len(figures) - 2, "the first fp16 step may overflow, too"
    assert (figures[finite, 1] > plain.step.clip).all(), "the clip is active"
    assert torch.equal(ours.figures[finite], figures[finite])
    assert torch.equal(ours.figures[:, 2], figures[:, 2])
    assert_equal(ours.weights, plain.weights)
    assert_equal(ours.state, plain.state)


def check(trained, plain, form: str, *base: str, n_steps: int = N_STEPS) -> None:
    """`form` against plain, two micro-batches added up where a window may have two."""
    how = {"micro_batch": micro_batch_of(form), "n_steps": n_steps}
    assert_same_training(trained(*base, *HARD, *FORMS[form], **how), plain(*base, *HARD, **how))


IN_MEMORY = [*HOST, *IN_BACKWARD]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("form", IN_MEMORY)
def test_training_is_bit_equal(trained, plain, form, precision):
    n_steps = N_STEPS if precision in ("fp32", "bf16_true") else FEW_STEPS
    check(trained, plain, form, f"precision={precision}", n_steps=n_steps)


@pytest.mark.parametrize("optimizer", ["sgd", "lion", *WHOLE])
@pytest.mark.parametrize("form", IN_MEMORY)
def test_every_optimizer_is_bit_equal(trained, plain, form, optimizer):
    check(trained, plain, form, f"optimizer={optimizer}", n_steps=FEW_STEPS)


SHAPES = (("model.tied=false",), ("checkpoint_every=1",), ("checkpoint_every=2", "model.tied=false"),
          ("checkpointing=selective",), ("model.norm=rmsnorm", "model.bias=false"),
          ("model.positions=rope",))  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=" ".join)
@pytest.mark.parametrize("form", ["optimizer", "params", "all", "in_backward"])
def test_every_shape_is_bit_equal(trained, plain, form, shape):
    check(trained, plain, form, *shape, n_steps=FEW_STEPS)


@pytest.mark.parametrize("form", FILES)
def test_training_from_files_is_bit_equal(trained, plain, form):
    check(trained, plain, form, n_steps=FEW_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "optimizer", "precision", "shape"),
    [
        *AllPairs([list(FILES), ELEMENTWISE, PRECISIONS, SHAPES]),
        *AllPairs([IN_MEMORY, [*ELEMENTWISE, *WHOLE], PRECISIONS, SHAPES]),
    ],
)
def test_any_two_choices_are_bit_equal(trained, plain, form, optimizer, precision, shape):
    check(trained, plain, form, f"precision={precision}", f"optimizer={optimizer}", *shape)


# Frozen layers


PARTS = {
    "last 2": ("blocks.2.", "blocks.3."),
    "blocks.1.mlp.*": ("blocks.1.mlp.",),
    "norm.weight": ("norm.weight",),
    "embedding.weight": ("embedding.weight",),
}


@pytest.mark.parametrize(
    ("part", "form"),
    [
        pytest.param(part, form, marks=[] if part == "last 2" else [pytest.mark.slow])
        for part in PARTS
        for form in ("plain", *FORMS)
    ],
)
def test_what_is_frozen_stays_and_has_nothing(trained, plain, form, part):
    """No gradient, no state, the same bits; what is trained is what the plain run makes of it."""
    base = (f"model.train_only='{part}'", "clip=0.01", *HARD[1:])
    how = {"micro_batch": micro_batch_of(form), "n_steps": FEW_STEPS}
    seen = set()

    def watch(step):
        for name, parameter in step.model.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient, name=name: seen.add(name))

    ours = trained(*base, *FORMS.get(form, ()), **how, prepare=watch)
    chosen = {name for name in ours.weights if name.startswith(PARTS[part])}
    assert seen == chosen
    in_groups = {id(p) for _, group in groups(ours.step) for p in group["params"]}
    start = plain(*base, n_steps=0).weights
    for name, parameter in ours.step.model.named_parameters():
        assert (id(parameter) in in_groups) == (name in chosen)
        assert parameter.requires_grad == (name in chosen)
        assert parameter.grad is None
        assert torch.equal(ours.weights[name], start[name]) == (name not in chosen), name
    assert_same_training(ours, plain(*base, **how))


@pytest.mark.parametrize("share", [0.001, 0.3, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("part", ["last 2", "norm.weight"])
def test_a_share_of_what_is_trained_goes_to_the_host(trained, plain, share, part):
    """Whole parameters go, evenly spread; a share too small for one moves none."""
    base = (f"model.train_only='{part}'", "clip=0.01", *HARD[1:])
    wanted = ("offload=optimizer", f"offload.optimizer_fraction={share}")
    ours = trained(*base, *wanted, n_steps=FEW_STEPS)
    assert_same_training(ours, plain(*base, n_steps=FEW_STEPS))
    counts = {"HostOptimizer": 0}
    for update, group in groups(ours.step):
        name = type(update).__name__
        counts[name] = counts.get(name, 0) + sum(p.numel() for p in group["params"])
    on_host = counts["HostOptimizer"] / sum(counts.values())
    assert on_host == pytest.approx(share, abs=0.1 if part == "last 2" else 0.5)


def micro_batch_of(form: str) -> int:
    return 8 if form == "in_backward" else 4


# What gradients are kept in


@pytest.mark.parametrize(
    ("precision", "gradients"),
    [(precision, kind) for precision in PRECISIONS for kind in ("bf16", "fp32")],
)
@pytest.mark.parametrize("form", ["plain", "optimizer with gradients", "params", "in_backward"])
def test_gradients_are_kept_in_what_is_said(trained, form, precision, gradients):
    """Rounded to bf16 a gradient is off by 2^-9: losses and norms agree to 2 %, and the types are what they say.

    The type is seen where autograd hands the gradient to whoever wants it, before anybody else takes it.
    """
    seen = set()

    def watch(step):
        for parameter in step.model.parameters():
            parameter.register_hook(lambda gradient: seen.add(gradient.dtype))

    base = (f"precision={precision}", "clip=0.1")
    wanted = (f"precision.gradients={gradients}", *FORMS.get(form, ()))
    ours = trained(
        *base, *wanted, micro_batch=micro_batch_of(form), prepare=watch, n_steps=OVERFLOW
    )
    plain = trained(*base, micro_batch=micro_batch_of(form), n_steps=OVERFLOW)
    assert seen == {{"bf16": torch.bfloat16, "fp32": torch.float32}[gradients]}
    torch.testing.assert_close(ours.figures, plain.figures, rtol=2e-2, atol=0)
    if {"bf16_true": "bf16"}.get(precision, "fp32") == gradients:
        assert_equal(ours.weights, plain.weights)


# In backward


@pytest.mark.parametrize("clipping", ["two_pass", "per_parameter"])
@pytest.mark.parametrize(
    "overrides", [(), ("checkpoint_every=1",), ("precision=bf16_true",)], ids=" ".join
)
def test_no_two_gradients_exist_at_once(trained, clipping, overrides):
    """Seen when autograd is about to hand over a gradient: no parameter has one."""
    counts = []

    def watch(step):
        parameters = list(step.model.parameters())
        for parameter in parameters:
            parameter.register_hook(
                lambda gradient: counts.append(sum(p.grad is not None for p in parameters))
            )

    wanted = ("optimizer.in_backward=true", f"optimizer.in_backward_clip={clipping}")
    ours = trained(*wanted, *overrides, n_steps=3, prepare=watch)
    n_parameters = len(list(ours.step.model.parameters()))
    assert counts == [0] * (3 * n_parameters * (2 if clipping == "two_pass" else 1))


@pytest.mark.parametrize("clip", [0.0, 0.02])
def test_clipping_per_parameter_is_the_loop_one_would_write(trained, bench, tiny, clip):
    wanted = (
        "optimizer.in_backward=true",
        "optimizer.in_backward_clip=per_parameter",
        f"clip={clip}",
    )
    ours = trained(*wanted)
    step = bench.step(tiny())
    by_name = dict(step.model.named_parameters())
    matrices = [p for p in by_name.values() if p.ndim >= 2]
    vectors = [p for p in by_name.values() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    norms = []
    for number in (number for number in range(N_STEPS) if number != OVERFLOW):
        norms.append(
            one_step(step, optimizer, bench.samples(seed=number), clip, 1e-3 * (1 + number % 7))
        )
    found = ours.figures[torch.isfinite(ours.figures[:, 1]), 1]
    torch.testing.assert_close(found, torch.tensor(norms), rtol=1e-4, atol=0)
    for name, parameter in by_name.items():
        # Adam's step is about lr times a sign: where a gradient is all but zero, rounding shows.
        error = (ours.weights[name] - parameter.detach()).norm() / parameter.detach().norm()
        assert error < (1e-5 if "qkv.bias" not in name else 1e-1), name


def one_step(step, optimizer, batch, clip: float, rate: float) -> float:
    logits = step.model.head(step.model(batch.tokens)).flatten(0, 1)
    nn.functional.cross_entropy(logits, batch.targets.flatten(), ignore_index=-100).backward()
    parameters = list(step.model.parameters())
    norm = torch.stack([p.grad.norm() for p in parameters]).norm().item()
    for parameter in parameters if clip else ():
        nn.utils.clip_grad_norm_([parameter], clip)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    return norm


def test_what_is_not_finite_skips_its_own_parameter(trained):
    """A gradient that is made infinite for one parameter in one step: the others step, that one does not."""
    wanted = ("optimizer.in_backward=true", "optimizer.in_backward_clip=per_parameter")

    def spoil(step):
        weight = step.model.blocks[1].mlp.up.weight
        weight.register_hook(lambda gradient: gradient * math.inf)

    spoilt, plain = trained(*wanted, n_steps=1, prepare=spoil), trained(*wanted, n_steps=1)
    before = trained(*wanted, n_steps=0)
    for name, weight in spoilt.weights.items():
        expected = before if name == "blocks.1.mlp.up.weight" else plain
        assert torch.equal(weight, expected.weights[name]), name
