from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrain.data.tokenizer import END_OF_TEXT, bytes_tokenizer, load_tokenizer, train_bpe
from memtrain.errors import UserError

TEXT = ["the cat sat on the mat, the hat\n", "def the_cat(mat):\n    return mat\n"] * 20
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
BYTES = bytes_tokenizer()
BPE = train_bpe(TEXT, 280)


@given(TEXTS)
def test_bytes_are_their_own_ids(text: str) -> None:
    (ids,) = BYTES.encode([text])
    assert bytes(ids.tolist()) == text.encode()
    assert BYTES.decode(ids) == text


@given(TEXTS)
def test_bpe_round_trip_is_exact(text: str) -> None:
    (ids,) = BPE.encode([text])
    assert BPE.decode(ids) == text
    assert BPE.end_of_text_id not in ids


def test_every_byte_has_its_id() -> None:
    assert (BYTES.vocab_size, BYTES.end_of_text_id) == (257, 256)
    every_two_byte_character = "".join(map(chr, range(1, 0x800)))
    (ids,) = BYTES.encode([every_two_byte_character])
    assert bytes(ids.tolist()) == every_two_byte_character.encode()


def test_the_name_of_a_special_token_in_the_text_is_text(tmp_path: Path) -> None:
    BPE.save(tmp_path / "tokenizer.json")
    text = f"a{END_OF_TEXT}b"
    for tokenizer in (BYTES, BPE, load_tokenizer(tmp_path / "tokenizer.json")):
        (ids,) = tokenizer.encode([text])
        assert tokenizer.end_of_text_id not in ids
        assert tokenizer.decode(ids) == text


def test_training_is_deterministic_and_learns_merges() -> None:
    again = train_bpe(iter(TEXT), 280)
    assert again.fingerprint == BPE.fingerprint
    assert BPE.vocab_size == 280
    assert len(BPE.encode([TEXT[0]])[0]) < len(TEXT[0]) // 2
    assert train_bpe(TEXT, 270).fingerprint != BPE.fingerprint


def test_training_reports_the_bytes_read() -> None:
    seen: list[int] = []
    train_bpe(["é\n", "ab\n"], 257, seen.append)
    assert seen == [3, 6]


def test_a_vocabulary_without_room_for_all_bytes_is_refused() -> None:
    with pytest.raises(UserError, match=r"vocab_size is 256: .* at least 257"):
        train_bpe(TEXT, 256)


def test_a_saved_tokenizer_is_the_same(tmp_path: Path) -> None:
    BPE.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.fingerprint == BPE.fingerprint
    assert loaded.end_of_text_id == BPE.end_of_text_id
    assert loaded.vocab_size == 280
    np.testing.assert_array_equal(loaded.encode(TEXT)[1], BPE.encode(TEXT)[1])


def test_a_file_cannot_make_the_tokenizer_cut_pad_or_add(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer = train_bpe(TEXT, 280)
    tokenizer._backend.enable_truncation(3)
    tokenizer._backend.enable_padding(length=50)
    tokenizer.save(path)
    np.testing.assert_array_equal(load_tokenizer(path).encode(TEXT)[0], BPE.encode(TEXT)[0])


def test_ids_left_out_count_for_the_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    vocab = '{"a": 0, "b": 9}'
    added = '{"id": 5, "content": "</s>", "special": true, "single_word": false, "lstrip": false,'
    added += '"rstrip": false, "normalized": false}'
    model = f'{{"type": "WordLevel", "vocab": {vocab}, "unk_token": "a"}}'
    path.write_text(f'{{"version": "1.0", "added_tokens": [{added}], "model": {model}}}', "utf-8")
    assert load_tokenizer(path).vocab_size == 10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"", "not a tokenizer.json"),
        (b"{}", "not a tokenizer.json"),
        (b'{"model": 1}', "not a tokenizer.json"),
        (b"\xff", "not a tokenizer.json"),
    ],
)
def test_what_is_no_tokenizer_is_refused_in_one_line(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=rf"tokenizer\.json: .*{message}") as raised:
        load_tokenizer(path)
    assert "\n" not in str(raised.value)


def test_a_tokenizer_without_end_of_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    BPE.save(path)
    path.write_text(path.read_text(encoding="utf-8").replace(END_OF_TEXT, "<|x|>"), "utf-8")
    with pytest.raises(
        UserError, match=r"no end-of-text token .* name one with tokenizer.end_of_text"
    ):
        load_tokenizer(path)
