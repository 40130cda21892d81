"""Token ids in memory-mapped files: `<stem>.bin` with the ids, `<stem>.json` with what they are."""

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from memtrain.data.corpus import check_fraction, fingerprint, read_pieces
from memtrain.data.tokenizer import Tokenizer
from memtrain.errors import UserError
from memtrain.units import KIB, MIB

Tokens: TypeAlias = npt.NDArray[np.integer[Any]]
"""Token ids, (N,)"""

FORMAT_VERSION = 1
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
CHUNK_TOKENS = 2**22
# The library keeps about 100 bytes per token while it encodes: these two bound its memory.
PIECE_BYTES = 128 * KIB
BATCH_BYTES = 2 * MIB


@dataclass(frozen=True)
class TokenFile:
    """An open token file."""

    path: Path
    tokens: Tokens  # (count,), mapped, read-only
    vocab_size: int
    tokenizer_hash: str
    source_hash: str

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
    token_arrays: Iterable[Tokens],
    vocab_size: int,
    tokenizer_hash: str,
    source_hash: str,
) -> TokenFile:
    """Write the arrays, one after the other, so that the file appears complete or not at all.

    Processes that write the same content under the same stem do not disturb each other. Raises
    UserError for an id outside the vocabulary, or if the disk cannot take the file.
    """
    data_path, sidecar_path = _paths(path_stem)
    # 65,536 ids are 0..65,535, the last that 16 bits hold.
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    count = 0
    with _replacing(data_path) as file:
        for tokens in token_arrays:
            check_ids(tokens, vocab_size, str(data_path), first_position=count)
            file.write(tokens.astype(DTYPES[dtype]).tobytes())
            count += len(tokens)
    sidecar = {
        "version": FORMAT_VERSION,
        "dtype": dtype,
        "count": count,
        "vocab_size": vocab_size,
        "tokenizer_hash": tokenizer_hash,
        "source_hash": source_hash,
    }
    with _replacing(sidecar_path) as file:
        file.write(json.dumps(sidecar, indent=1).encode())
    return open_tokens(path_stem)


def open_tokens(path: Path) -> TokenFile:
    """Map a token file, named by its stem, its .bin or its .json.

    Raises UserError if either file is missing, or they do not fit each other.
    """
    data_path, sidecar_path = _paths(path.with_suffix("") if path.suffix in _SUFFIXES else path)
    sidecar = _read_sidecar(sidecar_path)
    dtype, count = DTYPES[sidecar["dtype"]], sidecar["count"]
    try:
        size_bytes = data_path.stat().st_size
    except OSError as error:
        raise UserError(
            f"{data_path}: cannot be read: {error.strerror}: prepare it again"
        ) from error
    if size_bytes != count * dtype.itemsize:
        what = "cut short" if size_bytes < count * dtype.itemsize else "too long"
        expected = f"{size_bytes} bytes for {count} tokens of {dtype.itemsize}"
        raise UserError(f"{data_path}: {what}: {expected}: delete it and prepare it again")
    # An empty file cannot be mapped.
    tokens = np.memmap(data_path, dtype, "r") if count else np.empty(0, dtype)
    return TokenFile(
        data_path, tokens, sidecar["vocab_size"], sidecar["tokenizer_hash"], sidecar["source_hash"]
    )


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
    counts = np.zeros(vocab_size, dtype=np.int64)
    for _, chunk in _chunks(tokens):
        counts += np.bincount(chunk, minlength=vocab_size)
    shares = counts[counts > 0] / max(len(tokens), 1)
    return float(-(shares * np.log(shares)).sum())


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
    source_hash = fingerprint(files)
    key = hashlib.sha256(f"{source_hash} {tokenizer.fingerprint}".encode()).hexdigest()[:32]
    stem = cache_dir / key
    cached = _open_cached(stem, source_hash, tokenizer.fingerprint)
    if cached:
        return cached
    cache_dir.mkdir(parents=True, exist_ok=True)
    arrays = _encode(files, tokenizer, progress)
    return write_tokens(stem, arrays, tokenizer.vocab_size, tokenizer.fingerprint, source_hash)


def split_tokens(tokens: Tokens, val_fraction: float) -> tuple[Tokens, Tokens]:
    """(train, validation) views; validation is the end."""
    check_fraction(val_fraction)
    n_train = len(tokens) - round(len(tokens) * val_fraction)
    return tokens[:n_train], tokens[n_train:]


_SUFFIXES = (".bin", ".json")


def _paths(stem: Path) -> tuple[Path, Path]:
    """(data, sidecar). A stem may have dots in it, which `with_suffix` would take for a suffix."""
    data, sidecar = (stem.with_name(stem.name + suffix) for suffix in _SUFFIXES)
    return data, sidecar


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
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
        sidecar: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        fits = sidecar["version"] == FORMAT_VERSION and sidecar["dtype"] in DTYPES
        complete = isinstance(sidecar["count"], int) and isinstance(sidecar["vocab_size"], int)
        complete &= {"tokenizer_hash", "source_hash"} <= sidecar.keys()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}: prepare it again") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: does not describe a token file: prepare it again") from error
    if not (fits and complete):
        raise UserError(f"{path}: not a token file of version {FORMAT_VERSION}: prepare it again")
    return sidecar


def _chunks(tokens: Tokens) -> Iterator[tuple[int, Tokens]]:
    for start in range(0, len(tokens), CHUNK_TOKENS):
        yield start, tokens[start : start + CHUNK_TOKENS]


def _extreme(
    tokens: Tokens, arg: Callable[[Tokens], np.intp], best: Callable[..., tuple[int, int]]
) -> tuple[int, int]:
    """(id, position) of the smallest or largest id."""
    found = ((start, chunk, int(arg(chunk))) for start, chunk in _chunks(tokens))
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
    total_bytes = sum(path.stat().st_size for path in files)
    end_of_text = np.array([tokenizer.end_of_text_id], dtype=np.uint32)
    done_bytes = 0
    for batch, size_bytes in _batches(files):
        encoded = iter(tokenizer.encode([piece for piece in batch if piece is not None]))
        yield from (end_of_text if piece is None else next(encoded) for piece in batch)
        done_bytes += size_bytes
        if progress:
            progress(done_bytes, total_bytes)


def _batches(files: list[Path]) -> Iterator[tuple[list[str | None], int]]:
    """(pieces of text, their bytes); None stands for the end of a document."""
    batch: list[str | None] = []
    size_bytes = 0
    for path in files:
        for piece in read_pieces(path, PIECE_BYTES):
            batch.append(piece)
            size_bytes += len(piece.encode())
            if size_bytes >= BATCH_BYTES:
                yield batch, size_bytes
                batch, size_bytes = [], 0
        batch.append(None)
    yield batch, size_bytes
