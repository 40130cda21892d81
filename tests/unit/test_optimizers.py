"""Each optimizer against its formula or another implementation, and what they all promise."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from optimizer_choices import OPTIMIZERS, needs_bitsandbytes
from torch import nn

from memtrain.engine.optimizers import (
    decay_groups,
    make_optimizer,
    state_bytes_per_parameter,
)
from memtrain.errors import UserError
from memtrain.phantom import PhantomCPU, PhantomGPU

SHAPES = {
    "tokens.weight": (40, 64),
    "blocks.0.attention.qkv.weight": (96, 64),
    "blocks.0.norm.weight": (64,),
    "blocks.1.mlp.up.weight": (128, 64),
    "head.weight": (40, 64),
}
LR, BETAS, EPS, MOMENTUM, DECAY = 0.01, (0.9, 0.97), 1e-8, 0.9, 0.1


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in SHAPES.items()
    }


def optimizer_of(name, named, implementation="fused"):
    groups = decay_groups(named.items(), DECAY)
    return make_optimizer(name, groups, LR, BETAS, EPS, MOMENTUM, implementation)


def set_gradients(named, step, scale=1.0):
    for p, other in zip(named.values(), parameters(100 + step).values(), strict=True):
        p.grad = other.detach() * scale


def train(optimizer, named, steps):
    for step in steps:
        set_gradients(named, step)
        optimizer.found_inf = torch.zeros(())
        optimizer.step()


def trained(name, steps=5, implementation="fused"):
    named = parameters()
    train(optimizer_of(name, named, implementation), named, range(steps))
    return named


def assert_close(ours, theirs, **tolerance):
    for name in SHAPES:
        torch.testing.assert_close(ours[name].double(), theirs[name].double(), **tolerance)


def by_hand(update):
    """Weights after five steps of `update(weight, gradient, state, step) -> weight`, in float64."""
    weights = {name: p.detach().double() for name, p in parameters().items()}
    states = {name: {} for name in SHAPES}
    for step in range(5):
        for name, gradient in parameters(100 + step).items():
            decay = 0.0 if weights[name].ndim == 1 else DECAY
            gradient = gradient.detach().double()
            weights[name] = update(weights[name], gradient, states[name], step + 1, decay)
    return weights


def adamw(w, g, state, t, decay):
    state["m"] = BETAS[0] * state.get("m", 0) + (1 - BETAS[0]) * g
    state["v"] = BETAS[1] * state.get("v", 0) + (1 - BETAS[1]) * g**2
    m, v = state["m"] / (1 - BETAS[0] ** t), state["v"] / (1 - BETAS[1] ** t)
    return w - LR * (m / (v.sqrt() + EPS) + decay * w)


def sgd(w, g, state, t, decay):
    state["m"] = MOMENTUM * state.get("m", 0) + g + decay * w
    return w - LR * state["m"]


def lion(w, g, state, t, decay):
    m = state.get("m", torch.zeros_like(w))
    state["m"] = BETAS[1] * m + (1 - BETAS[1]) * g
    return w - LR * ((BETAS[0] * m + (1 - BETAS[0]) * g).sign() + decay * w)


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for_loop"])
@pytest.mark.parametrize("formula", [adamw, sgd])
def test_every_implementation_is_the_formula(formula, implementation):
    ours = trained(formula.__name__, implementation=implementation)
    assert_close(ours, by_hand(formula), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for_loop"])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_implementation_is_the_one_asked_for(name, implementation):
    for group in optimizer_of(name, parameters(), implementation).param_groups:
        assert bool(group["fused"]) == (implementation == "fused")
        assert bool(group["foreach"]) == (implementation == "foreach")


def test_lion_is_the_formula():
    assert_close(trained("lion"), by_hand(lion), rtol=1e-5, atol=1e-6)


def test_muon_is_torchs_on_hidden_matrices_and_adamw_on_the_rest():
    theirs = parameters()
    hidden = ("blocks.0.attention.qkv.weight", "blocks.1.mlp.up.weight")
    optimizers = [
        torch.optim.Muon([theirs[n] for n in hidden], lr=LR, weight_decay=DECAY, momentum=MOMENTUM,
                         adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([theirs["tokens.weight"], theirs["head.weight"]], lr=LR, betas=BETAS, eps=EPS,
                          weight_decay=DECAY),
        torch.optim.AdamW([theirs["blocks.0.norm.weight"]], lr=LR, betas=BETAS, eps=EPS, weight_decay=0),
    ]  # fmt: skip
    for step in range(5):
        set_gradients(theirs, step)
        for optimizer in optimizers:
            optimizer.step()
    assert_close(trained("muon"), theirs, rtol=1e-5, atol=1e-6)


def test_adafactor_is_torchs():
    theirs = parameters()
    optimizer = torch.optim.Adafactor(decay_groups(theirs.items(), DECAY), lr=LR)
    for step in range(5):
        set_gradients(theirs, step)
        optimizer.step()
    assert_close(trained("adafactor"), theirs, rtol=0, atol=0)


@needs_bitsandbytes
@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_8bit"])
def test_8_bit_adamw_goes_where_adamw_goes(name):
    """Small tensors keep 32 bits and are AdamW's; of the others the moves are AdamW's up to quantization."""
    start, ours, theirs = parameters(), trained(name), by_hand(adamw)
    for parameter in SHAPES:
        moved = ours[parameter].double() - start[parameter]
        expected = theirs[parameter] - start[parameter]
        tolerance = 0.02 if start[parameter].numel() >= 4096 else 1e-4
        assert (moved - expected).norm() < tolerance * expected.norm()
        assert (moved - expected).norm() > 0


@needs_bitsandbytes
@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_8bit"])
def test_8_bit_adamw_moves_no_weight_that_never_had_a_gradient(name):
    """Beside others, of every size, in the same block of 256; weight decay apart. None flies off."""
    torch.manual_seed(0)
    size = 2**15 + 100
    named = {"norm.weight": nn.Parameter(torch.randn(size))}
    named["blocks.0.w"] = nn.Parameter(torch.randn(1, size))
    start = {key: p.detach().double() for key, p in named.items()}
    never, once = (torch.arange(size) % 3 == i for i in range(2))
    gradients = torch.randn(10, size) * 10 ** (-5 * torch.rand(size)) * ~never
    gradients[1:, once] = 0
    ours, theirs = optimizer_of(name, named), dict(start)
    states = {key: {} for key in named}
    for step, gradient in enumerate(gradients):
        for key, p in named.items():
            p.grad = gradient.view(p.shape).clone()
            decay = DECAY if p.ndim == 2 else 0.0
            theirs[key] = adamw(theirs[key], p.grad.double(), states[key], step + 1, decay)
        ours.step()
    still = named["norm.weight"][never]
    assert torch.equal(still, start["norm.weight"][never].float())
    for key, p in named.items():
        torch.testing.assert_close(
            p.view(-1)[never].double(), theirs[key].view(-1)[never], rtol=1e-6, atol=0
        )
        moved, expected = ((w - start[key]).view(-1)[~never] for w in (p.double(), theirs[key]))
        assert moved.norm() > 0.3 * expected.norm()
        assert moved.abs().max() < 1.2 * expected.abs().max()  # nothing is divided by eps alone


@needs_bitsandbytes
@pytest.mark.parametrize("signed", [True, False])
def test_8_bits_are_those_of_the_nearest_number(signed):
    """By comparison with all 256 of bitsandbytes', up to the rounding to bf16 before it; zero and sign are kept."""
    from bitsandbytes.functional import create_dynamic_map

    from memtrain.engine.adamw_8bit import quantized

    values = torch.cat([torch.zeros(300), torch.ones(1), 10 ** (-8 * torch.rand(2000))])
    values[301::2] *= -1 if signed else 1
    values *= 3.0
    numbers = create_dynamic_map(signed).double()
    indices, scales = quantized(values, signed=signed)
    assert (indices.dtype, indices.shape, scales.shape) == (torch.uint8, values.shape, (9,))
    scaled = values.double() / scales.repeat_interleave(256)[: len(values)].clamp(min=1e-30)
    found = numbers[indices.int()]
    least = (scaled.unsqueeze(1) - numbers).abs().amin(1)
    below = (scaled > 0) & (scaled < numbers[1] / 2) & (not signed)
    assert (found[below] == numbers[1]).all()  # a second moment stays above zero
    assert ((scaled - found).abs() <= least + 2**-7 * scaled.abs())[~below].all()
    assert (found[values == 0] == 0).all() and (found * scaled >= 0).all()
    assert torch.equal(scales[:2], torch.tensor([0.0, 3.0]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_rate_that_the_schedule_sets_is_the_rate_of_all(name):
    named = parameters()
    optimizer = optimizer_of(name, named)
    for group in optimizer.param_groups:
        assert group["lr"] == LR
        group["lr"] = 0.0
    train(optimizer, named, range(2))
    assert_close(named, parameters(), rtol=0, atol=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_optimizer_for_each_parameter_is_one_for_all(name):
    named = parameters()
    train(optimizer_of(name, named), named, range(3))
    alone = parameters()
    for group in decay_groups(alone.items(), DECAY):
        for parameter in group["params"]:
            single = {**group, "params": [parameter]}
            optimizer = make_optimizer(name, [single], LR, BETAS, EPS, MOMENTUM)
            train(optimizer, alone, range(3))
    assert_close(named, alone, rtol=0, atol=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_saved_state_goes_on(name):
    named = parameters()
    optimizer = optimizer_of(name, named)
    train(optimizer, named, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    other = {key: nn.Parameter(p.detach().clone()) for key, p in named.items()}
    resumed = optimizer_of(name, other)
    resumed.load_state_dict(saved)
    train(optimizer, named, range(2, 5))
    train(resumed, other, range(2, 5))
    assert_close(named, other, rtol=0, atol=0)
    for group in resumed.param_groups:
        group["lr"] = 0.0
    train(resumed, other, range(5, 6))
    assert_close(named, other, rtol=0, atol=0)


# --- steps that are skipped ---------------------------------------------------------------------------------------


def snapshot(optimizer, named):
    state = [value for p in named.values() for value in optimizer.state[p].values()]
    return copy.deepcopy([[p.detach() for p in named.values()], state])


def assert_same(before, after):
    for ours, theirs in zip(before, after, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


def skipped_step(optimizer, named, value=torch.nan):
    set_gradients(named, 0, scale=value)
    optimizer.found_inf = torch.ones(())
    optimizer.step()


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for_loop"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_changes_nothing(name, value, implementation):
    named = parameters()
    optimizer = optimizer_of(name, named, implementation)
    train(optimizer, named, range(2))
    before = snapshot(optimizer, named)
    skipped_step(optimizer, named, value)
    assert_same(before, snapshot(optimizer, named))
    train(optimizer, named, range(2, 4))
    assert_close(named, trained(name, 4, implementation), rtol=0, atol=0)


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for_loop"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_first_step_leaves_a_fresh_start(name, implementation):
    named = parameters()
    optimizer = optimizer_of(name, named, implementation)
    skipped_step(optimizer, named)
    assert_close(named, parameters(), rtol=0, atol=0)
    train(optimizer, named, range(3))
    assert_close(named, trained(name, 3, implementation), rtol=0, atol=0)


# --- groups -------------------------------------------------------------------------------------------------------


def test_matrices_decay_and_those_of_numbered_layers_are_hidden():
    named = parameters()
    frozen = nn.Parameter(torch.zeros(3, 3), requires_grad=False)
    found = {
        id(p): (group["weight_decay"], group["hidden"])
        for group in decay_groups([*named.items(), ("blocks.0.frozen", frozen)], DECAY)
        for p in group["params"]
    }
    assert {name: found.pop(id(p)) for name, p in named.items()} == {
        "tokens.weight": (DECAY, False),
        "blocks.0.attention.qkv.weight": (DECAY, True),
        "blocks.0.norm.weight": (0.0, False),
        "blocks.1.mlp.up.weight": (DECAY, True),
        "head.weight": (DECAY, False),
    }
    assert found == {}


# --- what state takes ---------------------------------------------------------------------------------------------


def state_size(name, *shapes, device="cpu"):
    named = {
        f"blocks.{i}.w": nn.Parameter(torch.ones(s, device=device)) for i, s in enumerate(shapes)
    }
    optimizer = optimizer_of(name, named)
    for p in named.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return state_bytes_per_parameter(optimizer.state.items())


@pytest.mark.parametrize(
    ("name", "expected_bytes"), [("adamw", 8.0), ("lion", 4.0), ("muon", 4.0), ("sgd", 4.0)]
)
def test_state_bytes(name, expected_bytes):
    size = state_size(name, (1024, 1024))
    assert size.bytes_per_parameter == pytest.approx(expected_bytes, abs=1e-4)
    assert size.share_32_bit is None


@needs_bitsandbytes
@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_8bit"])
def test_8_bit_state_takes_two_bytes_and_an_fp32_scale_per_256(name):
    size = state_size(name, (1024, 1024))
    assert size.bytes_per_parameter <= 2.1
    tables = 2 * 256 * 4 / 2**20
    assert size.bytes_per_parameter == pytest.approx(2 * (1 + 4 / 256) + tables)
    assert size.share_32_bit == 0.0


@needs_bitsandbytes
def test_what_of_8_bit_stays_in_32_is_told():
    assert state_size("adamw_8bit", (1, 4095)).share_32_bit == 1.0
    assert state_size("adamw_8bit", (1, 4095)).bytes_per_parameter == 8.0
    assert state_size("adamw_8bit", (1, 4096)).share_32_bit == 0.0
    assert state_size("adamw_8bit", (1, 4095), (1024, 1024)).share_32_bit == 4095 / (4095 + 2**20)


def test_tables_that_parameters_share_and_masters_are_not_counted_again():
    shared, weight, other = torch.zeros(100), torch.zeros(10), torch.zeros(10)
    states = [(weight, {"table": shared, "step": 3}), (other, {"table": shared, "master": other})]
    assert state_bytes_per_parameter(states).bytes_per_parameter == 400 / 20


# --- on the GPU that is not there, and without bitsandbytes -------------------------------------------------------


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for_loop"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_on_the_phantom(name, implementation):
    with PhantomGPU("a100_80gb") as gpu:
        named = {key: nn.Parameter(torch.empty(s, device=gpu.device)) for key, s in SHAPES.items()}
        optimizer = optimizer_of(name, named, implementation)
        for _ in range(2):
            for p in named.values():
                p.grad = torch.empty_like(p)
            optimizer.found_inf = torch.zeros((), device=gpu.device)
            optimizer.step()


@needs_bitsandbytes
def test_8_bit_tables_are_real_though_first_made_on_the_phantom():
    from bitsandbytes.functional import create_dynamic_map

    from memtrain.engine import adamw_8bit

    adamw_8bit.table.cache_clear()
    with PhantomGPU("a100_80gb") as gpu:
        weights = [nn.Parameter(torch.empty(64, 64, device=gpu.device)) for _ in range(30)]
        for weight in weights:  # an optimizer each; reading the tables in each would be too much
            optimizer_of("adamw_8bit", {"blocks.0.w": weight})
    for signed in (True, False):
        assert torch.equal(
            torch.tensor(adamw_8bit.table(signed=signed)), create_dynamic_map(signed)
        )
    adamw_8bit.codes.cache_clear()
    with PhantomCPU():
        weight = nn.Parameter(torch.ones(64, 64))
        weight.grad = torch.ones(64, 64)
        optimizer_of("adamw_8bit", {"blocks.0.w": weight}).step()
    assert adamw_8bit.codes(signed=True)[0].item() == 127


@needs_bitsandbytes
def test_paged_state_is_not_in_device_memory():
    peaks, sizes = [], []
    for name in ("adamw", "adamw_8bit", "paged_adamw_8bit"):
        with PhantomGPU("a100_80gb") as gpu:
            sizes.append(state_size(name, (1024, 1024), device=gpu.device).bytes_per_parameter)
        peaks.append(gpu.report().peak_allocated_bytes)
    assert [round(size, 2) for size in sizes] == [8.0, 2.03, 2.03]
    assert peaks[0] - peaks[1] == pytest.approx((8 - 2.03) * 2**20, rel=0.01)
    assert peaks[1] - peaks[2] == 2 * 2**20


def test_without_bitsandbytes_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "memtrain.engine.adamw_8bit", raising=False)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UserError) as refused:
        optimizer_of("adamw_8bit", parameters())
    assert str(refused.value) == (
        "optimizer=adamw_8bit: needs bitsandbytes; pip install 'memtrain[quantized]'"
    )
    project = Path(__file__).parents[2] / "pyproject.toml"
    assert "\nquantized = [" in project.read_text(encoding="utf-8")
