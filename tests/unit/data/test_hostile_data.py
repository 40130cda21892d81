"""Files that change, vanish or never end, and processes that share a cache."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from memtrain.data import whole
from memtrain.data.corpus import fingerprint, read_pieces, text_files, total_bytes
from memtrain.data.documents import tokenize_documents
from memtrain.data.store import make_folder, open_tokens, tokenize_files, write_tokens
from memtrain.data.tokenizer import bytes_tokenizer, load_tokenizer, train_bpe
from memtrain.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
TOKENIZER = bytes_tokenizer()
MIB = 2**20

CHILD = """
import json, re, sys
from pathlib import Path
from memtrain.data.documents import tokenize_documents
from memtrain.data.store import tokenize_files
from memtrain.data.tokenizer import bytes_tokenizer, train_bpe
from memtrain.data.corpus import read_pieces
action, path, cache = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
if action == "train":
    found = train_bpe(read_pieces(path), 300).vocab_size
else:
    tokenize = tokenize_files if action == "text" else tokenize_documents
    found = int(tokenize([path], bytes_tokenizer(), cache).tokens.sum(dtype="i8"))
status = Path("/proc/self/status").read_text(encoding="utf-8")
peak_kib = re.search(r"VmHWM:\\s+(\\d+)", status)
print(json.dumps([found, int(peak_kib[1]) * 1024]))
"""


def start(*arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"RAYON_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> list[int]:
    stdout, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    found: list[int] = json.loads(stdout)
    return found


@pytest.mark.parametrize("action", ["text", "documents"])
def test_two_processes_that_tokenize_the_same_corpus(tmp_path: Path, action: str) -> None:
    """At once and into one cache: both read the whole, and one file is left."""
    lines = [json.dumps({"text": f"line {i} of the corpus"}) for i in range(20_000)]
    (tmp_path / "a").write_text("\n".join(lines), encoding="utf-8")
    both = [start(action, tmp_path / "a", tmp_path / "cache") for _ in range(2)]
    (first, _), (second, _) = map(finish, both)
    assert first == second > 20_000
    left = list((tmp_path / "cache").iterdir())
    assert sorted(path.suffix for path in left) == [".bin", ".json"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("action", ["text", pytest.param("train", marks=pytest.mark.slow)])
def test_one_line_of_any_length_takes_bounded_memory(tmp_path: Path, action: str) -> None:
    """Sixteen times the text, about the same peak: read whole, it would take 100 bytes per token."""
    peaks = []
    for size_mib in (1, 16):
        path = tmp_path / f"{size_mib}.txt"
        letters = np.random.default_rng(0).integers(97, 123, size=size_mib * MIB, dtype=np.uint8)
        path.write_bytes(letters.tobytes())
        peaks.append(finish(start(action, path, tmp_path))[1])
    assert peaks[1] - peaks[0] < 200 * MIB
    assert peaks[1] < 600 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_record_without_end_is_refused_in_bounded_memory(tmp_path: Path) -> None:
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.write(b'{"text": "')
        file.truncate(8 * 1024 * MIB)  # the rest are NUL bytes that take no disk
    before = peak_bytes()
    with pytest.raises(UserError, match=r"a\.jsonl: line 1: longer than 16 MiB"):
        tokenize_documents([tmp_path / "a.jsonl"], TOKENIZER, tmp_path / "cache")
    assert peak_bytes() - before < 100 * MIB
    assert not list((tmp_path / "cache").iterdir())


def peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found
    return int(found[1]) * 1024


@pytest.mark.parametrize("kind", ["text", "documents"])
def test_a_file_that_changes_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(whole, "BATCH", 8)
    path = tmp_path / "grows.txt"
    path.write_text('{"text": "one line"}\n' * 10, encoding="utf-8")

    def grow(done_bytes: int, total_bytes: int) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write("\n")

    tokenize = tokenize_files if kind == "text" else tokenize_documents
    with pytest.raises(UserError, match=r"grows\.txt: changed while it was read"):
        tokenize([path], TOKENIZER, tmp_path / "cache", grow)
    assert not list((tmp_path / "cache").iterdir())
    assert tokenize([path], TOKENIZER, tmp_path / "cache").count > 0


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    path = tmp_path / "gone.txt"
    for read in (fingerprint, total_bytes):
        with pytest.raises(UserError, match=r"gone\.txt: cannot be read: No such file"):
            read([path])
    with pytest.raises(UserError, match=r"gone\.txt: cannot be read"):
        tokenize_files([path], TOKENIZER, tmp_path / "cache")


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    """Reading a pipe that nobody writes to would wait for ever."""
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "a.txt").write_text("a", encoding="utf-8")
    assert text_files(["."], tmp_path) == [tmp_path / "a.txt"]
    with pytest.raises(UserError, match=r"pipe\.txt: no such file"):
        text_files(["pipe.txt"], tmp_path)
    with pytest.raises(UserError, match="null: no such file"):
        text_files(["/dev/null"], tmp_path)


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("two bytes a character".encode("utf-16"), "NUL byte at offset 3"),
        ("two bytes a character".encode("utf-16-be"), "NUL byte at offset 0"),
        (b"utf-8 \xc3\xa9 and latin-1 \xe9\n", "byte 0xe9 at offset 21"),
        (b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0d", "NUL byte at offset 8|byte 0x89 at offset 0"),
        (b"\x7fELF\x02\x01\x01\x00", "NUL byte at offset 7"),
    ],
)
def test_what_is_no_utf8_text_is_named_with_its_place(
    tmp_path: Path, content: bytes, place: str
) -> None:
    (tmp_path / "b.txt").write_bytes(content)
    with pytest.raises(UserError, match=rf"b\.txt: ({place})") as raised:
        list(read_pieces(tmp_path / "b.txt"))
    assert len(str(raised.value).splitlines()) == 1


def test_a_file_whose_name_is_no_text(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff\n.txt"))
    path.write_bytes(b"ab\xff")
    (found,) = text_files(["."], tmp_path)
    with pytest.raises(UserError, match="offset 2"):
        tokenize_files([found], TOKENIZER, tmp_path / "cache")


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("a", encoding="utf-8")
    with pytest.raises(UserError, match=r"file.*: cannot be written: .* data\.cache_dir"):
        tokenize_files([tmp_path / "file"], TOKENIZER, tmp_path / place)


def test_what_a_killed_process_left_is_taken_out(tmp_path: Path) -> None:
    old, new = tmp_path / ".a.bin.1.tmp", tmp_path / ".a.bin.2.tmp"
    for path in (old, new):
        path.write_bytes(b"half")
    two_hours_ago = time.time() - 7200
    os.utime(old, (two_hours_ago, two_hours_ago))
    make_folder(tmp_path)
    assert list(tmp_path.iterdir()) == [new]


@pytest.mark.skipif(sys.platform == "win32", reason="limits of the shell")
def test_a_disk_that_is_full_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk."""
    text = tmp_path / "a.txt"
    text.write_text("word " * 100_000, encoding="utf-8")
    code = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    code += "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
    command = [sys.executable, "-c", code + CHILD, "text", str(text), str(tmp_path / "cache")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert re.search(r"\.bin: cannot be written: File too large", ended.stderr), ended.stderr
    assert not list((tmp_path / "cache").iterdir())


SIDECARS = {
    "no JSON": b"{",
    "nested without end": b"[" * 50_000,
    "not UTF-8": b'{"version": "\xff"}',
    "larger than any": b" " * MIB + b"{}",
    "a count that is none": {"count": True},
    "a negative count": {"count": -1},
    "no vocabulary": {"vocab_size": 0},
    "a fraction": {"count": 2.0},
    "no hash": {"source_hash": None},
    "a list for a type": {"dtype": ["uint16"]},
}


@pytest.mark.parametrize("wrong", SIDECARS)
def test_a_wrong_sidecar_is_refused_in_one_line(tmp_path: Path, wrong: str) -> None:
    write_tokens(tmp_path / "t", [np.array([1, 2])], 10, "", "")
    path, change = tmp_path / "t.json", SIDECARS[wrong]
    if isinstance(change, bytes):
        path.write_bytes(change)
    else:
        kept = json.loads(path.read_text(encoding="utf-8"))
        kept.pop("source_hash") if wrong == "no hash" else kept.update(change)
        path.write_text(json.dumps(kept), encoding="utf-8")
    with pytest.raises(UserError, match=r"t\.json: .*: prepare it again") as raised:
        open_tokens(tmp_path / "t")
    assert len(str(raised.value).splitlines()) == 1


def test_a_content_that_was_changed_is_refused(tmp_path: Path) -> None:
    """One that was only touched, or copied, is not."""
    path = write_tokens(tmp_path / "t", [np.arange(6)], 10, "", "").path
    os.utime(path, ns=(1, 1))
    assert open_tokens(path).count == 6
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(UserError, match=r"t\.bin: its content is not what t\.json says: "):
        open_tokens(path)


def test_a_cached_file_that_was_changed_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    first = tokenize_files([tmp_path / "a.txt"], TOKENIZER, tmp_path / "cache")
    wanted = first.tokens.tolist()
    first.path.write_bytes(b"\xff" * first.path.stat().st_size)
    again = tokenize_files([tmp_path / "a.txt"], TOKENIZER, tmp_path / "cache")
    assert again.tokens.tolist() == wanted


def test_a_sidecar_of_another_program_needs_no_hash_of_the_content(tmp_path: Path) -> None:
    ours = write_tokens(tmp_path / "t", [np.arange(6)], 10, "", "")
    sidecar = json.loads((tmp_path / "t.json").read_text())
    for key in ("content_hash", "modified_ns"):
        del sidecar[key]
    (tmp_path / "t.json").write_text(json.dumps(sidecar))
    assert open_tokens(tmp_path / "t").content_hash == ours.content_hash


def test_a_token_file_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    write_tokens(tmp_path / "t", [np.array([1, 2])], 10, "", "").path.unlink()
    (tmp_path / "t.bin").mkdir()
    with pytest.raises(UserError, match=r"t\.bin: "):
        open_tokens(tmp_path / "t")


def test_a_sidecar_of_documents_over_plain_tokens_is_refused(tmp_path: Path) -> None:
    write_tokens(tmp_path / "t", [np.arange(6)], 10, "", "")
    path = tmp_path / "t.json"
    path.write_text(path.read_text(encoding="utf-8").replace("uint16", "uint16+role"), "utf-8")
    with pytest.raises(UserError, match=r"t\.bin: cut short: 12 bytes for 6 tokens of 3"):
        open_tokens(tmp_path / "t")


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    """A pickle that would leave a file, in the place of each file that is read."""
    bomb = b"cos\nsystem\n(S'touch " + os.fsencode(tmp_path / "exploded") + b"'\ntR."
    write_tokens(tmp_path / "t", [np.array([1, 2])], 10, "", "")
    for name in ("t.json", "tokenizer.json", "a.txt", "a.jsonl"):
        (tmp_path / name).write_bytes(bomb)
    for read in (
        lambda: open_tokens(tmp_path / "t"),
        lambda: load_tokenizer(tmp_path / "tokenizer.json"),
        lambda: tokenize_documents([tmp_path / "a.jsonl"], TOKENIZER, tmp_path / "cache"),
    ):
        with pytest.raises(UserError):
            read()
    tokenize_files([tmp_path / "a.txt"], TOKENIZER, tmp_path / "cache")
    assert not (tmp_path / "exploded").exists()


def test_a_tokenizer_file_may_have_a_mark(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(b"\xef\xbb\xbf" + TOKENIZER.to_json().encode())
    assert load_tokenizer(path).fingerprint == TOKENIZER.fingerprint


def test_text_that_a_tokenizer_has_no_token_for(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    model = '{"type": "WordLevel", "vocab": {"a": 0, "</s>": 1}, "unk_token": "[UNK]"}'
    path.write_text(f'{{"version": "1.0", "model": {model}}}', "utf-8")
    with pytest.raises(UserError, match=r"the tokenizer cannot encode this text: .*UNK"):
        load_tokenizer(path).encode(["b"])


def test_words_without_end_teach_their_beginning() -> None:
    def pieces() -> Iterator[str]:
        for kind in ("ab" * 60_000, "12" * 60_000, " " * 60_000, "-_" * 60_000):
            yield kind + " the cat sat"

    assert train_bpe(pieces(), 300).vocab_size == 300
