"""Files to the token ids of both splits: corpus, tokenizer, store and packing, joined from plain arguments."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np

from memtrain.data import corpus, documents, store
from memtrain.data.loader import (
    Batch,
    Batching,
    Loader,
    RandomTokens,
    Windows,
    count_samples,
    eval_batches,
)
from memtrain.data.packing import Packed, PackedLoader, pack_split, packed_batches
from memtrain.data.store import Tokens
from memtrain.data.tokenizer import (
    TRAIN_BYTES,
    Tokenizer,
    bytes_tokenizer,
    load_tokenizer,
    train_bpe,
)
from memtrain.errors import UserError

ProgressFor = Callable[[str, int], AbstractContextManager[Callable[[int, int], None]]]
"""Title and bytes of something that takes long -> context that gives a callback(done, total)."""

RANDOM_SAMPLES = 2**20
"""Samples of an epoch of random tokens; there is no text that would say."""


@dataclass(frozen=True)
class Rows:
    """How tokens become samples, and how many of them are held out."""

    seq_len: int
    val_fraction: float


@dataclass(frozen=True)
class Cache:
    """Where token files and trained tokenizers are kept, and who is told while they are made."""

    folder: Path
    progress: ProgressFor


@dataclass(frozen=True)
class Vocabulary:
    """`bytes`, a `bpe` of `size` trained on the corpus, or the tokenizer.json at `path`."""

    kind: Literal["bytes", "bpe", "file"]
    size: int
    path: Path | None
    end_of_text: str | None


@dataclass
class Data:
    """Token ids of both splits; `train` is None for random tokens, which are made as they are needed."""

    train: Tokens | Packed | None
    val: Tokens | Packed | None
    """None where nothing is held out, or there is but one document."""
    vocab_size: int
    tokenizer: Tokenizer | None
    seq_len: int
    content: str = ""
    """A hash of the ids of both splits and of what they stand for."""
    name: str = "the training text"

    def windows(self, batching: Batching) -> Windows:
        if self.train is None:
            return RandomTokens(self.vocab_size, self.seq_len, RANDOM_SAMPLES, batching)
        if isinstance(self.train, Packed):
            return PackedLoader(self.train, batching, self.content)
        return Loader(self.train, self.seq_len, batching, self.name, self.content)

    def validation_batches(self, micro_batch: int, most: int) -> Iterator[Batch]:
        """The first `most` held-out samples in order."""
        assert self.val is not None
        if isinstance(self.val, Packed):
            return packed_batches(self.val, micro_batch, most)
        return eval_batches(self.val, self.seq_len, micro_batch, most)


def random_data(vocab_size: int, n_val: int, seq_len: int, seed: int) -> Data:
    """`n_val` fixed samples are held out."""
    generator = np.random.default_rng(seed)
    ids = generator.integers(vocab_size, size=n_val * seq_len + 1, dtype=np.uint32)
    return Data(None, ids, vocab_size, None, seq_len)


def open_token_file(path: Path, rows: Rows, model_vocab_size: int | None) -> Data:
    file = store.open_tokens(path)
    file.check_ids(model_vocab_size or file.vocab_size)
    train, val = store.split_tokens(file.tokens, rows.val_fraction, rows.seq_len + 1)
    return Data(train, val, file.vocab_size, None, rows.seq_len, content_of(file))


def tokenize_text(files: list[Path], vocabulary: Vocabulary, rows: Rows, cache: Cache) -> Data:
    """Whole files are held out, where that leaves each side a sample; else the end of all tokens."""
    train_files, val_files = corpus.split(files, rows.val_fraction)
    tokenizer = make_tokenizer(vocabulary, train_files, cache)
    train = _tokenize("tokenizing the text", train_files, tokenizer, cache)
    row_tokens = rows.seq_len + 1
    if val_files:
        val = _tokenize("tokenizing the held-out text", val_files, tokenizer, cache)
        if min(train.count, val.count) >= row_tokens or train.count + val.count < 2 * row_tokens:
            splits, content = (train.tokens, val.tokens), content_of(train, val)
            return Data(*splits, tokenizer.vocab_size, tokenizer, rows.seq_len, content)
        train = _tokenize("tokenizing the text", files, tokenizer, cache)
    splits = store.split_tokens(train.tokens, rows.val_fraction, row_tokens)
    return Data(*splits, tokenizer.vocab_size, tokenizer, rows.seq_len, content_of(train))


def tokenize_documents(
    files: list[Path], vocabulary: Vocabulary, rows: Rows, cache: Cache, keep_apart: bool
) -> Data:
    tokenizer = make_tokenizer(vocabulary, files, cache, documents.read_texts)
    with cache.progress("tokenizing the documents", corpus.total_bytes(files)) as callback:
        file = documents.tokenize_documents(files, tokenizer, cache.folder, callback)
    splits = pack_split(file, rows.val_fraction, rows.seq_len, keep_apart)
    return Data(*splits, tokenizer.vocab_size, tokenizer, rows.seq_len, content_of(file))


def check_lengths(data: Data, rows: Rows) -> None:
    """Raises UserError for a split without a sample, or without a token to learn."""
    if isinstance(data.train, Packed) and not data.train.n_targets:
        raise UserError(f"{data.name}: {data.train.n_documents} documents and no token to learn")
    if isinstance(data.train, np.ndarray):
        count_samples(data.train, rows.seq_len, data.name)
    if isinstance(data.val, np.ndarray):
        what = f"the validation text (data.val_fraction={rows.val_fraction:g}; 0 does without)"
        count_samples(data.val, rows.seq_len, what)


def known_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """One that needs no corpus."""
    if vocabulary.kind == "bytes":
        return bytes_tokenizer()
    assert vocabulary.path
    return load_tokenizer(vocabulary.path, vocabulary.end_of_text)


def make_tokenizer(
    vocabulary: Vocabulary,
    files: list[Path],
    cache: Cache,
    read: Callable[[Path], Iterator[str]] = corpus.read_pieces,
) -> Tokenizer:
    """A trained BPE is kept in the cache under its corpus, how that is read, and size."""
    if vocabulary.kind != "bpe":
        return known_tokenizer(vocabulary)
    kind = "bpe" if read is corpus.read_pieces else "bpe-jsonl"
    path = cache.folder / f"{kind}-{vocabulary.size}-{corpus.fingerprint(files)[:16]}.json"
    if not _is_loadable(path):
        store.make_folder(cache.folder)
        total = corpus.total_bytes(files)
        with cache.progress("training the tokenizer", total) as callback:
            pieces = corpus.unchanged(files, (piece for file in files for piece in read(file)))
            every = -(-total // TRAIN_BYTES) or 1
            trained = train_bpe(
                islice(pieces, 0, None, every),
                vocabulary.size,
                lambda done: callback(min(done * every, total), total),
            )
        with store.replacing(path) as output:
            output.write(trained.to_json().encode())
    return load_tokenizer(path)


def content_of(*files: store.TokenFile) -> str:
    return " ".join(f"{file.content_hash}/{file.tokenizer_hash}" for file in files)


def _is_loadable(path: Path) -> bool:
    """A cached tokenizer that is damaged is trained again."""
    try:
        load_tokenizer(path)
    except UserError:
        return False
    return True


def _tokenize(title: str, files: list[Path], tokenizer: Tokenizer, cache: Cache) -> store.TokenFile:
    with cache.progress(title, corpus.total_bytes(files)) as callback:
        return store.tokenize_files(files, tokenizer, cache.folder, callback)
