"""A document in windows gives the tokens of the document encoded at once, whatever kind the tokenizer is of."""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from memtrain.config import Config
from memtrain.data import whole
from memtrain.data.documents import tokenize_documents
from memtrain.data.store import LEARNED, TokenFile, tokenize_files
from memtrain.data.tokenizer import Tokenizer, load_tokenizer
from memtrain.engine.build import build_data, prompt_ids
from memtrain.errors import UserError

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
ALPHABET = pre_tokenizers.ByteLevel.alphabet()


def generated_text(n: int, seed: int = 0) -> str:
    """Words, digits, blank lines, runs and accents."""
    draw = random.Random(seed)
    parts = []
    while sum(map(len, parts)) < n:
        word = "".join(draw.choices("etaoinshr", k=draw.randint(1, 9)))
        special = [
            "\n",
            "\n\n",
            "   ",
            "\n    ",
            "\t",
            ", ",
            "é",
            "漢字",
            "12345678",
            "'s",
            "e\u0301",
            "=" * 40,
        ]
        parts += [word, draw.choice([" ", " ", " ", *special])]
    return "".join(parts)[:n]


TEXT = generated_text(6_000)


def byte_level(pre: Any, normalizer: Any = None, **model: Any) -> tokenizers.Tokenizer:
    found = tokenizers.Tokenizer(models.BPE(**model))
    found.pre_tokenizer, found.decoder = pre, decoders.ByteLevel()
    if normalizer:
        found.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=ALPHABET, special_tokens=["</s>"], show_progress=False
    )
    found.train_from_iterator([TEXT], trainer)
    return found


def sentencepiece_bpe(legacy: bool, split: bool = False) -> tokenizers.Tokenizer:
    """As Llama-2's: legacy puts a space before every section, the new form before the first."""
    found = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", "</s>", *BYTES], show_progress=False
    )
    found.train_from_iterator([TEXT.replace("漢", "")], trainer)
    if legacy:
        spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        found.normalizer, found.pre_tokenizer = normalizers.Sequence(spaces), None
    else:
        found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=split)
    return found


def unigram() -> tokenizers.Tokenizer:
    found = tokenizers.Tokenizer(models.Unigram())
    found.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    found.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    found.train_from_iterator(TEXT.replace("漢", "").splitlines(), trainer)
    return found


def wordpiece() -> tokenizers.Tokenizer:
    found = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    found.normalizer = normalizers.BertNormalizer()
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "</s>"], show_progress=False
    )
    found.train_from_iterator([TEXT.replace("漢", "")], trainer)
    return found


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "gpt2": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gpt2 with a space before": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "llama3": lambda: byte_level(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(LLAMA_3), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        ignore_merges=True,
    ),
    "qwen2": lambda: byte_level(
        pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.NFC()
    ),
    "llama2 legacy": lambda: sentencepiece_bpe(legacy=True),
    "llama2": lambda: sentencepiece_bpe(legacy=False),
    "metaspace that splits": lambda: sentencepiece_bpe(legacy=False, split=True),
    "t5": unigram,
    "bert": wordpiece,
}


@cache
def made(kind: str) -> str:
    text: str = KINDS[kind]().to_str()
    return text


def reference(kind: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(made(kind))


def tokenizer(kind: str, folder: Path) -> Any:
    (folder / "tokenizer.json").write_text(made(kind), encoding="utf-8")
    return load_tokenizer(folder / "tokenizer.json", "</s>")


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Windows of 500 characters with seams of 120; how many characters each text has that is encoded."""
    sizes: list[int] = []
    encode = Tokenizer.encode_documents

    def counted(self: Tokenizer, texts: list[str]) -> list[Any]:
        sizes.extend(map(len, texts))
        return encode(self, texts)

    monkeypatch.setattr(Tokenizer, "encode_documents", counted)
    monkeypatch.setattr(whole, "WINDOW", 500)
    monkeypatch.setattr(whole, "SEAM", 120)
    monkeypatch.setattr(whole, "BATCH", 2_000)
    yield sizes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        generated_text(5_000, seed=1),
        "a" * 3_000,
        " " * 1_333 + "x" + "\n" * 2_000 + "y",
        "1234567" * 500,
        "漢字" * 900 + "</s> </s>",
        "",
    ],
    ids=["words", "more words", "one word", "blanks", "digits", "unknown", "nothing"],
)
def test_windows_change_no_token(
    tmp_path: Path, small_windows: list[int], kind: str, text: str
) -> None:
    backend = reference(kind)
    backend.encode_special_tokens = True  # the name of a special token is text
    expected = [*backend.encode(text, add_special_tokens=False).ids, backend.token_to_id("</s>")]
    (tmp_path / "a.txt").write_bytes(text.encode())
    found = tokenize_files([tmp_path / "a.txt"], tokenizer(kind, tmp_path), tmp_path / "cache")
    assert found.tokens.tolist() == expected
    # Where there are words, two windows at most are encoded as one.
    assert max(small_windows) <= (2 * 500 + 120 if len(text.split()) > 100 else len(text) + 1)


def tokenized(folder: Path, kind: str, record: dict[str, Any]) -> TokenFile:
    (folder / "a.jsonl").write_text(json.dumps(record), encoding="utf-8")
    return tokenize_documents([folder / "a.jsonl"], tokenizer(kind, folder), folder / "cache")


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("size", [10, 1_500])
@pytest.mark.parametrize("kind", KINDS)
def test_a_chat_is_the_text_with_end_of_text_in_it(tmp_path: Path, kind: str, size: int) -> None:
    """No space of its own for each role and content; learned is each token with a character of the assistant's."""
    messages = [
        {"role": role, "content": generated_text(size, seed).strip()}
        for seed, role in enumerate(["system", "user", "assistant", "user", "assistant"])
    ]
    file = tokenized(tmp_path, kind, {"messages": messages})
    joined = "".join(f"{m['role']}\n{m['content']}</s>" for m in messages)
    encoding = reference(kind).encode(joined, add_special_tokens=False)
    assert file.tokens.tolist() == encoding.ids
    spans, start = [], 0
    for m in messages:
        content = start + len(m["role"]) + 1
        start = content + len(m["content"]) + len("</s>")
        spans += [(content, start)] * (m["role"] == "assistant")
    expected = [any(e > a and s < b for a, b in spans) for s, e in encoding.offsets]
    assert file.roles is not None
    assert ((file.roles & LEARNED) > 0).tolist() == expected


def test_a_completion_has_no_space_of_its_own(tmp_path: Path) -> None:
    file = tokenized(tmp_path, "llama2", {"prompt": "the ", "completion": "rest"})
    ids = reference("llama2").encode("the rest", add_special_tokens=False).ids
    assert file.tokens[:-1].tolist() == ids
    assert file.roles is not None and file.roles[0] & LEARNED == 0 and file.roles[-1] & LEARNED


# --- what a tokenizer would drop ----------------------------------------------------------------------------------


LOSSY = "alpha 漢字 beta é"


def characters(pre: Any = None, **model: Any) -> tokenizers.Tokenizer:
    found = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(" abehlpt")}, [], **model))
    found.add_special_tokens(["</s>"])
    if pre:
        found.pre_tokenizer = pre
    return found


