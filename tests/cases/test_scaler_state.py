"""The loss scale and the count towards the next one go on where they were."""

import json
from pathlib import Path

import pytest
import torch
from command import Finished, Run

FP16 = ["debug=tiny", "precision=fp16", "precision.loss_scale=1024", "name=fp16", "save_every=7", "keep=-1",
        "schedule=constant"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fp16")


@pytest.fixture(scope="module")
def seven(run: Run, folder: Path) -> Finished:
    finished = run(*FP16, "steps=7", outputs=folder)
    assert finished.returncode == 0, finished.stderr
    return finished


def scaler(folder: Path, step: int) -> dict:
    (path,) = folder.glob(f"runs/fp16/*/checkpoints/step_{step:08d}/state.pt")
    return torch.load(path, weights_only=True)["scaler"]


def test_scale_and_counter(run: Run, folder: Path, seven: Finished) -> None:
    before = scaler(folder, 7)
    assert (before["scale"], before["_growth_tracker"]) == (1024.0, 7)
    finished = run(*FP16, "steps=8", "resume=latest", "precision.loss_scale=2", outputs=folder)
    assert finished.returncode == 0, finished.stderr
    assert scaler(folder, 8) == before | {"_growth_tracker": 8}
    (metrics,) = folder.glob("runs/fp16/*/metrics.jsonl")
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    assert (records[7]["step"], records[7]["loss_scale"]) == (8, 1024.0)
    assert records[7]["skipped_steps"] == 0
