"""A run that goes on in another process is the run that never stopped, to the last bit; dropout and shuffling too."""

import json

from command import Finished
from safetensors.torch import load_file


def losses(finished: Finished) -> dict[int, tuple[float, float | None, int]]:
    lines = (finished.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return {r["step"]: (r["loss"], r.get("val_loss"), r["tokens"]) for r in records}


def test_losses_validation_and_weights(straight: Finished, resumed: Finished) -> None:
    whole, rest = losses(straight), losses(resumed)
    assert list(whole) == list(range(1, 11)) and list(rest) == list(range(6, 11))
    assert {step: whole[step] for step in rest} == rest
    weights = [load_file(one.folder / "model.safetensors") for one in (straight, resumed)]
    assert all(weights[0][name].equal(weight) for name, weight in weights[1].items())


def test_it_says_where_it_goes_on(resumed: Finished) -> None:
    """In steps, not in micro-batches."""
    assert "step_00000005, step 5 of 10" in " ".join(resumed.stdout.split())