@pytest.mark.parametrize(
    ("backend", "lost"),
    [
        (characters(), 3),
        (characters(byte_fallback=True), 3),
        (characters(pre_tokenizers.WhitespaceSplit()), 3),
        (characters(unk_token=""), 3),
    ],
    ids=["plain", "no bytes to fall back to", "blanks dropped on purpose", "empty name"],
)
def test_a_character_that_would_be_dropped_is_refused(
    tmp_path: Path, backend: tokenizers.Tokenizer, lost: int
) -> None:
    backend.save(str(tmp_path / "t.json"))
    loaded = load_tokenizer(tmp_path / "t.json")
    (tmp_path / "a.txt").write_text(LOSSY, encoding="utf-8")
    (tmp_path / "a.jsonl").write_text(
        '{"text": "a"}\n' + json.dumps({"prompt": "alpha 漢字", "completion": " beta é"}), "utf-8"
    )
    message = (
        rf"no token for '漢' \(U\+6F22\): it would drop {lost} of these 15 characters \(20.00%\)"
    )
    with pytest.raises(UserError, match=r"a\.txt: the tokenizer has " + message):
        tokenize_files([tmp_path / "a.txt"], loaded, tmp_path / "cache")
    with pytest.raises(UserError, match=r"a\.jsonl: line 2: the tokenizer has " + message):
        tokenize_documents([tmp_path / "a.jsonl"], loaded, tmp_path / "cache")
    with pytest.raises(UserError, match=message):
        loaded.encode([LOSSY])
    assert len(loaded.encode(["alpha beta"])[0]) >= 9
    assert loaded.to_json() == backend.to_str(pretty=True)


def test_a_prompt_that_would_lose_characters_is_refused_before_training(
    tiny: Callable[..., Config], tmp_path: Path
) -> None:
    characters().save(str(tmp_path / "t.json"))
    (tmp_path / "a.txt").write_text("alpha beta " * 9, encoding="utf-8")
    config = tiny(
        "data=text", "data.path=a.txt", "tokenizer=file", "tokenizer.path=t.json",
        "model.vocab_size=null", "generate.tokens=1", "generate.prompt='alpha é'",
    )  # fmt: skip
    with pytest.raises(UserError, match=r"generate\.prompt='alpha é': .* no token for 'é'"):
        build_data(config, tmp_path, lambda *_: nullcontext(lambda *_: None))
    with pytest.raises(UserError, match=r"generate\.prompt='alpha é': .* no token for 'é'"):
        prompt_ids(config, load_tokenizer(tmp_path / "t.json"))


def test_what_is_taken_out_on_purpose_is_no_loss(tmp_path: Path) -> None:
    backend = characters(pre_tokenizers.WhitespaceSplit())
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFD(), normalizers.StripAccents(), normalizers.Replace("漢", "")]
    )
    backend.save(str(tmp_path / "t.json"))
    (ids,) = load_tokenizer(tmp_path / "t.json").encode(["  alphá 漢 été\t"])
    assert len(ids) == len("alpha" + "ete")


@pytest.mark.parametrize(
    "model",
    [
        models.WordLevel({"a": 0}, unk_token="<unk>"),
        models.WordPiece({"a": 0}, unk_token="<unk>"),
        models.Unigram([("a", 0.0)]),
    ],
)
def test_other_models_without_an_unknown_token_are_refused(tmp_path: Path, model: Any) -> None:
    backend = tokenizers.Tokenizer(model)
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "t.json"))
    (tmp_path / "a.txt").write_text("漢", encoding="utf-8")
    with pytest.raises(UserError, match=r"a\.txt: the tokenizer cannot encode this text: "):
        tokenize_files([tmp_path / "a.txt"], load_tokenizer(tmp_path / "t.json"), tmp_path)


def test_ids_that_were_left_out_do_not_mix_with_our_own(tmp_path: Path) -> None:
    """The library would give a new token the id of `b`."""
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 3}, []))
    backend.add_tokens([AddedToken("</s>", special=True)])
    backend.save(str(tmp_path / "t.json"))
    (ids,) = load_tokenizer(tmp_path / "t.json").encode(["abba"])
    assert ids.tolist() == [0, 3, 3, 0]
