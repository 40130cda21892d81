"""Text to token ids and back."""

import atexit
import hashlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeAlias

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
_UNKNOWN = "\0unknown"
"""A name that no vocabulary has."""
_RUNS = re.compile(r"[^\W\d_]+|\d+|\s+|(?:[^\w\s]|_)+")


END = "\0"
"""Stands for the end-of-text token in a document's text: what is text has no NUL."""
Ids: TypeAlias = npt.NDArray[np.uint32]
Positions: TypeAlias = npt.NDArray[np.int64]


class EncodeError(UserError):
    """A text that cannot be encoded."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(reason)
        self.text = text


class Words(NamedTuple):
    """The tokens of a text, (n,) each: where they lie in it and of which word of the pre-tokenizer they are."""

    ids: Ids
    starts: Positions
    ends: Positions
    words: Positions


class Tokenizer:
    """A `tokenizers.Tokenizer` that adds, cuts, pads and drops nothing.

    A special token's name met in the text is text, so the end-of-text id only ends documents.
    """

    def __init__(self, backend: tokenizers.Tokenizer, end_of_text_id: int) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self.end_of_text_id = end_of_text_id
        # Not the number of tokens: a tokenizer file may leave ids out.
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.fingerprint: str = hashlib.sha256(backend.to_str().encode()).hexdigest()
        self._json: str = backend.to_str(pretty=True)
        self.is_bpe = isinstance(backend.model, models.BPE)
        self._backend = _prepared(backend)
        self._end_id = backend.token_to_id(END)
        self._encode_fast = getattr(backend, "encode_batch_fast", backend.encode_batch)

    def encode(self, texts: list[str]) -> list[Ids]:
        """One array of ids per text, nothing added. Raises EncodeError for text it has no tokens for."""
        for text in texts:
            if END in text:
                raise EncodeError("NUL character, so not text: remove it", text)
        return self.encode_documents(texts)

    def encode_documents(self, texts: list[str]) -> list[Ids]:
        """As `encode`, with the end-of-text id where END stands."""
        return [self._ids(encoding) for encoding in self._encode(self._encode_fast, texts)]

    def encode_with_ends(self, texts: list[str]) -> list[tuple[Ids, Positions]]:
        """As `encode_documents`, and after how many characters of the text each token ends."""
        if self._byte_counts is None:
            found = self.encode_words(texts)
            return [(words.ids, words.ends) for words in found]
        pairs = []
        for text, encoding in zip(texts, self._encode(self._encode_fast, texts), strict=True):
            ends = self._byte_level_ends(text, encoding.ids)
            if ends is None:
                pairs += [(words.ids, words.ends) for words in self.encode_words([text])]
            else:
                pairs.append((self._ids(encoding), ends))
        return pairs

    def encode_words(self, texts: list[str]) -> list[Words]:
        """As `encode_documents`, with all the library knows of the tokens: takes half as long again."""
        found = []
        for encoding in self._encode(self._backend.encode_batch, texts):
            offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            words = np.array(encoding.word_ids, dtype=np.int64)
            found.append(Words(self._ids(encoding), offsets[:, 0], offsets[:, 1], words))
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens left out."""
        text: str = self._backend.decode([int(i) for i in ids], skip_special_tokens=True)
        return text

    def to_json(self) -> str:
        """The content of a tokenizer.json that `load_tokenizer` and transformers read."""
        return self._json

    def save(self, path: Path) -> None:
        write_text(path, self.to_json())

    def _ids(self, encoding: tokenizers.Encoding) -> Ids:
        ids = np.array(encoding.ids, dtype=np.uint32)
        ids[ids == self._end_id] = self.end_of_text_id
        return ids

    def _encode(
        self, encode: Callable[..., list[tokenizers.Encoding]], texts: list[str]
    ) -> list[tokenizers.Encoding]:
        try:
            return encode(texts, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            raise self._explained(texts, error) from error

    def _explained(self, texts: list[str], error: Exception) -> EncodeError:
        """The first text that fails by itself, and why."""
        for text in texts:
            try:
                self._encode_fast([text], add_special_tokens=False)
            except Exception as alone:
                reason = _dropped(self._json, text) if self.is_bpe else None
                what = " ".join(str(alone).split())
                return EncodeError(reason or f"the tokenizer cannot encode this text: {what}", text)
        return EncodeError(f"the tokenizer cannot encode: {' '.join(str(error).split())}", texts[0])

    @cached_property
    def _byte_counts(self) -> Positions | None:
        """(V,): the bytes of text that each token is, if tokens are bytes one to one; None of other tokenizers."""
        if not _is_byte_level(self._backend):
            return None
        vocab = self._backend.get_vocab(with_added_tokens=True)
        counts = np.zeros(max(vocab.values()) + 1, dtype=np.int64)
        for token, i in vocab.items():
            counts[i] = len(token)
        for i, added in self._backend.get_added_tokens_decoder().items():
            counts[i] = len(added.content.encode())
        return counts

    def _byte_level_ends(self, text: str, ids: list[int]) -> Positions | None:
        """(n,), by counting; None where something was taken out of the text or put into it."""
        assert self._byte_counts is not None
        normalizer, encoded = self._backend.normalizer, text.encode()
        byte_ends = np.cumsum(self._byte_counts[ids])
        if byte_ends[-1:] != len(encoded) or (
            normalizer and normalizer.normalize_str(text) != text
        ):
            return None
        if len(encoded) == len(text):
            return byte_ends
        first_bytes = (np.frombuffer(encoded, dtype=np.uint8) & 0xC0) != 0x80
        ends: Positions = np.cumsum(first_bytes)[byte_ends - 1]
        return ends


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


def _prepared(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """With a token for END, and so that no character is dropped and no place of a token trimmed."""
    backend.post_processor = None
    if isinstance(backend.model, models.BPE) and backend.model.unk_token is None:
        # Without an unknown token BPE drops what it does not know; with one that is missing it raises.
        backend.model.unk_token = _UNKNOWN
    ids = set(backend.get_vocab(with_added_tokens=True).values())
    n_model = backend.get_vocab_size(with_added_tokens=False)
    # The library counts ids on from the size of the model, though others may have them where some were left out.
    n_fillers = max(ids) + 1 - n_model if len(ids) <= max(ids) else 0
    names = [*(f"{END}{i}{END}" for i in range(n_fillers)), END]
    backend.add_tokens([tokenizers.AddedToken(name, normalized=False) for name in names])
    return backend


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Whether tokens are the bytes of the text, unless it is normalized."""
    if not isinstance(backend.model, models.BPE) or backend.pre_tokenizer is None:
        return False
    state = json.loads(backend.pre_tokenizer.__getstate__())
    steps = state.get("pretokenizers", [state])
    prefixed = [step.get("add_prefix_space") for step in steps if step["type"] == "ByteLevel"]
    return prefixed == [False]


def _dropped(tokenizer_json: str, text: str) -> str | None:
    """What BPE would drop of `text`, in words: the same tokenizer with an unknown token finds it."""
    description = json.loads(tokenizer_json)
    vocab = description["model"]["vocab"]
    unknown_id = vocab[_UNKNOWN] = max(vocab.values()) + 1
    description["model"] |= {"unk_token": _UNKNOWN, "fuse_unk": False}
    finder = tokenizers.Tokenizer.from_str(json.dumps(description))
    finder.encode_special_tokens = True
    lost: list[str] = []
    for section in text.split(END):
        encoding = finder.encode(section, add_special_tokens=False)
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        places = dict.fromkeys(start for i, (start, _) in pairs if i == unknown_id)
        lost += [section[start] for start in places]
    if not lost:
        return None
    n_characters = len(text) - text.count(END)
    return (
        f"the tokenizer has no token for {lost[0]!r} (U+{ord(lost[0]):04X}): it would drop "
        f"{len(lost)} of these {n_characters} characters ({len(lost) / n_characters:.2%}) "
        "silently; use one that falls back to bytes or has an unknown token"
    )


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
