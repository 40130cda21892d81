"""Text to token ids and back."""

import atexit
import hashlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from memtrain.errors import EXIT_INTERRUPTED, UserError
from memtrain.run_folder import write_text
from memtrain.units import MIB

END_OF_TEXT = "<|endoftext|>"
# What GPT-2, Llama, Llama 3, Gemma and chat models call the token that ends a document.
END_OF_TEXT_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")
N_BYTES = 256
TRAIN_BYTES = 256 * MIB
"""A tokenizer is trained on about as much, in pieces taken evenly: the trainer keeps every distinct word."""
WORD_CHARACTERS = 1000
"""Of a longer run of letters, digits, blanks or signs the tokenizer learns the beginning: the trainer's time grows with
the square of the longest word."""
_RUNS = re.compile(r"[^\W\d_]+|\d+|\s+|(?:[^\w\s]|_)+")


class Tokenizer:
    """A `tokenizers.Tokenizer` that adds, cuts and pads nothing.

    A special token's name met in the text is text, so the end-of-text id only ends documents.
    """

    def __init__(self, backend: tokenizers.Tokenizer, end_of_text_id: int) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend = backend
        self._encode_batch = getattr(backend, "encode_batch_fast", backend.encode_batch)
        self.end_of_text_id = end_of_text_id
        # Not the number of tokens: a tokenizer file may leave ids out.
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.fingerprint: str = hashlib.sha256(backend.to_str().encode()).hexdigest()

    def encode(self, texts: list[str]) -> list[npt.NDArray[np.uint32]]:
        """One array of ids per text, nothing added. Raises UserError for text it has no tokens for."""
        try:
            encodings = self._encode_batch(texts, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            reason = " ".join(str(error).split())
            raise UserError(f"the tokenizer cannot encode this text: {reason}") from error
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens left out."""
        text: str = self._backend.decode([int(i) for i in ids], skip_special_tokens=True)
        return text

    def to_json(self) -> str:
        """The content of a tokenizer.json that `load_tokenizer` and transformers read."""
        text: str = self._backend.to_str(pretty=True)
        return text

    def save(self, path: Path) -> None:
        write_text(path, self.to_json())


def bytes_tokenizer() -> Tokenizer:
    """257 ids: the byte's own value, and 256 for end-of-text. Needs no training."""
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    backend = _byte_level(models.BPE(vocab=vocab, merges=[]))
    backend.add_special_tokens([END_OF_TEXT])
    return Tokenizer(backend, end_of_text_id=N_BYTES)


def train_bpe(
    pieces: Iterable[str], vocab_size: int, progress: Callable[[int], None] | None = None
) -> Tokenizer:
    """Byte-level BPE as in GPT-2, deterministic. `progress(done_bytes)` is called as text is read.

    The vocabulary comes out smaller where the text has no more pairs to merge. Raises UserError if
    `vocab_size` cannot hold all bytes and the end-of-text token.
    """
    if vocab_size < N_BYTES + 1:
        raise UserError(f"vocab_size is {vocab_size}: byte-level BPE needs at least {N_BYTES + 1}")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=_byte_characters(),
        show_progress=False,
    )
    backend = _byte_level(models.BPE())
    _interruptibly(lambda: backend.train_from_iterator(_counted(pieces, progress), trainer))
    end_of_text_id = backend.token_to_id(END_OF_TEXT)
    assert end_of_text_id is not None
    return Tokenizer(backend, end_of_text_id)


def load_tokenizer(path: Path, end_of_text: str | None = None) -> Tokenizer:
    """Read any tokenizer.json. Raises UserError if it is missing, damaged or has no end-of-text.

    `end_of_text` names that token where it is not one of END_OF_TEXT_NAMES.
    """
    try:
        backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"{path}: tokenizer cannot be read: {error.strerror}") from error
    except Exception as error:  # the library raises bare Exception
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: not a tokenizer.json: {reason}") from error
    names = (end_of_text,) if end_of_text else END_OF_TEXT_NAMES
    ids = map(backend.token_to_id, names)
    end_of_text_id = next((i for i in ids if i is not None), None)
    if end_of_text_id is None:
        raise UserError(
            f"{path}: no end-of-text token {' or '.join(names)}: name one with tokenizer.end_of_text"
        )
    return Tokenizer(backend, end_of_text_id)


def _byte_level(model: models.Model) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte (GPT-2, `bytes_to_unicode`)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)}
    printable |= set(range(ord("®"), ord("ÿ") + 1))
    others = iter(range(N_BYTES, 2 * N_BYTES))
    return [chr(byte if byte in printable else next(others)) for byte in range(N_BYTES)]


def _interruptibly(work: Callable[[], None]) -> None:
    """Do it in a thread: in the main one, what does not come back to Python for long would hold up Ctrl-C."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="tokenizer", daemon=True)
    thread.start()
    try:
        thread.join()
    except (KeyboardInterrupt, SystemExit) as stop:
        # The thread goes on; an interpreter that takes itself down around it would abort.
        atexit.register(_end_process, getattr(stop, "code", EXIT_INTERRUPTED))
        raise
    if errors:
        raise errors[0]


def _end_process(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _counted(pieces: Iterable[str], progress: Callable[[int], None] | None) -> Iterator[str]:
    done_bytes = 0
    for piece in pieces:
        yield _shortened(piece)
        done_bytes += len(piece.encode())
        if progress:
            progress(done_bytes)


def _shortened(piece: str) -> str:
    """Without what a run has beyond WORD_CHARACTERS."""
    runs = _RUNS.findall(piece)
    if max(map(len, runs), default=0) <= WORD_CHARACTERS:
        return piece
    return "".join(run[:WORD_CHARACTERS] for run in runs)
