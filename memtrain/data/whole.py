"""Documents of any length to the tokens that encoding each as a whole gives, in bounded memory.

A long document is encoded in windows that overlap. The overlap, the *seam*, is encoded by itself as well: it shares its
right end with the window on its left and its left end with the one on its right, so equal ids from the shared end are
equal tokens. Where all three agree in the middle of the seam, the windows are joined there

- at the beginning of a word: the library's models know nothing beyond the words of the pre-tokenizer, or
- between any two tokens, if the model merges pairs (BPE) and one word fills the seam: tokens are the result of BPE if
  each two neighbours are the result of BPE for their own text, since the first merge across a border would happen in
  these two alone.

So it matters neither what is put before a text (SentencePiece's space) nor which rule cuts words. Where the windows
agree nowhere, they are encoded together: always the same tokens, in more memory.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memtrain.data.tokenizer import EncodeError, Tokenizer, Words
from memtrain.errors import UserError
from memtrain.units import KIB, MIB

# The library keeps about 100 bytes per token while it encodes: these two bound its memory.
WINDOW = 128 * KIB
"""Characters of a window before the seam at its end."""
BATCH = 2 * MIB
"""Characters that are encoded at once."""
SEAM = KIB
"""Characters that two windows share."""

Array: TypeAlias = npt.NDArray[Any]
"""(N,) ids, or ids and roles."""


@dataclass(frozen=True)
class Source:
    """A document: what errors call it, its text in pieces, and the parts of it that are learned."""

    name: str
    pieces: Iterable[str]
    """END stands for the end-of-text token."""
    part_ends: npt.NDArray[np.int64] | None = None  # (P,), in characters
    part_learned: npt.NDArray[np.bool_] | None = None  # (P,)


@dataclass(frozen=True)
class Window:
    """A part of a document that is encoded at once."""

    source: Source
    text: str
    start: int
    """Of its first character in the document."""
    is_last: bool


@dataclass
class _Encoded:
    """A window whose end may still have to be joined to the next."""

    window: Window
    array: Array
    """Of a window that was put together from several: that of the last."""
    seam: Words | None
    skip: int = 0
    """Tokens at its beginning that the window before has, too."""
    is_joined: bool = False


Encode: TypeAlias = Callable[[list[Window]], list[Array]]


def encode_whole(
    tokenizer: Tokenizer, sources: Iterable[Source], encode: Encode
) -> Iterator[list[Array]]:
    """Arrays in order, a list for each batch. `encode` gives one array a window."""

    def checked(windows: list[Window]) -> list[Array]:
        try:
            return encode(windows)
        except EncodeError as error:
            names = [window.source.name for window in windows if window.text == error.text]
            raise UserError(f"{names[0]}: {error}") from error

    left: _Encoded | None = None
    for windows in _batches(sources):
        arrays = checked(windows)
        seams = iter(tokenizer.encode_words([w.text[-SEAM:] for w in windows if not w.is_last]))
        done: list[Array] = []
        for window, array in zip(windows, arrays, strict=True):
            right = _Encoded(window, array, None if window.is_last else next(seams))
            if left:
                right = _join(left, right, tokenizer, checked, done)
            if right.window.is_last:
                done.append(_whole_array(right, checked)[right.skip :])
            left = None if right.window.is_last else right
        yield done


def _join(
    left: _Encoded, right: _Encoded, tokenizer: Tokenizer, encode: Encode, done: list[Array]
) -> _Encoded:
    """What is left open; what is settled goes to `done`."""
    assert left.seam
    if _cut(left.array, right.array, left.seam, tokenizer.is_bpe) is not None:
        array = _whole_array(left, encode)
        cut = _cut(array, right.array, left.seam, tokenizer.is_bpe)
        if cut is not None:
            done.append(array[left.skip : len(array) - len(left.seam.ids) + cut])
            return replace(right, skip=cut)
    text = left.window.text + right.window.text[SEAM:]
    window = replace(left.window, text=text, is_last=right.window.is_last)
    return _Encoded(window, right.array, right.seam, left.skip, is_joined=True)


def _whole_array(part: _Encoded, encode: Encode) -> Array:
    return encode([part.window])[0] if part.is_joined else part.array


def _cut(left: Array, right: Array, seam: Words, is_bpe: bool) -> int | None:
    """The token of the seam before which its two windows are joined."""
    first, stop = np.searchsorted(seam.starts, SEAM // 4), np.searchsorted(seam.ends, 3 * SEAM // 4)
    n_after = len(seam.ids) - first
    agree = stop - first >= 2
    agree = agree and np.array_equal(_ids(left)[-n_after:], seam.ids[first:])
    agree = agree and np.array_equal(_ids(right)[:stop], seam.ids[:stop])
    if not agree:
        return None
    new_words = np.flatnonzero(np.diff(seam.words[first:stop]))
    if len(new_words):
        return int(first + 1 + new_words[0])
    in_one_word = seam.words[0] == seam.words[-1]
    return int(first + 1) if is_bpe and in_one_word else None


def _ids(array: Array) -> Array:
    ids: Array = array["id"] if array.dtype.names else array
    return ids


def _batches(sources: Iterable[Source]) -> Iterator[list[Window]]:
    batch: list[Window] = []
    size = 0
    for source in sources:
        for window in _windows(source):
            batch.append(window)
            size += len(window.text)
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _windows(source: Source) -> Iterator[Window]:
    """Each begins with the last SEAM characters of the one before."""
    text, start = "", 0
    for piece in source.pieces:
        text, at = text + piece, 0
        while len(text) - at > WINDOW + SEAM:
            yield Window(source, text[at : at + WINDOW + SEAM], start + at, is_last=False)
            at += WINDOW
        text, start = text[at:], start + at
    yield Window(source, text, start, is_last=True)
