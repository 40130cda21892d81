import json
import math
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memtrain.data import store, whole
from memtrain.data.store import (
    TokenFile,
    open_tokens,
    split_tokens,
    tokenize_files,
    unigram_entropy,
    write_tokens,
)
from memtrain.data.tokenizer import bytes_tokenizer, train_bpe
from memtrain.errors import UserError

TOKENIZER = bytes_tokenizer()


def write(stem: Path, ids: list[int], vocab_size: int) -> TokenFile:
    return write_tokens(stem, [np.array(ids, dtype=np.int64)], vocab_size, "tokenizer", "source")


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(65_535, "<u2"), (65_536, "<u2"), (65_537, "<u4"), (70_000, "<u4")]
)
def test_the_largest_id_reads_back(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    written = write(tmp_path / "t", [0, vocab_size - 1, 7], vocab_size)
    assert written.tokens.tolist() == [0, vocab_size - 1, 7]
    assert written.dtype == np.dtype(dtype)
    assert isinstance(written.tokens, np.memmap)


@pytest.mark.parametrize("name", ["v1.0", "v1.0.bin", "v1.0.json"])
def test_a_file_is_opened_by_stem_data_or_sidecar(tmp_path: Path, name: str) -> None:
    write(tmp_path / "v1.0", [1, 2, 3], 10)
    opened = open_tokens(tmp_path / name)
    assert (opened.count, opened.vocab_size) == (3, 10)
    assert (opened.tokenizer_hash, opened.source_hash) == ("tokenizer", "source")
    assert {path.name for path in tmp_path.iterdir()} == {"v1.0.bin", "v1.0.json"}


def test_no_tokens_are_a_file_too(tmp_path: Path) -> None:
    assert write_tokens(tmp_path / "t", [], 10, "", "").count == 0


@pytest.mark.parametrize(("bad", "position"), [(64, 4), (-1, 4), (64, 2)])
def test_ids_outside_the_vocabulary_are_not_written(
    tmp_path: Path, bad: int, position: int
) -> None:
    ids = [0, 1, 2, 3, 4, 5]
    ids[position] = bad
    arrays = [np.array(ids[:3]), np.array(ids[3:])]
    with pytest.raises(UserError, match=f"id {bad} at position {position} .* of 64"):
        write_tokens(tmp_path / "t", arrays, 64, "", "")
    assert not list(tmp_path.iterdir())


def test_a_smaller_model_is_refused_naming_the_largest_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "CHUNK_TOKENS", 4)
    tokens = write(tmp_path / "t", [*range(60), 63, 64, 5], 100)
    tokens.check_ids(65)
    with pytest.raises(UserError, match=r"t\.bin: token id 64 at position 61 .* of 64"):
        tokens.check_ids(64)


def test_an_error_on_the_way_leaves_the_old_file(tmp_path: Path) -> None:
    def arrays() -> Iterator[np.ndarray[Any, Any]]:
        yield np.arange(10)
        raise KeyboardInterrupt

    write(tmp_path / "t", [1, 2, 3], 10)
    with pytest.raises(KeyboardInterrupt):
        write_tokens(tmp_path / "t", arrays(), 10, "", "")
    assert open_tokens(tmp_path / "t").tokens.tolist() == [1, 2, 3]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"t\.bin: cannot be written: No such file or directory"):
        write(tmp_path / "nothing" / "t", [1], 10)


@pytest.mark.parametrize(
    ("size_bytes", "message"), [(6, "cut short"), (7, "cut short"), (10, "too long"), (0, "cut")]
)
def test_a_wrong_length_is_refused(tmp_path: Path, size_bytes: int, message: str) -> None:
    data = write(tmp_path / "t", [1, 2, 3, 4], 10).path
    data.write_bytes(bytes(size_bytes))
    with pytest.raises(UserError, match=rf"t\.bin: {message}"):
        open_tokens(data)


@pytest.mark.parametrize("change", [{"version": 2}, {"dtype": "int16"}, {"count": None}, None])
def test_a_sidecar_that_does_not_fit_is_refused(
    tmp_path: Path, change: dict[str, Any] | None
) -> None:
    write(tmp_path / "t", [1, 2], 10)
    path = tmp_path / "t.json"
    sidecar = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**sidecar, **change} if change else [1]), encoding="utf-8")
    with pytest.raises(UserError, match=r"t\.json: "):
        open_tokens(tmp_path / "t")


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"t\.json: cannot be read: No such file"):
        open_tokens(tmp_path / "t")
    write(tmp_path / "t", [1], 10).path.unlink()
    with pytest.raises(UserError, match=r"t\.bin: cannot be read: No such file"):
        open_tokens(tmp_path / "t")


