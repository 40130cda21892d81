"""What weights, gradients and optimizer state take, on the device, on the host and in files: as arithmetic says.

Planned on the phantom; expected bytes come from the shapes of the parameters alone. Within 2 % unless said otherwise.
"""

from collections import Counter
from dataclasses import dataclass
from math import prod

import pytest
import torch
from optimizer_choices import needs_bitsandbytes

from memtrain.cards import load_card
from memtrain.engine.build import build_dimensions
from memtrain.model.transformer import make_transformer
from memtrain.phantom import PhantomGPU, Report
from memtrain.phantom.held import walk
from memtrain.phantom.ledger import DEVICE, PAGEABLE, PINNED, page_bytes
from memtrain.planner.predict import make_plan, make_step
from memtrain.units import GIB, MIB

SHAPE = ("data=random", "data.vocab_size=2048", "model.vocab_size=2048", "model.n_layers=6", "model.dim=256",
         "micro_batch=2", "seq_len=256", "offload.nvme_dir=/nowhere", "offload.nvme_buffer_mib=16")  # fmt: skip
INPUTS = 2 * 2 * 256 * 8
"""Token ids and targets of a micro-batch, int64."""


@dataclass(frozen=True)
class Measured:
    report: Report
    held: Counter[str]
    """Largest bytes of each category on the device in the last step."""
    device_peaks: list[int]
    host_peaks: list[tuple[int, int]]
    """Pageable and pinned, by step."""


def measure(config, n_steps: int = 2) -> Measured:
    gpu = PhantomGPU(load_card("a100_80gb"), enforce_capacity=False)
    ledger, host_peaks = gpu.meter.ledger, []
    with gpu:
        step, window = make_step(config, build_dimensions(config, 2048), gpu.device)
        for _ in range(n_steps):
            gpu.step_boundary()
            ledger.peak = dict(ledger.live)
            step(window())
            host_peaks.append((ledger.peak[PAGEABLE], ledger.peak[PINNED]))
    held: Counter[str] = Counter()
    for now in walk(ledger, DEVICE):
        if now.event >= ledger.steps[-1]:
            held |= Counter(now.categories)
    report = gpu.report()
    return Measured(report, held, report.step_peak_bytes[1:], host_peaks)


@pytest.fixture
def planned(config):
    return lambda *overrides, n_steps=2: measure(config(*SHAPE, *overrides), n_steps)


@pytest.fixture
def shapes(config):
    """Shapes of the parameters by name, of the model that `overrides` describe."""

    def shapes(*overrides):
        wanted = config(*SHAPE, *overrides)
        model = make_transformer(build_dimensions(wanted, 2048), torch.device("meta"))
        return {name: tuple(p.shape) for name, p in model.named_parameters()}

    return shapes


def count(shapes) -> int:
    return sum(prod(shape) for shape in shapes.values())


def matrices(shapes) -> int:
    return sum(prod(shape) for shape in shapes.values() if len(shape) == 2)


def in_blocks(shapes) -> int:
    """Elements of the blocks' matrices."""
    return matrices({name: shape for name, shape in shapes.items() if "blocks" in name})


def largest(shapes) -> int:
    return max(map(prod, shapes.values()))


# Optimizers


def state_bytes(name: str, shapes) -> float:
    """What each optimizer keeps, from its definition."""
    n, n_hidden = count(shapes), in_blocks(shapes)
    factors = sum(4 * sum(s) if len(s) == 2 else 4 * prod(s) for s in shapes.values())
    small = sum(prod(s) for s in shapes.values() if prod(s) < 4096)
    return {
        "adamw": 8 * n,
        "lion": 4 * n,
        "sgd": 4 * n,
        "adafactor": factors,  # sums of rows and columns; all of a vector
        "muon": 4 * n_hidden + 8 * (n - n_hidden),
        "adamw_8bit": 8 * small + (2 + 2 * 4 / 256) * (n - small) + 2 * 256 * 4,
    }[name]


@pytest.mark.parametrize(
    "name",
    [
        "adamw",
        "lion",
        "sgd",
        "adafactor",
        "muon",
        pytest.param("adamw_8bit", marks=needs_bitsandbytes),
    ],
)
def test_what_an_optimizer_keeps(planned, shapes, name):
    held = planned(f"optimizer={name}").held
    # A block of the allocator is 512 bytes at least: that shows where a parameter's state is a few numbers.
    rounding = 512 * 2 * len(shapes()) if name == "adafactor" else 0
    expected = state_bytes(name, shapes())
    assert 0.99 * expected <= held["optimizer_state"] <= 1.02 * expected + rounding


def test_plain_sgd_keeps_nothing(planned):
    assert planned("optimizer=sgd", "optimizer.momentum=0").held["optimizer_state"] == 0


