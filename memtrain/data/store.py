"""Token ids in memory-mapped files: `<stem>.bin` with the ids, `<stem>.json` with what they are."""

import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from memtrain.data.corpus import (
    check_fraction,
    fingerprint,
    read_pieces,
    total_bytes,
    unchanged,
)
from memtrain.data.tokenizer import END, Tokenizer
from memtrain.data.whole import Source, Window, encode_whole
from memtrain.errors import UserError
from memtrain.units import KIB

Tokens: TypeAlias = npt.NDArray[np.integer[Any]]
"""Token ids, (N,)"""

FORMAT_VERSION = 1
DTYPES: dict[str, np.dtype[Any]] = {
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
    "uint16+role": np.dtype([("id", "<u2"), ("role", "u1")]),
    "uint32+role": np.dtype([("id", "<u4"), ("role", "u1")]),
}
LEARNED, LAST = 1, 2
"""Bits of a token's role: it is learned, it is the last of its document."""

SIDECAR_BYTES = 64 * KIB
STALE_S = 3600.0
"""A file that nobody has written to for so long was left behind by a process that was killed."""

CHUNK_TOKENS = 2**22
KIND = "text 2 "
"""Changes when the same text would become other tokens."""


@dataclass(frozen=True)
class TokenFile:
    """An open token file."""

    path: Path
    tokens: Tokens  # (count,), mapped, read-only
    vocab_size: int
    tokenizer_hash: str
    source_hash: str
    content_hash: str
    """Of the ids and roles as they were written."""
    roles: npt.NDArray[np.uint8] | None = None  # (count,), mapped, read-only
    """Of documents: LEARNED, LAST."""

    @property
    def count(self) -> int:
        return len(self.tokens)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.tokens.dtype

    def check_ids(self, vocab_size: int) -> None:
        """Raises UserError if an id does not fit a model with `vocab_size` embeddings."""
        check_ids(self.tokens, vocab_size, str(self.path))


def write_tokens(
    path_stem: Path,
    token_arrays: Iterable[npt.NDArray[Any]],
    vocab_size: int,
    tokenizer_hash: str,
    source_hash: str,
    with_roles: bool = False,
) -> TokenFile:
    """Write the arrays, one after the other, so that the file appears complete or not at all.

    `with_roles`: the arrays have two fields, `id` and `role`.

    Processes that write the same content under the same stem do not disturb each other. Raises
    UserError for an id outside the vocabulary, or if the disk cannot take the file.
    """
    data_path, sidecar_path = _paths(path_stem)
    # 65,536 ids are 0..65,535, the last that 16 bits hold.
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    dtype += "+role" if with_roles else ""
    count, digest = 0, hashlib.sha256(dtype.encode())
    with replacing(data_path) as file:
        for tokens in token_arrays:
            ids = tokens["id"] if with_roles else tokens
            check_ids(ids, vocab_size, str(data_path), first_position=count)
            content = tokens.astype(DTYPES[dtype]).tobytes()
            digest.update(content)
            file.write(content)
            count += len(tokens)
        file.flush()
        modified_ns = os.fstat(file.fileno()).st_mtime_ns
    sidecar = {
        "version": FORMAT_VERSION,
        "dtype": dtype,
        "count": count,
        "vocab_size": vocab_size,
        "tokenizer_hash": tokenizer_hash,
        "source_hash": source_hash,
        "content_hash": digest.hexdigest(),
        "modified_ns": modified_ns,
    }
    with replacing(sidecar_path) as file:
        file.write(json.dumps(sidecar, indent=1).encode())
    return open_tokens(path_stem)


