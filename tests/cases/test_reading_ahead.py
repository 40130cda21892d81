"""Batches do not depend on how far the thread reads ahead, and nothing of a dataset is on a device."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import Run

from memtrain.data.loader import Batching, Loader, RandomTokens, Windows
from memtrain.data.packing import PackedLoader, pack_split
from memtrain.data.store import DTYPES, LAST, LEARNED, write_tokens


def windows_of(kind: str, folder: Path, prefetch: int) -> Windows:
    if kind == "random":
        return RandomTokens(50, 8, 30, Batching(2, 2, 0, prefetch=prefetch))
    if kind == "tokens":
        return Loader(np.arange(1000), 8, Batching(2, 2, 0, prefetch=prefetch))
    array = np.zeros(600, DTYPES["uint32+role"])
    array["id"], array["role"] = np.arange(600), LEARNED
    array["role"][::6] = 0
    array["role"][5::6] |= LAST
    file = write_tokens(folder / "t", [array], 600, "", "", with_roles=True)
    return PackedLoader(pack_split(file, 0.0, 8, True)[0], Batching(2, 2, 0, prefetch=prefetch))


@pytest.mark.parametrize("kind", ["random", "tokens", "documents"])
def test_the_same_batches_for_any_prefetch(tmp_path: Path, kind: str) -> None:
    found = []
    for prefetch in (0, 1, 2):
        loader = windows_of(kind, tmp_path, prefetch)
        iterator = iter(loader)
        batches = [batch for _ in range(40) for batch in next(iterator)]
        found.append([(b.tokens.tolist(), b.targets.tolist()) for b in batches])
        loader.close()
        assert device_tensors(vars(loader)) == []
    assert found[0] == found[1] == found[2]


def device_tensors(attributes: dict[str, Any]) -> list[str]:
    """Names of attributes that live on a device that is not the CPU."""
    tensors = {name: v for name, v in attributes.items() if isinstance(v, torch.Tensor)}
    return [name for name, tensor in tensors.items() if tensor.device.type != "cpu"]


def test_runs_lose_the_same(run: Run, tmp_path: Path) -> None:
    losses = []
    write_tokens(tmp_path / "t", [np.arange(5000) % 61], 64, "", "")
    for prefetch in (0, 2):
        finished = run(
            "debug=tiny",
            "data=tokens",
            "data.path=t.bin",
            f"data.prefetch={prefetch}",
            cwd=tmp_path,
        )
        assert finished.returncode == 0, finished.stderr
        lines = (finished.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert len(losses[0]) == 10 and losses[0] == losses[1]