# Precision


@pytest.mark.parametrize(
    ("overrides", "weights_and_state", "gradients"),
    [
        ((), 4 + 8, 4),
        (("precision=bf16",), 4 + 8, 4),
        (("precision=bf16", "precision.gradients=bf16"), 4 + 8, 2),
        (("precision=bf16_true",), 2 + 4 + 8, 2),
        (("precision=bf16_true", "precision.gradients=fp32"), 2 + 4 + 8, 4),
        (("precision=bf16_true", "precision.master_weights=false"), 2 + 4, 2),
        (("precision=bf16_true", "precision.master_weights=false", "optimizer=lion"), 2 + 2, 2),
    ],
    ids=str,
)
def test_bytes_per_parameter(planned, shapes, overrides, weights_and_state, gradients):
    found = planned(*overrides)
    n = count(shapes())
    assert found.report.end_allocated_bytes - device_rest(found.report) == pytest.approx(
        weights_and_state * n, rel=0.02
    )
    rounded = 4 * 2 * largest(shapes())  # the fp32 copies of the gradient that is stepped
    assert gradients * n <= found.held["gradients"] <= 1.02 * gradients * n + rounded


def device_rest(report: Report) -> int:
    """What is left on the device after a step beside weights and state: the workspaces of its matrix products."""
    return report.phases["other"].categories.get("workspaces", 0)


@pytest.mark.parametrize("clipping", ["two_pass", "per_parameter"])
@pytest.mark.parametrize("overrides", [(), ("precision=bf16_true",)], ids=["fp32", "bf16_true"])
def test_in_backward_all_gradients_are_never_there(planned, shapes, clipping, overrides):
    """Against the plain step, whose peak with full recomputation has all gradients: less by all but the largest."""
    base = ("model.n_layers=12", "checkpoint_every=1", "micro_batch=1", "seq_len=64", *overrides)
    wanted = ("optimizer.in_backward=true", f"optimizer.in_backward_clip={clipping}")
    plain, ours = planned(*base), planned(*base, *wanted)
    n, most = count(shapes(*base)), largest(shapes(*base))
    gradient_bytes = 4 if not overrides else 2
    saved = max(plain.device_peaks[1:]) - max(ours.device_peaks[1:])
    # Left: the gradient under way, that of the (tied) head, and the fp32 form of either.
    assert saved >= gradient_bytes * n - 4 * 3 * most


# The host


def test_the_optimizer_on_the_host(planned, shapes):
    """Masters 4, moments 8, the gradients, and two buffers of the largest weight for the way back."""
    n, most = count(shapes()), largest(shapes())
    for overrides, weight, gradient, cast in (
        ((), 4, 4, 0),
        (("precision=bf16_true",), 2, 2, 4),
        (("precision=bf16", "precision.gradients=bf16"), 4, 2, 4),
    ):
        report = planned("offload=optimizer", *overrides).report
        expected = (4 + 8 + gradient) * n + 2 * weight * most + cast * most + INPUTS
        assert report.host_peak_bytes == pytest.approx(expected, rel=0.02)
        assert report.host_pinned_peak_bytes == pytest.approx(
            gradient * n + 2 * weight * most + INPUTS, rel=0.02
        )
        assert report.d2h_bytes == pytest.approx(gradient * n, rel=0.02)
        assert report.h2d_bytes == pytest.approx(weight * n + INPUTS, rel=0.02)
        assert report.categories.get("optimizer_state", 0) == 0


def test_pinned_buffers_take_their_pages_and_no_power_of_two(planned, shapes):
    odd = ("model.dim=320", "model.n_heads=5", "model.n_layers=2")
    sizes = [4 * prod(shape) for shape in shapes(*odd).values()]
    matrices = [4 * prod(shape) for shape in shapes(*odd).values() if len(shape) > 1]
    gradients, weights = sum(map(page_bytes, sizes)), sum(map(page_bytes, matrices))
    found = planned("offload=optimizer", *odd).report.host_pinned_peak_bytes
    assert found == gradients + 2 * page_bytes(max(sizes)) + INPUTS
    found = planned("offload=params", *odd).report.host_pinned_peak_bytes
    assert found == weights + gradients + 2 * page_bytes(4 * 4 * 320) + INPUTS


