"""The newest checkpoints stay, by number and not by name, and none goes before the next one is whole."""

import json
import math
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


def contents(step: int, val_loss: float | None = None, **counters: int) -> Contents:
    weights = {name: p.detach() for name, p in Transformer(DIMENSIONS).named_parameters()}
    state = {"a/b": torch.zeros(2)}
    return Contents(step, val_loss, weights, state, {}, DIMENSIONS, "seed: 0\n", **counters)


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


LIFE = {
    "saved every tenth step": (
        [10, 20, 30, 40, 50],
        {*range(1, 26), *range(41, 51)},
        [[10], [20], [20, 30], [20, 40], [50]],
    ),
    "its first step is not finite": (
        [10, 20, 30, 40, 50],
        {*range(1, 21), *range(41, 51)},
        [[10], [10, 20], [10, 20, 30], [20, 40], [50]],
    ),
    "saved every step": (
        [1, 2, 3, 4, 5, 6],
        {1, 2, 5, 6},
        [[1], [1, 2], [1, 2, 3], [2, 4], [5], [6]],
    ),
    "no step was ever finite": ([1, 2, 3], set(), [[1], [2], [3]]),
}
"""Steps that are saved, steps that are finite, and what is there once the step after each save has ended."""


@pytest.mark.parametrize("life", LIFE)
@pytest.mark.parametrize("reopened", [False, True])
def test_what_was_good_before_a_streak_outlives_it(
    tmp_path: Path, life: str, reopened: bool
) -> None:
    """Also where every save is by another process."""
    saved, finite, wanted = LIFE[life]
    there, in_a_row = [], 0
    checkpoints = Checkpoints(tmp_path, 1)
    for step in range(1, saved[-1] + 1):
        in_a_row = 0 if step in finite else in_a_row + 1
        checkpoints.followed(step in finite)
        if step - 1 in saved:
            checkpoints.wait()
            there.append([step_of(path) for path in complete(tmp_path)])
            checkpoints = Checkpoints(tmp_path, 1) if reopened else checkpoints
        if step in saved:
            stepped = len([other for other in finite if other <= step])
            checkpoints.save(contents(step, stepped=stepped, skipped_in_a_row=in_a_row))
    checkpoints.wait()
    there.append([step_of(path) for path in complete(tmp_path)])
    assert there == wanted


def test_windows_without_a_target_prove_nothing(tmp_path: Path) -> None:
    """The third state is finite and bad; a window that learns nothing is saved with the same weights, then a streak."""
    checkpoints = Checkpoints(tmp_path, 1)
    for step, stepped, in_a_row in (
        (1, 1, 0),
        (2, 2, 0),
        (3, 3, 0),
        (4, 3, 0),
        (5, 3, 1),
        (6, 3, 2),
    ):
        if step in (2, 3, 5, 6):  # the step before had targets
            checkpoints.followed(step < 4)
        checkpoints.save(contents(step, stepped=stepped, skipped_in_a_row=in_a_row))
    checkpoints.followed(False)
    checkpoints.wait()
    assert 2 in [step_of(path) for path in complete(tmp_path)]


def test_one_that_was_saved_before_streaks_were_noted_is_a_good_one(tmp_path: Path) -> None:
    assert steps_left(tmp_path, 1, range(10, 11)) == [10]
    meta = tmp_path / "checkpoints/step_00000010/meta.json"
    known = json.loads(meta.read_text())
    meta.write_text(json.dumps({k: known[k] for k in ("step", "val_loss", "sizes_bytes")}))
    checkpoints = Checkpoints(tmp_path, 1)
    for step in (20, 30):
        checkpoints.save(contents(step, stepped=15, skipped_in_a_row=step - 15))
        checkpoints.followed(False)
        checkpoints.wait()
    assert [step_of(path) for path in complete(tmp_path)] == [10, 30]


def test_validation_that_is_no_number_is_not_the_best(tmp_path: Path) -> None:
    """It is trained on as long as its steps are finite."""
    checkpoints = Checkpoints(tmp_path, 1)
    for step, val_loss in enumerate((2.0, math.nan, 3.0, math.nan), start=1):
        checkpoints.save(contents(step, val_loss, stepped=step))
        checkpoints.followed(True)
    checkpoints.wait()
    assert [step_of(path) for path in complete(tmp_path)] == [1, 4]


def test_a_stop_leaves_what_is_not_yet_replaced(tmp_path: Path) -> None:
    """Whoever goes on sees whether the last one is any good."""
    with pytest.raises(ZeroDivisionError), Checkpoints(tmp_path, 1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(contents(step, stepped=step))
        raise ZeroDivisionError
    assert [step_of(path) for path in complete(tmp_path)] == [1, 2]


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
