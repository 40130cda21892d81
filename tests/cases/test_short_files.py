"""Too few tokens are refused with file, tokens found and tokens needed; the number of samples is exact."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from command import TINY_TEXT, Run

from memtrain.config import Config
from memtrain.data.loader import Batching, Loader, eval_batches
from memtrain.data.store import write_tokens
from memtrain.engine.build import build_data


@pytest.mark.parametrize("n_tokens", [0, 1, 16])
def test_too_few_are_refused(run: Run, tmp_path: Path, n_tokens: int) -> None:
    write_tokens(tmp_path / "few", [np.arange(n_tokens)], 64, "", "")
    finished = run(
        "debug=tiny", "data=tokens", "data.path=few.bin", "data.val_fraction=0", cwd=tmp_path
    )
    assert finished.returncode == 2
    line = finished.stderr.splitlines()[-1]
    assert "few.bin" in line and f"{n_tokens} tokens found, 17 needed" in line


def test_an_empty_file_of_text_is_refused(run: Run, tmp_path: Path) -> None:
    """Its end-of-text is the one token."""
    (tmp_path / "empty.txt").touch()
    finished = run(*TINY_TEXT, "data.path=empty.txt", "data.val_fraction=0", cwd=tmp_path)
    assert finished.returncode == 2
    line = finished.stderr.splitlines()[-1]
    assert "empty.txt" in line and "1 tokens found, 17 needed" in line


def test_seventeen_are_one_sample(run: Run, tmp_path: Path) -> None:
    write_tokens(tmp_path / "enough", [np.arange(17)], 64, "", "")
    finished = run(
        "debug=tiny", "data=tokens", "data.path=enough.bin", "data.val_fraction=0", "steps=2", cwd=tmp_path
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    assert "· 1 steps an epoch ·" in finished.stdout
    lines = (finished.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["tokens"] for line in lines] == [16, 32]


@pytest.mark.parametrize(
    ("sizes", "n_train", "n_val"),
    [
        ([20_000, *[60] * 19], 20_062, 1_098),  # one giant: the small ones are held out
        ([20_000, 10], 19_011, 1_001),  # no file of the size: the end of all tokens
        ([400] * 38 + [14] * 2, 14_466, 802),
        ([14] * 20, 283, 17),  # the file held out has not enough for a row
        ([34], 18, 17),
    ],
)
def test_both_sides_have_their_share_and_a_row(
    tiny: Callable[..., Config], tmp_path: Path, sizes: list[int], n_train: int, n_val: int
) -> None:
    for number, size in enumerate(sizes):
        (tmp_path / f"{number:02}.txt").write_text("x" * size, encoding="utf-8")
    config = tiny("data=text", "data.path=*.txt", "tokenizer=bytes", "model.vocab_size=null")
    data = build_data(config, tmp_path, lambda *_: nullcontext(lambda *_: None))
    assert isinstance(data.train, np.ndarray) and isinstance(data.val, np.ndarray)
    assert (len(data.train), len(data.val)) == (n_train, n_val)


def test_a_thousand_tokens_are_fifteen_samples_of_64() -> None:
    """They do not overlap; the last target is token 960."""
    tokens = np.arange(1000, dtype=np.uint16)
    assert Loader(tokens, 64, Batching(1, 1, 0, prefetch=0)).n_samples == 15
    batches = list(eval_batches(tokens, 64, 1))
    assert len(batches) == 15
    assert [batch.tokens[0, 0].item() for batch in batches] == list(range(0, 960, 64))
    assert batches[-1].targets[0, -1] == 960


def test_the_last_token_is_a_target() -> None:
    (batch,) = eval_batches(np.arange(17, dtype=np.uint16), 16, 1)
    assert batch.targets[0, -1] == 16