def _write_often(stem: Path) -> None:
    for _ in range(30):
        assert write_tokens(stem, [np.arange(1000)] * 5, 1000, "", "").count == 5000


def test_processes_writing_the_same_stem_do_not_disturb_each_other(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_write_often, args=(tmp_path / "t",)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0]
    assert {path.name for path in tmp_path.iterdir()} == {"t.bin", "t.json"}


def test_unigram_entropy() -> None:
    assert unigram_entropy(np.arange(64).repeat(10), 64) == pytest.approx(math.log(64))
    assert unigram_entropy(np.zeros(5, dtype=np.uint16), 64) == 0
    expected = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert unigram_entropy(np.array([3, 3, 3, 1], dtype=np.uint32), 5) == pytest.approx(expected)


def test_one_end_of_text_after_each_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "WINDOW", 4)
    monkeypatch.setattr(whole, "SEAM", 4)
    monkeypatch.setattr(whole, "BATCH", 8)
    documents = [b"one\ntwo\nthree\n", b"", "é<|endoftext|>\n".encode(), b"x"]
    files = [tmp_path / f"{i}.txt" for i in range(len(documents))]
    for path, document in zip(files, documents, strict=True):
        path.write_bytes(document)
    seen: list[tuple[int, int]] = []
    tokens = tokenize_files(
        files, TOKENIZER, tmp_path / "cache", lambda done, total: seen.append((done, total))
    )
    assert tokens.tokens.tolist() == [i for document in documents for i in [*document, 256]]
    total_bytes = sum(map(len, documents))
    assert seen[-1] == (total_bytes, total_bytes)
    assert len(seen) > 3


def test_a_byte_order_mark_is_no_token(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfabc")
    (tmp_path / "b").write_bytes(b"abc")
    with_mark, without = (
        tokenize_files([tmp_path / name], TOKENIZER, tmp_path / "cache").tokens for name in "ab"
    )
    np.testing.assert_array_equal(with_mark, without)


def test_the_cache_follows_files_and_tokenizer(tmp_path: Path) -> None:
    text, cache = tmp_path / "a.txt", tmp_path / "cache"
    text.write_text("the cat sat on the mat\n", encoding="utf-8")

    def state() -> tuple[int, int]:
        stat = tokenize_files([text], TOKENIZER, cache).path.stat()
        return stat.st_ino, stat.st_mtime_ns

    first = state()
    assert state() == first
    text.write_text("another text\n", encoding="utf-8")
    assert tokenize_files([text], TOKENIZER, cache).count == len("another text\n") + 1
    bpe = train_bpe(["another text\n"], 260)
    assert tokenize_files([text], bpe, cache).tokenizer_hash == bpe.fingerprint
    assert len(list(cache.glob("*.bin"))) == 3


def test_a_damaged_cache_is_made_again(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("abc", encoding="utf-8")
    tokenize_files([text], TOKENIZER, tmp_path).path.write_bytes(b"xx")
    assert tokenize_files([text], TOKENIZER, tmp_path).tokens.tolist() == [97, 98, 99, 256]


def test_a_bad_byte_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"abc\xff\xfe")
    with pytest.raises(UserError, match=r"b\.txt: byte 0xff at offset 3"):
        tokenize_files([tmp_path / "b.txt"], TOKENIZER, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_split_tokens_gives_views_of_start_and_end() -> None:
    tokens = np.arange(10)
    train, val = split_tokens(tokens, 0.3)
    assert (train.tolist(), val.tolist()) == (list(range(7)), [7, 8, 9])
    assert np.shares_memory(train, tokens)
    assert len(split_tokens(tokens, 0.0)[1]) == 0


@pytest.mark.parametrize(("row", "n_val"), [(0, 1), (4, 4), (10, 10), (11, 1)])
def test_each_side_has_a_row_if_there_are_two(row: int, n_val: int) -> None:
    """With 21 tokens and a row of 11 there is not enough for both: the share decides."""
    assert len(split_tokens(np.arange(21), 0.05, row)[1]) == n_val
    assert len(split_tokens(np.arange(21), 0.95, row)[0]) == n_val
