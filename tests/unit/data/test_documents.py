"""Records to tokens and roles: what is learned, where documents end, and what is refused with file and line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrain.data import documents, store, whole
from memtrain.data.documents import (
    cut,
    parse_record,
    read_documents,
    read_texts,
    tokenize_documents,
)
from memtrain.data.store import LAST, LEARNED, TokenFile
from memtrain.data.tokenizer import bytes_tokenizer, train_bpe
from memtrain.errors import UserError

TOKENIZER = bytes_tokenizer()
CHAT = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "é"},
        {"role": "assistant", "content": "no"},
    ]
}


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def tokenized(path: Path, tokenizer: Any = TOKENIZER) -> TokenFile:
    return tokenize_documents([path], tokenizer, path.parent / "cache")


def shown(file: TokenFile) -> list[str]:
    """Each document with what is learned in capitals, end-of-text as `|` and `!` where it is learned."""
    assert file.roles is not None
    text, found = "", []
    for token, role in zip(file.tokens.tolist(), file.roles.tolist(), strict=True):
        learned = bool(role & LEARNED)
        if token == 256:
            text += "!" if learned else "|"
        else:
            text += chr(token).upper() if learned else chr(token)
        if role & LAST:
            found.append(text)
            text = ""
    assert text == ""
    return found


def test_what_is_learned_of_each_form(tmp_path: Path) -> None:
    records = [
        {"text": "abc", "id": 7},
        {"prompt": "ask: ", "completion": "told"},
        {"prompt": "", "completion": "x"},
        CHAT | {"messages": [m for m in CHAT["messages"] if m["content"] != "é"]},
    ]
    assert shown(tokenized(write(tmp_path / "a.jsonl", *records))) == [
        "aBC!",
        "ask: TOLD!",
        "x!",
        "system\ns|user\n|assistant\nYES!assistant\nNO!",
    ]


def test_a_document_is_encoded_as_a_whole(tmp_path: Path) -> None:
    """A token with a character of the completion is learned, so the first of it is not lost to the prompt's last."""
    bpe = train_bpe(["the cat sat on the mat\n"] * 20, 280)
    file = tokenized(write(tmp_path / "a.jsonl", {"prompt": "the c", "completion": "at sat"}), bpe)
    (ids,) = bpe.encode(["the cat sat"])
    assert file.tokens.tolist() == [*ids.tolist(), bpe.end_of_text_id]
    assert file.dtype == np.dtype("<u2")
    assert file.roles is not None
    before = len(bpe.decode(ids[:1]))
    assert bpe.decode(ids) == "the cat sat" and bpe.decode(ids[1:2]) == " cat" and before == 3
    assert (file.roles & LEARNED).tolist() == [0] + [1] * len(ids)


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
FILLED = TEXT.filter(bool)
RECORDS = st.one_of(
    st.fixed_dictionaries({"text": FILLED}),
    st.fixed_dictionaries({"prompt": TEXT, "completion": FILLED}),
)


@given(
    st.lists(RECORDS, min_size=1, max_size=8),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 30),
)
def test_no_token_is_lost_however_text_is_cut(
    tmp_path_factory: pytest.TempPathFactory, records: list[Any], window: int, seam: int, batch: int
) -> None:
    folder = tmp_path_factory.mktemp("records")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole, "WINDOW", window)
        patch.setattr(whole, "SEAM", seam)
        patch.setattr(whole, "BATCH", batch)
        file = tokenized(write(folder / "a.jsonl", *records))
    texts = [r.get("prompt", "") + r.get("completion", r.get("text", "")) for r in records]
    assert file.tokens.tolist() == [i for text in texts for i in [*text.encode(), 256]]
    assert file.roles is not None
    ends = np.flatnonzero(file.roles & LAST) + 1
    assert ends.tolist() == np.cumsum([len(text.encode()) + 1 for text in texts]).tolist()
    n_learned = [
        len(r["completion"].encode()) + bool(r["prompt"])
        if "prompt" in r
        else len(r["text"].encode())
        for r in records
    ]
    assert int((file.roles & LEARNED).sum()) == sum(n_learned)


@given(st.text(st.sampled_from("ab\n"), max_size=40), st.integers(1, 12))
def test_pieces_add_up_and_are_cut_at_line_ends(text: str, size: int) -> None:
    pieces = list(cut(text, size))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= size for piece in pieces)
    assert all(p.endswith("\n") for p in pieces[:-1] if "\n" in p)


