"""One end-of-text between documents and one after the last, alike in training and validation; a mask that masks."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from command import Run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from memtrain.data.documents import tokenize_documents
from memtrain.data.packing import pack_split
from memtrain.data.store import tokenize_files
from memtrain.data.tokenizer import bytes_tokenizer
from memtrain.model.transformer import Dimensions, make_transformer

END = 256


def test_text_files_end_with_one_end_of_text(tmp_path: Path) -> None:
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    files[0].write_bytes(b"one")
    files[1].write_bytes(b"two, longer")
    tokens = tokenize_files(files, bytes_tokenizer(), tmp_path / "cache").tokens
    assert tokens.tolist() == [*b"one", END, *b"two, longer", END]


@pytest.mark.parametrize("keep_apart", [True, False])
def test_the_mask_does_what_it_says(tmp_path: Path, keep_apart: bool) -> None:
    """A block longer than the first document: the second sees it without the mask, and only then."""
    path = tmp_path / "two.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two, longer"}\n', encoding="utf-8")
    file = tokenize_documents([path], bytes_tokenizer(), tmp_path / "cache")
    packed, _ = pack_split(file, 0.0, 16, keep_apart)
    batch = packed.batch(np.arange(1))
    assert batch.tokens.tolist() == [[*b"one", END, *b"two, longer", END]]
    model = make_transformer(
        Dimensions(vocab_size=257, dim=32, n_layers=2, n_heads=2, n_kv_heads=2, ffn_dim=64, max_seq_len=16),
        torch.device("cpu"),
    )  # fmt: skip
    changed = batch.tokens.clone()
    changed[0, 0] += 1
    with torch.no_grad():
        same = model(batch.tokens, batch.starts)[0, 4:] == model(changed, batch.starts)[0, 4:]
    assert bool(same.all()) == keep_apart


def test_training_and_validation_are_packed_alike(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text('{"text": "the same"}\n' * 20, encoding="utf-8")
    file = tokenize_documents([path], bytes_tokenizer(), tmp_path / "cache")
    train, val = pack_split(file, 0.5, 32, True)
    assert val is not None
    for split in (train, val):
        batch = split.batch(np.arange(1))
        assert batch.tokens.tolist() == [[*b"the same", END] * 3 + [0] * 5]
        assert int((batch.tokens == END).sum()) == 3


@pytest.mark.parametrize("mask", ["true", "false"])
def test_a_run_says_whether_documents_are_kept_apart(run: Run, tmp_path: Path, mask: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "some text"}\n' * 20, encoding="utf-8")
    finished = run(
        "debug=tiny", "data=jsonl", "data.path=a.jsonl", f"data.document_mask={mask}", "tokenizer=bytes",
        "model.vocab_size=null", "steps=2", f"plan={'on' if mask == 'true' else 'off'}", cwd=tmp_path,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    (line,) = [line for line in finished.stdout.splitlines() if line.startswith("documents")]
    assert ("kept apart" in line) == (mask == "true")
    assert "19 in 19 rows of 16" in line and "37.5% padding" in line and "56.2% targets" in line
    summary = json.loads((finished.folder / "summary.json").read_text(encoding="utf-8"))
    assert (summary["documents"], summary["rows"]) == (19, 19)
    assert (summary["padding_share"], summary["target_share"]) == (0.375, 0.5625)
    assert summary["val_loss"] > 0
    assert (summary["tokens"], summary["padding_tokens"]) == (2 * 2 * 10, 2 * 2 * 6)
    records = map(json.loads, (finished.folder / "metrics.jsonl").read_text().splitlines())
    assert [(r["tokens"], r["padding_share"]) for r in records] == [(20, 0.375), (40, 0.375)]
    shown = [line for line in finished.stdout.splitlines() if line.startswith(("step ", "speed "))]
    assert len(shown) == 4 and "with padding" in shown[0]
    assert all("padding 37.5%" in line for line in shown[1:])
    points = EventAccumulator(str(finished.folder)).Reload().Scalars("train/padding_share")
    assert [(point.step, point.value) for point in points] == [(1, 0.375), (2, 0.375)]
