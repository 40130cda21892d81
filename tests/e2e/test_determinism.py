"""deterministic=true: the same command gives the same bits, in two processes of the same machine."""

import json

import pytest
from command import Finished, Run
from safetensors.torch import load_file

BASE = ["debug=tiny", "deterministic=true", "model.dropout=0.1", "accum=2", "eval_every=5"]
FORMS = {
    "plain": [],
    "bf16": ["precision=bf16"],
    "recomputed": ["checkpoint_every=1", "precision=fp16"],
    "activations on the host": ["offload=activations", "offload.min_tensor_bytes=0"],
    "all on the host": ["offload=all", "offload.min_tensor_bytes=0", "checkpoint_every=2"],
    "rounded at random": ["precision=bf16_true", "precision.master_weights=false"],
}
SLOW = [name for name in FORMS if name not in ("plain", "all on the host")]


def losses(finished: Finished) -> list[tuple[float, float | None, float]]:
    assert finished.returncode == 0, finished.stderr
    lines = (finished.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [(r["loss"], r.get("val_loss"), r["grad_norm"]) for r in map(json.loads, lines)]


@pytest.mark.parametrize(
    "form", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in FORMS]
)
def test_twice_the_same(run: Run, form: str) -> None:
    one, other = (run(*BASE, *FORMS[form]) for _ in range(2))
    assert len(losses(one)) == 10
    assert losses(one) == losses(other)
    weights = [load_file(finished.folder / "model.safetensors") for finished in (one, other)]
    assert weights[0].keys() == weights[1].keys()
    assert all(weights[0][name].equal(weight) for name, weight in weights[1].items())


def test_another_seed_is_another_run(run: Run) -> None:
    """So that equal bits mean something."""
    assert losses(run(*BASE)) != losses(run(*BASE, "seed=1"))
