"""What two runs are compared by that have to be the same one, bit for bit."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

EXACT = ("step", "loss", "lr", "grad_norm", "tokens", "loss_scale", "skipped_steps", "val_loss")
"""Of a record: all that the machine has no part in."""


def the_run(outputs: Path, name: str) -> Path:
    (folder,) = (outputs / "runs" / name).iterdir()
    return folder


def checkpoints(run: Path) -> list[str]:
    """All that lies where checkpoints do, hidden or not."""
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def records(run: Path, after: int = 0) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [{key: record.get(key) for key in EXACT} for record in map(json.loads, lines)]
    return [record for record in found if record["step"] > after]


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return found


def curve(run: Path, tag: str) -> list[tuple[int, float]]:
    """What TensorBoard shows."""
    points = EventAccumulator(str(run)).Reload().Scalars(tag)
    return [(point.step, point.value) for point in points]


def assert_same_tensors(found: Path, wanted: Path) -> None:
    ours, theirs = load_file(found), load_file(wanted)
    assert ours.keys() == theirs.keys()
    different = [
        name
        for name in ours
        if ours[name].dtype != theirs[name].dtype or not torch.equal(ours[name], theirs[name])
    ]
    assert not different


def assert_same_run(found: Path, wanted: Path, after: int = 0) -> None:
    """Weights, and all that was recorded after a step."""
    assert records(found, after) == records(wanted, after)
    assert_same_tensors(found / "model.safetensors", wanted / "model.safetensors")


def files(run: Path) -> dict[str, bytes]:
    """What a run holds, but for the logs of whoever came by."""
    paths = (path for path in run.rglob("*") if path.is_file())
    names = {path: str(path.relative_to(run)) for path in paths}
    return {
        name: path.read_bytes()
        for path, name in names.items()
        if not name.startswith((".hydra", ".lock", "train.log"))
    }