def open_tokens(path: Path) -> TokenFile:
    """Map a token file, named by its stem, its .bin or its .json.

    Raises UserError if either file is missing, or they do not fit each other. What another program wrote, or somebody
    touched since, is read as a whole for that.
    """
    data_path, sidecar_path = _paths(path.with_suffix("") if path.suffix in _SUFFIXES else path)
    sidecar = _read_sidecar(sidecar_path)
    dtype, count = DTYPES[sidecar["dtype"]], sidecar["count"]
    content, size_bytes = _map(data_path, dtype, count)
    if size_bytes != count * dtype.itemsize:
        what = "cut short" if size_bytes < count * dtype.itemsize else "too long"
        expected = f"{size_bytes} bytes for {count} tokens of {dtype.itemsize}"
        raise UserError(f"{data_path}: {what}: {expected}: delete it and prepare it again")
    known = sidecar.get("content_hash")
    untouched = data_path.stat().st_mtime_ns == sidecar.get("modified_ns")
    found = known if known and untouched else content_hash(sidecar["dtype"], content)
    if known not in (None, found):
        raise UserError(
            f"{data_path}: its content is not what {sidecar_path.name} says: delete it and prepare it again"
        )
    return TokenFile(
        data_path,
        content["id"] if dtype.names else content,
        sidecar["vocab_size"],
        sidecar["tokenizer_hash"],
        sidecar["source_hash"],
        found,
        content["role"] if dtype.names else None,
    )


def content_hash(dtype: str, content: npt.NDArray[Any]) -> str:
    digest = hashlib.sha256(dtype.encode())
    for _, chunk in chunks(content):
        digest.update(chunk.tobytes())
    return digest.hexdigest()


def _map(path: Path, dtype: np.dtype[Any], count: int) -> tuple[npt.NDArray[Any], int]:
    """(content, size in bytes); content that is not as long as it should be is left out."""
    try:
        size_bytes = path.stat().st_size
        # An empty file cannot be mapped.
        fits = count and size_bytes == count * dtype.itemsize
        return np.memmap(path, dtype, "r") if fits else np.empty(0, dtype), size_bytes
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}: prepare it again") from error


def check_ids(tokens: Tokens, vocab_size: int, name: str, first_position: int = 0) -> None:
    """Raises UserError naming the id furthest outside 0..vocab_size - 1, and where it stands."""
    if not len(tokens):
        return
    low, high = _extreme(tokens, np.argmin, min), _extreme(tokens, np.argmax, max)
    for token, position in (high, low):
        if not 0 <= token < vocab_size:
            raise UserError(
                f"{name}: token id {token} at position {first_position + position} is outside the "
                f"vocabulary of {vocab_size}: use the tokenizer and vocab_size it was made with"
            )


def unigram_entropy(tokens: Tokens, vocab_size: int) -> float:
    """Entropy of the token frequencies, in nats: the loss of a model that ignores the context."""
    return entropy((chunk for _, chunk in chunks(tokens)), vocab_size)


