"""An id that the model has no row for is refused before the first step, with its position; nothing is clamped."""

import json
from pathlib import Path

import numpy as np
import pytest
from command import Run

from memtrain.data.store import write_tokens
from memtrain.errors import UserError


def test_the_largest_id_is_named(run: Run, tmp_path: Path) -> None:
    ids = np.arange(200) % 60
    ids[123] = 64
    write_tokens(tmp_path / "t", [ids], 100, "", "")
    finished = run(
        "debug=tiny", "data=tokens", "data.path=t.bin", "model.vocab_size=64", cwd=tmp_path
    )
    assert finished.returncode == 2
    line = finished.stderr.splitlines()[-1]
    assert "t.bin: token id 64 at position 123 is outside the vocabulary of 64" in line
    assert not (finished.folder / "metrics.jsonl").exists()


def test_minus_one_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="token id -1 at position 1 is outside the vocabulary of 64"
    ):
        write_tokens(tmp_path / "t", [np.array([5, -1])], 64, "", "")
    assert not list(tmp_path.iterdir())


def test_minus_one_in_a_file_is_no_token(run: Run, tmp_path: Path) -> None:
    """Written by another program: as an unsigned number it is far outside."""
    ids = np.zeros(100, dtype="<i2")
    ids[77] = -1
    (tmp_path / "t.bin").write_bytes(ids.tobytes())
    sidecar = {"version": 1, "dtype": "uint16", "count": 100, "vocab_size": 64}
    sidecar |= {"tokenizer_hash": "", "source_hash": ""}
    (tmp_path / "t.json").write_text(json.dumps(sidecar), encoding="utf-8")
    finished = run("debug=tiny", "data=tokens", "data.path=t.bin", cwd=tmp_path)
    assert finished.returncode == 2
    assert "token id 65535 at position 77 is outside the vocabulary of 64" in finished.stderr