def test_texts_for_the_tokenizer_have_no_markup(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", CHAT, {"prompt": "p", "completion": "c"})
    assert "".join(read_texts(path)) == ("system\nsuser\nassistant\nyesuser\néassistant\nnopc")


def test_a_mark_and_blank_lines_are_no_records(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b"}')
    assert [document for document, _ in read_documents(path)] == [
        [("a", True), (None, True)],
        [("b", True), (None, True)],
    ]


BAD_RECORDS = {
    b'{"text": "a"': "not JSON: Expecting ',' delimiter at column",
    b"{'text': 1}": "not JSON: Expecting property name",
    b'{"text": "a"} {"text": "b"}': "not JSON: Extra data at column 15",
    b'"text"': "not a record but text: write an object",
    b"[1]": "not a record but a list",
    b"null": "not a record but missing or null",
    b"{}": "has no field: a record has text, or prompt and completion, or messages",
    b'{"prompt": "a"}': "has 'prompt': a record has",
    b'{"text": "a", "messages": []}': "has 'text', 'messages': .* only one of these",
    b'{"text": 7}': "text is a number: text is needed",
    b'{"text": ""}': "text is empty: there is nothing to learn",
    b'{"prompt": null, "completion": "b"}': "prompt is missing or null",
    b'{"prompt": "a", "completion": ""}': "completion is empty: there is nothing to learn",
    b'{"messages": {}}': "messages is not a list of objects",
    b'{"messages": ["hello"]}': "messages is not a list of objects",
    b'{"messages": []}': "nothing to learn: no message of the assistant",
    b'{"messages": [{"role": "user", "content": "a"}]}': "nothing to learn: no message of the",
    b'{"messages": [{"role": "bot", "content": "a"}]}': "message 1: role 'bot': use one of system,",
    b'{"messages": [{"role": "assistant"}]}': "message 1: content is missing or null",
    b'{"messages": [{"role": "assistant", "content": ""}]}': "message 1: content is empty",
    b'{"text": "a\xff"}': r"byte 0xff at byte 11 of the line is not UTF-8",
    b'{"text": "a\x00"}': "NUL byte at byte 11 of the line",
    b'{"text": "a\\u0000"}': "NUL character in text",
    b'{"text": "a\\ud800"}': "half a surrogate pair at character 1 of text",
    b"[" * 100_000: "not JSON that can be read",
    b'{"text": ' + b"1" * 5000 + b"}": "not JSON that can be read|text is a number",
}


@pytest.mark.parametrize("line", BAD_RECORDS, ids=lambda line: line[:40].decode("latin-1"))
def test_a_bad_record_is_named_with_file_and_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    with pytest.raises(UserError, match=rf"bad\.jsonl: line 3: .*({BAD_RECORDS[line]})") as raised:
        tokenized(path)
    assert len(str(raised.value).splitlines()) == 1
    assert len(str(raised.value)) < 400 + len(str(path))
    assert not list((tmp_path / "cache").iterdir())


@given(st.binary(max_size=60))
def test_any_line_is_a_document_or_refused(line: bytes) -> None:
    try:
        document = parse_record(line, "here")
    except UserError as error:
        assert str(error).startswith("here: ")
    else:
        assert document[-1] == (None, True)


def test_a_file_without_a_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"\n \n")
    with pytest.raises(UserError, match=r"empty\.jsonl: no record in it"):
        tokenized(tmp_path / "empty.jsonl")


def test_a_line_without_end_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "RECORD_BYTES", 100)
    path = write(tmp_path / "long.jsonl", {"text": "short"}, {"text": "x" * 1000})
    with pytest.raises(UserError, match=r"long\.jsonl: line 2: longer than"):
        tokenized(path)


def test_the_cache_keeps_documents_and_text_apart(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "abc"})
    as_text = store.tokenize_files([path], TOKENIZER, tmp_path / "cache")
    first, second = tokenized(path), tokenized(path)
    assert as_text.path != first.path == second.path
    assert as_text.roles is None
    assert shown(first) == shown(second) == ["aBC!"]


def test_progress_counts_the_bytes_of_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "BATCH", 4)
    path = write(tmp_path / "a.jsonl", *[{"text": "abcd"}] * 5)
    seen: list[tuple[int, int]] = []
    tokenize_documents([path], TOKENIZER, tmp_path, lambda *done: seen.append(done))
    size_bytes = path.stat().st_size
    assert seen[-1] == (size_bytes, size_bytes) and len(seen) > 3
