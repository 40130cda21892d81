"""Bad bytes are named with file and offset, a byte-order mark is no token, and no default encoding is relied on."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command import ENVIRONMENT, ROOT, TINY_TEXT, Run

from memtrain.data.store import tokenize_files
from memtrain.data.tokenizer import bytes_tokenizer, load_tokenizer

MARK = b"\xef\xbb\xbf"


def test_a_bad_byte_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"abc\xff\xfe")
    finished = run(*TINY_TEXT, "data.path=b.txt", cwd=tmp_path)
    assert finished.returncode == 2
    line = finished.stderr.splitlines()[-1]
    assert "b.txt: byte 0xff at offset 3 is not UTF-8" in line


@pytest.mark.parametrize("text", [b"abc", b"", b"\xef\xbb\xbfabc", "é".encode()])
def test_a_mark_is_no_token(tmp_path: Path, text: bytes) -> None:
    """One mark: a second one is a character of the text."""
    (tmp_path / "with").write_bytes(MARK + text)
    (tmp_path / "plain").write_bytes(text.removeprefix(MARK) and text)
    with_mark = tokenize_files([tmp_path / "with"], bytes_tokenizer(), tmp_path / "cache")
    assert with_mark.tokens.tolist() == [*text, 256]
    if not text.startswith(MARK):
        plain = tokenize_files([tmp_path / "plain"], bytes_tokenizer(), tmp_path / "cache")
        np.testing.assert_array_equal(plain.tokens, with_mark.tokens)


def test_vocabulary_files_may_have_a_mark(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_bytes(MARK + bytes_tokenizer().to_json().encode())
    assert load_tokenizer(tmp_path / "t.json").fingerprint == bytes_tokenizer().fingerprint


@pytest.mark.parametrize("data", ["text", pytest.param("jsonl", marks=pytest.mark.slow)])
def test_no_default_encoding_is_relied_on(tmp_path: Path, data: str) -> None:
    """A whole run where each use of the platform's encoding is an error, with text that is not ASCII."""
    text = "Grüße, Welt — 世界 😀\n" * 200
    record = json.dumps({"text": "Grüße"}, ensure_ascii=False) + "\n"
    (tmp_path / "ü.txt").write_text(text if data == "text" else record * 200, encoding="utf-8")
    overrides = [
        *TINY_TEXT,
        f"data={data}",
        'data.path="ü.txt"',
        "tokenizer=bpe",
        "tokenizer.vocab_size=300",
    ]
    overrides += [
        "plan=off",
        f"data.cache_dir={tmp_path / 'cache'}",
        f"hydra.run.dir={tmp_path / 'out'}",
    ]
    strict = ["-X", "warn_default_encoding", "-W", "error::EncodingWarning"]
    ended = subprocess.run(
        [sys.executable, *strict, str(ROOT / "train.py"), *overrides],
        cwd=tmp_path,
        env=ENVIRONMENT | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr.decode("utf-8", "replace")
