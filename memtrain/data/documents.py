"""Documents from .jsonl files: which of their tokens are learned, and where each ends.

A record is one line and has one of three forms; other fields are left alone. Learned is what stands in capitals, `|`
is the end-of-text token, learned where it follows something learned. A document is encoded as a whole: a token that
spans prompt and completion is learned, so no character of what is learned is left out.

    {"text": ...}                                     tEXT|     (nothing stands before the first)
    {"prompt": ..., "completion": ...}                promptCOMPLETION|
    {"messages": [{"role": ..., "content": ...}]}     user, line end, content|assistant, line end, CONTENT|
"""

import codecs
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memtrain.data.corpus import total_bytes
from memtrain.data.store import DTYPES, LAST, LEARNED, TokenFile, cached_tokens
from memtrain.data.tokenizer import END, Tokenizer
from memtrain.data.whole import Source, Window, encode_whole
from memtrain.errors import UserError
from memtrain.units import KIB, MIB

Part: TypeAlias = tuple[str | None, bool]
"""Text, None for the end-of-text token, and whether it is learned."""
Document: TypeAlias = list[Part]

RECORD_BYTES = 16 * MIB
"""The longest line: a record is read as a whole."""
ROLES = ("system", "developer", "user", "assistant", "tool")
KIND = "documents 2"
"""Changes when the same records would become other tokens."""


def tokenize_documents(
    files: list[Path],
    tokenizer: Tokenizer,
    cache_dir: Path,
    progress: Callable[[int, int], None] | None = None,
) -> TokenFile:
    """The tokens of all documents in order, with their roles. Kept in the cache like those of text."""
    arrays = _encode(files, tokenizer, progress)
    return cached_tokens(files, arrays, tokenizer, cache_dir, KIND, with_roles=True)


def read_texts(path: Path) -> Iterator[str]:
    """What the records of a file say, without their markup: for training a tokenizer."""
    for document, _ in read_documents(path):
        yield from (piece for text, _ in document if text for piece in cut(text))


def read_documents(path: Path) -> Iterator[tuple[Document, int]]:
    """(document, bytes of its line). Raises UserError with the line of the first that is none."""
    for _, document, size_bytes in _records(path):
        yield document, size_bytes


def _records(path: Path) -> Iterator[tuple[str, Document, int]]:
    """As `read_documents`, with the place of each."""
    found = False
    for number, line in _lines(path):
        found = True
        where = f"{path}: line {number}"
        yield where, parse_record(line, where), len(line)
    if not found:
        raise UserError(f"{path}: no record in it: one JSON object a line is needed")


def parse_record(line: bytes, where: str) -> Document:
    """The document of one line. Raises UserError that begins with `where`."""
    record = _json(line, where)
    if not isinstance(record, dict):
        raise UserError(f"{where}: not a record but {_kind(record)}: write an object, {_KNOWN}")
    forms = [fields for fields in _FORMS if record.keys() >= set(fields)]
    if len(forms) != 1:
        given = ", ".join(map(repr, record)) or "no field"
        raise UserError(f"{where}: has {given}: a record has {_KNOWN}, and only one of these")
    return _FORMS[forms[0]](record, where)


def cut(text: str, size: int = 128 * KIB) -> Iterator[str]:
    """Pieces of at most `size` characters, cut at line ends if it can."""
    start = 0
    while len(text) - start > size:
        end = text.rfind("\n", start, start + size) + 1 or start + size
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number, line) of those that are not blank, in bounded memory."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(RECORD_BYTES + 1):
                number += 1
                if len(line) > RECORD_BYTES:
                    raise UserError(
                        f"{path}: line {number}: longer than {RECORD_BYTES // MIB} MiB: "
                        "one record a line is read as a whole; cut it, or use data=text"
                    )
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if line.strip():
                    yield number, line
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def _json(line: bytes, where: str) -> Any:
    if (nul := line.find(0)) >= 0:
        raise UserError(f"{where}: NUL byte at byte {nul} of the line, so not text: remove it")
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        what = f"byte 0x{line[error.start]:02x} at byte {error.start} of the line"
        raise UserError(f"{where}: {what} is not UTF-8: convert the file") from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
        ) from error
    except (ValueError, RecursionError) as error:  # a number or a nesting without end
        raise UserError(f"{where}: not JSON that can be read: {str(error)[:80]}") from error


