"""The heart: the predicted peak against what a real run allocates, over the switches, within 0.5 %.

Both sides run `engine.step` on the CPU, whose autocast rules and attention kernels are its own: once over fake
tensors, once for real under torch.profiler, which reports every allocation.
"""

import pytest
import torch
from allpairspy import AllPairs
from measured import real_peak_bytes

from memtrain.engine.build import build_dimensions
from memtrain.planner.predict import N_STEPS, make_step, predict_cpu

BASE = ("data=random", "data.vocab_size=500", "model.vocab_size=500", "model.dim=64", "model.n_layers=3",
        "model.n_heads=4", "micro_batch=4", "seq_len=64", "offload.min_tensor_bytes=1024",
        "precision.loss_scale=256")  # fmt: skip
"""A scale at which no step is skipped: optimizers on the host have no state before their first."""
PRECISIONS, OFFLOAD = ("fp32", "bf16", "fp16", "bf16_true"), ("none", "activations", "optimizer")
SWITCHES = [
    (f"precision={precision}", f"accum={accum}", f"checkpoint_every={every}", f"offload={offload}")
    for precision, accum, every, offload in AllPairs([PRECISIONS, (1, 2), (0, 2), OFFLOAD])
]
VARIANTS = [
    ("optimizer=sgd",),
    ("optimizer=sgd", "optimizer.momentum=0"),
    ("optimizer=adafactor",),
    ("optimizer=adafactor", "precision=bf16_true"),
    ("clip=0",),
    ("model.tied=false",),
    ("model.tied=false", "precision=bf16", "checkpoint_every=1"),
    ("model.norm=rmsnorm", "model.activation=swiglu", "model.positions=rope", "model.bias=false"),
    ("model.norm=rmsnorm", "precision=bf16", "accum=2", "checkpointing=sqrt"),
    ("model.positions=rope", "model.n_kv_heads=2", "precision=bf16"),
    ("model.n_kv_heads=1", "checkpointing=alternate"),
    ("offload=params", "precision=fp16", "accum=2"),
    ("offload=params", "precision=bf16_true", "checkpoint_every=2"),
    ("offload=all", "precision=bf16"),
    ("offload=optimizer", "offload.gradients=true", "accum=2"),
    ("offload=optimizer", "offload.optimizer_fraction=0.5", "precision=bf16_true"),
    ("optimizer.in_backward=true",),
    ("optimizer.in_backward=true", "precision=bf16_true", "precision.master_weights=false"),
    ("optimizer.in_backward=true", "optimizer.in_backward_clip=per_parameter"),
    ("precision=bf16_true", "precision.master_weights=false", "checkpoint_every=1"),
    ("precision=bf16", "precision.gradients=bf16", "accum=2"),
    ("precision=bf16_true", "precision.gradients=fp32"),
    ("model.train_only=last 1",),
    ("model.train_only=last 1", "offload=params", "precision=bf16_true"),
    ("optimizer=lion",),
    ("optimizer=muon",),
    ("optimizer.implementation=foreach",),
    ("data.source=jsonl", "data.path=x", "data.document_mask=true", "precision=bf16", "accum=2"),
    (
        "data.source=jsonl",
        "data.path=x",
        "data.document_mask=true",
        "model.positions=rope",
        "model.n_kv_heads=2",
        "offload=activations",
    ),
    ("model.dropout=0.1",),
    ("model.dropout=0.1", "checkpoint_every=1", "precision=bf16"),
]


def some(overrides, quick=True):
    """Most variants are for the slow run: 0.6 s each."""
    return pytest.param(
        overrides, id=" ".join(overrides), marks=[] if quick else [pytest.mark.slow]
    )


def build_and_step(config, dimensions) -> None:
    step, window = make_step(config, dimensions, torch.device("cpu"))
    for _ in range(N_STEPS):
        step(window())


@pytest.mark.parametrize(
    "overrides",
    [*(some(words, n % 3 == 0) for n, words in enumerate(VARIANTS)), *map(some, SWITCHES)],
)
def test_peak(config, overrides):
    wanted = config(*BASE, *overrides)
    dimensions = build_dimensions(wanted, 500)
    predicted = predict_cpu(wanted, dimensions).report.peak_allocated_bytes
    measured = real_peak_bytes(lambda: build_and_step(wanted, dimensions))
    assert predicted == pytest.approx(measured, rel=0.005)


def test_there_are_enough():
    assert len(SWITCHES + VARIANTS) >= 40