def test_gradients_that_add_up_on_the_host(planned, shapes):
    """Two largest gradients are on their way at once: so much more on the device and, to be added, on the host."""
    n, most = count(shapes()), largest(shapes())
    alone = planned("offload=optimizer", "accum=2")
    found = planned("offload=optimizer", "accum=2", "offload.gradients=true")
    assert found.report.d2h_bytes == pytest.approx(2 * 4 * n, rel=0.02)
    assert alone.held["gradients"] == pytest.approx(4 * n, rel=0.05)
    assert found.held["gradients"] <= 3 * 4 * most
    more = found.report.host_peak_bytes - alone.report.host_peak_bytes
    assert 0 < more <= 4 * 4 * most


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_a_share_of_the_optimizer_on_the_host(planned, shapes, share):
    n, most = count(shapes()), largest(shapes())
    found = planned("offload=optimizer", f"offload.optimizer_fraction={share}")
    on_device = found.held["optimizer_state"] / (8 * n)
    assert on_device == pytest.approx(1 - share, abs=most / n)
    buffers = found.report.host_peak_bytes - 16 * n * (1 - on_device) - INPUTS
    assert 0.9 * 2 * 4 * 1024 * 256 < buffers < 1.1 * 2 * 4 * most  # of the largest that went
    assert found.report.d2h_bytes == pytest.approx(4 * n * (1 - on_device), rel=0.02)


def stage_elements(shapes) -> list[int]:
    """Matrices that are on the device together: embeddings, each block, the head."""
    block = in_blocks(shapes) // 6
    front = prod(shapes["embedding.weight"]) + prod(shapes["positions.weight"])
    return [front, *[block] * 6, prod(shapes["embedding.weight"])]


@pytest.mark.parametrize("overrides", [(), ("precision=bf16_true",)], ids=["fp32", "bf16_true"])
def test_weights_on_the_host(planned, shapes, overrides):
    """On the device: two stages and the vectors. Through the link: all once forward, the blocks again backward."""
    width = 2 if overrides else 4
    found, sizes = planned("offload=params", *overrides), stage_elements(shapes())
    n = count(shapes())
    vectors = n - matrices(shapes())
    two = sum(sorted(sizes)[-2:])
    assert found.held["weights"] == pytest.approx(width * (two + vectors), rel=0.02)
    assert found.held["gradients"] <= 1.02 * 4 * 3 * largest(shapes())
    moved = width * (sum(sizes) + in_blocks(shapes()) + vectors) + INPUTS
    assert found.report.h2d_bytes == pytest.approx(moved, rel=0.02)
    assert found.report.d2h_bytes == pytest.approx(width * n, rel=0.02)
    # An fp32 weight is its own master.
    masters = 4 if overrides else 0
    expected = (width + masters + 8 + width) * n + (4 * largest(shapes()) if overrides else 0)
    assert found.report.host_peak_bytes == pytest.approx(expected + INPUTS, rel=0.02)


# Files


FILE_CASES = [
    # mode, accum -> bytes per parameter in host memory beside the buffers; read; written. fp32.
    ("optimizer_nvme", 1, 4, 12, 12),
    ("params_nvme", 1, 4 + 4, 12, 12),
    ("all_nvme", 1, 0, 12 + 4, 12 + 4 + 4),
    ("all_nvme", 2, 0, 12 + 4 + 4, 12 + 8 + 4),  # the second gradient is added to the first
]


@pytest.mark.parametrize(("mode", "accum", "in_memory", "read", "written"), FILE_CASES)
def test_state_in_files(planned, shapes, mode, accum, in_memory, read, written):
    """12 bytes come and go a step; all_nvme adds gradients, and weights as often as the device reads them."""
    found = planned(f"offload={mode}", f"accum={accum}", "checkpoint_every=1")
    n, most = count(shapes()), largest(shapes())
    weights_read = 0
    if mode == "all_nvme":
        weights_read = 4 * accum * (sum(stage_elements(shapes())) + in_blocks(shapes()))
    report = found.report
    assert report.nvme_read_bytes == pytest.approx(read * n + weights_read, rel=0.02)
    assert report.nvme_written_bytes == pytest.approx(written * n, rel=0.02)
    assert report.categories.get("optimizer_state", 0) == 0
    more = report.host_peak_bytes - in_memory * n - 16 * MIB
    activations = 7 * 2 * 256 * 256 * 4 if mode == "all_nvme" else 0
    # Weights and gradients on their way: a few of each length, no more than this many of the largest.
    assert -0.02 * in_memory * n <= more
    assert more <= 4 * (14 if mode == "all_nvme" else 3) * most + activations + accum * INPUTS


def test_the_buffer_for_files_is_as_large_as_said(planned):
    small, large = (
        planned("offload=optimizer_nvme", f"offload.nvme_buffer_mib={size}").report.host_peak_bytes
        for size in (16, 64)
    )
    assert large - small == pytest.approx(48 * MIB, rel=0.02)


# Frozen layers