def entropy(token_arrays: Iterable[Tokens], vocab_size: int) -> float:
    """As `unigram_entropy`, of tokens that come in pieces."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for tokens in token_arrays:
        counts += np.bincount(tokens, minlength=vocab_size)
    shares = counts[counts > 0] / max(counts.sum(), 1)
    return float((shares * np.log(1 / shares)).sum())


def tokenize_files(
    files: list[Path],
    tokenizer: Tokenizer,
    cache_dir: Path,
    progress: Callable[[int, int], None] | None = None,
) -> TokenFile:
    """The tokens of all files in order, one end-of-text id after each file.

    Kept under `cache_dir` and used again while files and tokenizer stay the same.
    `progress(done_bytes, total_bytes)` is called as text is encoded.
    """
    return cached_tokens(files, _encode(files, tokenizer, progress), tokenizer, cache_dir)


def cached_tokens(
    files: list[Path],
    token_arrays: Iterable[npt.NDArray[Any]],
    tokenizer: Tokenizer,
    cache_dir: Path,
    kind: str = KIND,
    with_roles: bool = False,
) -> TokenFile:
    """What `token_arrays` gives, from the cache where files, tokenizer and kind are those of an earlier run.

    Raises UserError, and keeps nothing, if a file changes while it is read.
    """
    token_arrays = unchanged(files, token_arrays)
    source_hash = fingerprint(files)
    key = f"{kind}{source_hash} {tokenizer.fingerprint}"
    stem = cache_dir / hashlib.sha256(key.encode()).hexdigest()[:32]
    cached = _open_cached(stem, source_hash, tokenizer.fingerprint)
    if cached:
        return cached
    make_folder(cache_dir)
    return write_tokens(
        stem, token_arrays, tokenizer.vocab_size, tokenizer.fingerprint, source_hash, with_roles
    )


def split_tokens(tokens: Tokens, val_fraction: float, row_tokens: int = 0) -> tuple[Tokens, Tokens]:
    """(train, validation) views; validation is the end. Each has `row_tokens` if there are enough for both."""
    check_fraction(val_fraction)
    n_val = round(len(tokens) * val_fraction)
    if val_fraction and len(tokens) >= 2 * row_tokens:
        n_val = min(max(n_val, row_tokens), len(tokens) - row_tokens)
    n_train = len(tokens) - n_val
    return tokens[:n_train], tokens[n_train:]


_SUFFIXES = (".bin", ".json")


def _paths(stem: Path) -> tuple[Path, Path]:
    """(data, sidecar). A stem may have dots in it, which `with_suffix` would take for a suffix."""
    data, sidecar = (stem.with_name(stem.name + suffix) for suffix in _SUFFIXES)
    return data, sidecar


def make_folder(cache_dir: Path) -> None:
    """Make the cache's folder, or take out what killed processes left there."""
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        for path in cache_dir.glob(".*.tmp"):
            if time.time() - path.stat().st_mtime > STALE_S:
                path.unlink(missing_ok=True)
    except FileNotFoundError:
        return  # another process was faster
    except OSError as error:
        raise UserError(
            f"{cache_dir}: cannot be written: {error.strerror}: choose another data.cache_dir"
        ) from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` once it is written in full."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _read_sidecar(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            sidecar: dict[str, Any] = json.loads(file.read(SIDECAR_BYTES))
        fits = sidecar["version"] == FORMAT_VERSION and sidecar["dtype"] in DTYPES
        complete = type(sidecar["count"]) is int and sidecar["count"] >= 0
        complete &= type(sidecar["vocab_size"]) is int and sidecar["vocab_size"] >= 1
        complete &= {"tokenizer_hash", "source_hash"} <= sidecar.keys()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}: prepare it again") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: does not describe a token file: prepare it again") from error
    if not (fits and complete):
        raise UserError(f"{path}: not a token file of version {FORMAT_VERSION}: prepare it again")
    return sidecar


def chunks(tokens: Tokens) -> Iterator[tuple[int, Tokens]]:
    """(position of the first, tokens) of pieces that fit the memory."""
    for start in range(0, len(tokens), CHUNK_TOKENS):
        yield start, tokens[start : start + CHUNK_TOKENS]


def _extreme(
    tokens: Tokens, arg: Callable[[Tokens], np.intp], best: Callable[..., tuple[int, int]]
) -> tuple[int, int]:
    """(id, position) of the smallest or largest id."""
    found = ((start, chunk, int(arg(chunk))) for start, chunk in chunks(tokens))
    return best(((int(chunk[i]), start + i) for start, chunk, i in found), key=lambda pair: pair[0])


def _open_cached(stem: Path, source_hash: str, tokenizer_hash: str) -> TokenFile | None:
    """A damaged file is no reason to stop where the source is at hand."""
    try:
        cached = open_tokens(stem)
    except UserError:
        return None
    same = (cached.source_hash, cached.tokenizer_hash) == (source_hash, tokenizer_hash)
    return cached if same else None


def _encode(
    files: list[Path], tokenizer: Tokenizer, progress: Callable[[int, int], None] | None
) -> Iterator[Tokens]:
    all_bytes = total_bytes(files)
    done_bytes = 0

    def pieces(path: Path) -> Iterator[str]:
        nonlocal done_bytes
        for piece in read_pieces(path):
            done_bytes += len(piece.encode())
            yield piece
        yield END

    def encode(windows: list[Window]) -> list[npt.NDArray[Any]]:
        return [*tokenizer.encode_documents([window.text for window in windows])]

    sources = (Source(str(path), pieces(path)) for path in files)
    for arrays in encode_whole(tokenizer, sources, encode):
        yield from arrays
        if progress:
            progress(done_bytes, all_bytes)
