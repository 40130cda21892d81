"""Every pair of choices runs and keeps the numbers, or is refused by a line that names one of the two. Nothing else."""

import itertools
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from composed import compose_tree
from optimizer_choices import needs_bitsandbytes
from torch import Tensor

from memtrain.config import parse
from memtrain.config.tree import PrecisionConfig
from memtrain.errors import UserError
from memtrain.planner import budget

EXACT, ROUNDED = 0.0, 1e-4
LOW = 1e-2
"""Sums in another order, or bits drawn in another, where numbers are rounded to 16 bits."""


@dataclass(frozen=True)
class Choice:
    """One thing to choose. `tolerance`: how far it may move loss and norm in fp32; None: it trains something else."""

    overrides: str
    tolerance: float | None
    micro_batch: int = 8
    """Of 8 samples."""

    @property
    def keys(self) -> set[str]:
        return {word.split("=")[0] for word in self.overrides.split()}


CHOICES = [
    *(Choice(f"precision={name}", None) for name in ("bf16", "fp16", "bf16_true")),
    Choice("precision=bf16_true precision.master_weights=false", None),
    Choice("precision.master_weights=false", None),
    *(Choice(f"precision.gradients={kind}", None) for kind in ("bf16", "fp32")),
    *(
        Choice(f"offload={mode}", EXACT)
        for mode in ("activations", "optimizer", "params", "all", "optimizer_nvme", "params_nvme", "all_nvme")
    ),
    Choice("offload=optimizer offload.gradients=true", EXACT),
    Choice("offload=optimizer offload.optimizer_fraction=0.5", EXACT),
    *(
        Choice(f"optimizer={name}", None)
        for name in ("adamw_8bit", "paged_adamw_8bit", "lion", "muon", "adafactor", "sgd")
    ),
    Choice("optimizer.implementation=foreach", ROUNDED),
    Choice("optimizer.in_backward=true", EXACT),
    Choice("optimizer.in_backward=true optimizer.in_backward_clip=per_parameter", None),
    Choice("checkpoint_every=1", EXACT),
    Choice("checkpoint_every=3", EXACT),
    Choice("checkpointing=alternate checkpoint_every=2", EXACT),
    Choice("checkpointing=sqrt", EXACT),
    Choice("checkpointing=selective", EXACT),
    Choice("checkpointing=per_block checkpointing.per_block=[keep,selective,offload,recompute]", EXACT),
    Choice("checkpointing=budget", EXACT),
    Choice("compile=blocks", ROUNDED),
    Choice("compile=model", ROUNDED),
    Choice("model.mlp_chunks=2", ROUNDED),
    Choice("model.train_only=blocks.*.mlp.*", None),
    Choice("model.dropout=0.1", None),
    Choice("model.tied=false", None),
    Choice("loss=full", ROUNDED),
    Choice("accum=2", ROUNDED, micro_batch=4),
    Choice("clip=0", None),
]  # fmt: skip


def pairs():
    """Two answers to one question are no pair. A third is for the quick run; files and compilers take seconds."""
    for number, (one, other) in enumerate(itertools.combinations(CHOICES, 2)):
        if one.keys & other.keys:
            continue
        text = f"{one.overrides} {other.overrides}"
        takes_seconds = "_nvme" in text or "compile=" in text
        marks = [pytest.mark.slow] if takes_seconds or number % 3 else []
        marks += [needs_bitsandbytes] if "8bit" in text else []
        yield pytest.param(one, other, marks=marks, id=text)


@cache
def tree_of(overrides: str) -> dict[str, Any]:
    return compose_tree(
        "debug=tiny", "device=cpu", "offload.min_tensor_bytes=0", *overrides.split()
    )


def combined(*choices: Choice) -> dict[str, Any]:
    """What Hydra composes of them all, from what it composes of each: it takes its time."""
    base, tree = tree_of(""), deepcopy(tree_of(""))
    for choice in choices:
        for key, value in tree_of(choice.overrides).items():
            if isinstance(value, dict):
                tree[key] |= {k: v for k, v in value.items() if v != base[key][k]}
            elif value != base[key]:
                tree[key] = value
    return tree


@pytest.fixture
def figures(bench, tmp_path):
    """(2, 3): loss, norm and whether it stepped of two steps."""

    def figures(config, micro_batch: int) -> Tensor:
        config = replace(config, offload=replace(config.offload, nvme_dir=str(tmp_path / "files")))
        if config.checkpointing.policy == "budget":
            config = budget.with_choice(config, ("keep", "selective", "offload", "recompute"))
        step = bench.step(config)
        windows = [bench.window(bench.samples(seed=number), micro_batch) for number in range(2)]
        return torch.stack([step(window) for window in windows])

    return figures


PLAIN: dict[str, Tensor] = {}


@pytest.mark.parametrize(("one", "other"), list(pairs()))
def test_a_pair_runs_and_is_right_or_is_refused(figures, one, other):
    torch._dynamo.reset()
    tree = combined(one, other)
    tree["offload"]["nvme_dir"] = "files"
    try:
        config = parse(tree)
    except UserError as error:
        assert any(key in str(error) for key in one.keys | other.keys), str(error)
        return
    # Traced and partitioned as always, then run by torch's own kernels: a second.
    with torch.compiler.set_stance("default", force_backend="aot_eager"):
        ours = figures(config, min(one.micro_batch, other.micro_batch))
    assert torch.isfinite(ours).all()
    tolerance = allowed(one, other, config.precision)
    if tolerance is None:
        return
    twin = [choice for choice in (one, other) if choice.tolerance is None]
    key = " ".join(choice.overrides for choice in twin)
    if key not in PLAIN:
        PLAIN[key] = figures(parse(combined(*twin)), 8)
    torch.testing.assert_close(ours, PLAIN[key], rtol=tolerance, atol=0)


def allowed(one: Choice, other: Choice, precision: PrecisionConfig) -> float | None:
    """How far the pair may be from what is left without its savings; None: there is no such twin."""
    tolerances = [c.tolerance for c in (one, other) if c.tolerance is not None]
    if not tolerances or (max(tolerances) and "model.dropout" in one.keys | other.keys):
        return None  # pieces draw their own dropout
    if precision.name == "fp32" and precision.gradients != "bf16":
        return max(tolerances)
    return LOW if max(tolerances) or not precision.master_weights else EXACT