@pytest.mark.parametrize("mode", ["none", "optimizer", "params"])
def test_what_is_frozen_takes_weights_alone(planned, shapes, mode):
    found = planned("model.train_only='last 2'", f"offload={mode}")
    n = count(shapes())
    trained = count({k: s for k, s in shapes().items() if k.startswith(("blocks.4.", "blocks.5."))})
    report, most = found.report, 4 * 1024 * 256
    if mode == "none":
        assert found.held["gradients"] == pytest.approx(4 * trained, rel=0.02)
        assert found.held["optimizer_state"] == pytest.approx(8 * trained, rel=0.02)
        assert found.held["weights"] == pytest.approx(4 * n, rel=0.02)
        return
    assert report.d2h_bytes == pytest.approx(4 * trained, rel=0.02)
    buffers = 2 * most if mode == "optimizer" else 0
    host = 16 * trained + buffers + (4 * (matrices(shapes()) - trained) if mode == "params" else 0)
    assert report.host_peak_bytes == pytest.approx(host + INPUTS, rel=0.02)


# Nothing grows


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), marks=pytest.mark.slow),
        pytest.param(("precision=bf16_true",), marks=pytest.mark.slow),
        ("precision=bf16_true", "precision.master_weights=false"),
        pytest.param(("optimizer.in_backward=true",), marks=pytest.mark.slow),
        pytest.param(("offload=optimizer",), marks=pytest.mark.slow),
        ("offload=optimizer", "offload.gradients=true", "accum=3"),
        pytest.param(
            ("offload=optimizer", "offload.optimizer_fraction=0.5"), marks=pytest.mark.slow
        ),
        pytest.param(("offload=params",), marks=pytest.mark.slow),
        ("offload=params", "accum=2"),
        ("offload=all", "offload.min_tensor_bytes=0"),
        pytest.param(("offload=optimizer_nvme",), marks=pytest.mark.slow),
        pytest.param(("offload=params_nvme",), marks=pytest.mark.slow),
        ("offload=all_nvme", "accum=2"),
        pytest.param(("offload=all_nvme", "precision=bf16_true"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_nothing_grows_from_step_to_step(planned, overrides):
    found = planned(*overrides, n_steps=4)
    assert found.device_peaks[2] == found.device_peaks[3]
    assert found.host_peaks[2] == found.host_peaks[3]


# The figures of the family


@pytest.fixture
def figures(config):
    def figures(*overrides, gpu="rtx4090"):
        wanted = config(
            "data=random", "data.vocab_size=257", "offload.nvme_dir=/nowhere", *overrides
        )
        return make_plan(wanted, build_dimensions(wanted, 257), load_card(gpu))

    return figures


LONG = ("precision=bf16_true", "micro_batch=1", "seq_len=2048", "checkpoint_every=1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "device_gib"),
    [
        (("model=llama2_7b", "offload=optimizer", "offload.gradients=true"), 16),
        (("model=llama2_7b", "offload=params"), 5),
    ],
    ids=str,
)
def test_seven_billion(figures, overrides, device_gib):
    plan = figures(*LONG, *overrides)
    assert plan["fits"]
    assert plan["peak_allocated_bytes"] < device_gib * GIB


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mode", "host_gib"),
    [("llama2_13b", "params_nvme", 64), ("llama2_70b", "all_nvme", 128)],
)
def test_what_fits_one_rtx4090(figures, model, mode, host_gib):
    plan = figures(*LONG, f"model={model}", f"offload={mode}")
    assert plan["fits"]
    assert plan["host_bytes"] < host_gib * GIB


@pytest.mark.slow
@needs_bitsandbytes
@pytest.mark.parametrize("precision", ["bf16_true", "bf16", "fp32"])
def test_eight_bits_save_a_third_and_more(figures, precision):
    """gpt2_xl, one sequence of 1,024, every block recomputed: what is left are weights, gradients and moments."""
    base = (
        "model=gpt2_xl",
        f"precision={precision}",
        "micro_batch=1",
        "seq_len=1024",
        "checkpoint_every=1",
    )
    plain, ours = (
        figures(*base, f"optimizer={name}", gpu="a100_80gb") for name in ("adamw", "adamw_8bit")
    )
    assert 1 - ours["peak_allocated_bytes"] / plain["peak_allocated_bytes"] >= 0.35


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [0, 1])
def test_what_the_optimizer_on_the_host_costs(figures, recompute):
    """model=small, 8 x 1,024 tokens x 8 micro-batches on an A100: the host's step hides behind a forward pass."""
    base = ("model=small", "precision=bf16_true", "micro_batch=8", "seq_len=1024", "accum=8",
            f"checkpoint_every={recompute}")  # fmt: skip
    plain, ours = (
        figures(*base, f"offload={mode}", gpu="a100_80gb") for mode in ("none", "optimizer")
    )
    assert ours["step_seconds"] <= 1.15 * plain["step_seconds"]