def _text(record: dict[str, Any], where: str) -> Document:
    return [(_string(record, "text", where, empty=False), True), (None, True)]


def _completion(record: dict[str, Any], where: str) -> Document:
    completion = _string(record, "completion", where, empty=False)
    return [(_string(record, "prompt", where), False), (completion, True), (None, True)]


def _chat(record: dict[str, Any], where: str) -> Document:
    messages = record["messages"]
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise UserError(f"{where}: messages is not a list of objects with role and content")
    document: Document = []
    for number, message in enumerate(messages, start=1):
        place = f"{where}: message {number}"
        role = _string(message, "role", place)
        if role not in ROLES:
            raise UserError(f"{place}: role {role[:40]!r}: use one of {', '.join(ROLES)}")
        learned = role == "assistant"
        content = _string(message, "content", place, empty=not learned)
        document += [(f"{role}\n", False), (content, learned), (None, learned)]
    if not any(learned for _, learned in document):
        raise UserError(f"{where}: nothing to learn: no message of the assistant")
    return document


_FORMS: dict[tuple[str, ...], Callable[[dict[str, Any], str], Document]] = {
    ("text",): _text,
    ("prompt", "completion"): _completion,
    ("messages",): _chat,
}
_KNOWN = ", or ".join(" and ".join(fields) for fields in _FORMS)


def _string(record: dict[str, Any], field: str, where: str, empty: bool = True) -> str:
    """Text that can be encoded."""
    value = record.get(field)
    if not isinstance(value, str):
        raise UserError(f"{where}: {field} is {_kind(value)}: text is needed")
    if not value and not empty:
        raise UserError(f"{where}: {field} is empty: there is nothing to learn; leave it out")
    if "\0" in value:
        raise UserError(f"{where}: NUL character in {field}, so not text: remove it")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: half a surrogate pair at character {error.start} of {field}: not text"
        ) from error
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return "missing or null" if value is None else names.get(type(value), "a number")


def _encode(
    files: list[Path], tokenizer: Tokenizer, progress: Callable[[int, int], None] | None
) -> Iterator[npt.NDArray[Any]]:
    """Arrays of (id, role)."""
    all_bytes = total_bytes(files)
    done_bytes = 0

    def sources() -> Iterator[Source]:
        nonlocal done_bytes
        for path in files:
            for where, document, size_bytes in _records(path):
                done_bytes += size_bytes
                yield _source(where, document)

    for arrays in encode_whole(tokenizer, sources(), partial(_with_roles, tokenizer)):
        yield from arrays
        if progress:
            progress(done_bytes, all_bytes)


def _source(where: str, document: Document) -> Source:
    texts = [END if text is None else text for text, _ in document]
    return Source(
        where,
        ["".join(texts)],
        np.cumsum([len(text) for text in texts]),
        np.array([learned for _, learned in document]),
    )


def _with_roles(tokenizer: Tokenizer, windows: list[Window]) -> list[npt.NDArray[Any]]:
    """(id, role) of each window's tokens. Learned is a token that has a character of what is learned; the first of a
    document is not: nothing stands before it.
    """
    mixed = [window for window in windows if not _is_learned_whole(window.source)]
    others = [window for window in windows if _is_learned_whole(window.source)]
    with_ends = iter(tokenizer.encode_with_ends([window.text for window in mixed]))
    whole = iter(tokenizer.encode_documents([window.text for window in others]))
    arrays = []
    for window in windows:
        if _is_learned_whole(window.source):
            ids = next(whole)
            role: Any = LEARNED
        else:
            ids, ends = next(with_ends)
            role = _learned(window, ends) * LEARNED
        array = np.empty(len(ids), DTYPES["uint32+role"])
        array["id"], array["role"] = ids, role
        if window.start == 0:
            array["role"][:1] = 0
        if window.is_last:
            array["role"][-1] |= LAST
        arrays.append(array)
    return arrays


def _is_learned_whole(source: Source) -> bool:
    assert source.part_learned is not None
    return bool(source.part_learned.all())


def _learned(window: Window, ends: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """(n,) of tokens that end so. Since nothing unlearned follows what is learned but behind an end-of-text, the last
    character of a token says it.
    """
    source = window.source
    assert source.part_ends is not None and source.part_learned is not None
    last = window.start + np.maximum(ends, 1) - 1
    return source.part_learned[np.searchsorted(source.part_ends, last, side="right")]
