"""Ids keep their value whatever the size of the vocabulary; the type is stored with the file."""

import json
from pathlib import Path

import numpy as np
import pytest
from command import Run

from memtrain.data.store import open_tokens, write_tokens


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(65_535, "uint16"), (65_536, "uint16"), (65_537, "uint32"), (70_000, "uint32")]
)  # fmt: skip
def test_the_largest_id_reads_back(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    write_tokens(tmp_path / "t", [np.array([0, vocab_size - 1, 7])], vocab_size, "", "")
    assert open_tokens(tmp_path / "t").tokens.tolist() == [0, vocab_size - 1, 7]
    assert json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))["dtype"] == dtype


def test_a_run_on_a_vocabulary_of_70000(run: Run, tmp_path: Path) -> None:
    tokens = np.full(2 * 16 * 4 + 1, 69_999)
    write_tokens(tmp_path / "wide", [tokens], 70_000, "", "")
    assert open_tokens(tmp_path / "wide").tokens.tolist() == [69_999] * len(tokens)
    finished = run(
        "debug=tiny", "data=tokens", "data.path=wide.bin", "model.vocab_size=null", "model.dim=8",
        "model.n_layers=1", "steps=2", "optimizer.lr=0.1", "schedule=constant", "schedule.warmup=0",
        "data.val_fraction=0", cwd=tmp_path,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    summary = json.loads((finished.folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["vocab_size"] == 70_000
    assert summary["final_loss"] < summary["first_loss"]
