"""The newest checkpoints stay, by number and not by name, and none goes before the next one is whole."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from memtrain.engine import checkpoint
from memtrain.engine.checkpoint import Checkpoints, Contents, load_weights
from memtrain.errors import SaveError
from memtrain.model.transformer import Dimensions, Transformer
from memtrain.run_folder import complete, newest, step_of

DIMENSIONS = Dimensions(
    vocab_size=8, dim=4, n_layers=1, n_heads=1, n_kv_heads=1, ffn_dim=4, max_seq_len=4
)


def contents(step: int) -> Contents:
    weights = {name: p.detach() for name, p in Transformer(DIMENSIONS).named_parameters()}
    return Contents(step, None, weights, {"a/b": torch.zeros(2)}, {}, DIMENSIONS, "seed: 0\n")


def steps_left(folder: Path, keep: int, steps: range) -> list[int]:
    checkpoints = Checkpoints(folder, keep)
    for step in steps:
        checkpoints.save(contents(step))
        checkpoints.wait()
    return [step_of(path) for path in complete(folder)]


def test_two_of_eleven(tmp_path: Path) -> None:
    assert steps_left(tmp_path, 2, range(100, 1101, 100)) == [1000, 1100]


def test_all_of_eleven(tmp_path: Path) -> None:
    assert steps_left(tmp_path, -1, range(100, 1101, 100)) == list(range(100, 1101, 100))


def test_more_digits_are_later(tmp_path: Path) -> None:
    assert steps_left(tmp_path, 1, range(99_999_999, 100_000_001)) == [100_000_000]


def test_a_save_that_fails_takes_nothing_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(contents(1))
    checkpoints.wait()

    def full(path: Path, *parts: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint, "write_synced", full)
    checkpoints.save(replace(contents(2)))
    with pytest.raises(SaveError, match="step_00000001 is the last complete one"):
        checkpoints.wait()
    last = newest(tmp_path)
    assert last is not None and step_of(last) == 1
    load_weights(last, torch.device("cpu"))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]
