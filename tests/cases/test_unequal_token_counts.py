"""Splitting the same samples into micro-batches of unequal token counts leaves the step as it is."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from command import Run
from safetensors.numpy import load_file

from memtrain.config import Config
from memtrain.data.loader import IGNORE_INDEX, Batch
from memtrain.engine import build

# Padded to 16: one and sixteen targets, end-of-text among them.
RECORDS = [{"text": "x"}, {"prompt": "ask", "completion": "twelve bytes"}]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records") / "two.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS), encoding="utf-8")
    return path


def step(run: Run, records: Path, *overrides: str) -> tuple[dict[str, np.ndarray], float, dict]:
    """Weights after one step of SGD, its loss, and the summary."""
    finished = run(
        "debug=tiny", "data=jsonl", f"data.path={records}", "tokenizer=bytes", "model.vocab_size=null",
        "data.val_fraction=0", "optimizer=sgd", "optimizer.lr=1", "schedule=constant", "schedule.warmup=0",
        "steps=1", "clip=0", "loss=full", *overrides,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    summary = json.loads((finished.folder / "summary.json").read_text(encoding="utf-8"))
    return load_file(finished.folder / "model.safetensors"), summary["final_loss"], summary


def test_the_step_is_the_same_however_samples_are_split(run: Run, records: Path) -> None:
    together, loss, summary = step(run, records, "micro_batch=2", "accum=1")
    apart, loss_apart, _ = step(run, records, "micro_batch=1", "accum=2")
    assert summary["documents"] == 2
    assert summary["target_share"] == pytest.approx((1 + 13) / 32)
    assert loss == pytest.approx(loss_apart, abs=1e-6)
    for name, weight in together.items():
        np.testing.assert_allclose(weight, apart[name], rtol=0, atol=1e-6)


def test_loss_sums_of_three_and_eight_over_one_and_sixteen_targets(
    tiny: Callable[..., Config],
) -> None:
    """11/17 = 0.647059, not 1.75, the mean of means."""
    config, cpu = tiny(), torch.device("cpu")
    model = build.build_model(config, build.build_dimensions(config, 64), cpu)
    step = build.build_step(config, model, cpu)
    sums = iter((3.0, 8.0))
    step.loss_function = lambda hidden, *rest: (hidden.sum() * 0 + next(sums)) * rest[-1]
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    one = torch.full((1, 16), IGNORE_INDEX)
    one[0, 0] = 1
    loss = step.accumulate([Batch(tokens, one, 1), Batch(tokens, tokens, 16)])
    assert loss.item() == pytest.approx(0.647059, abs=1e-6)
