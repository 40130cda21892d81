"""Documents from .jsonl files: which of their tokens are learned, and where each ends.

A record is one line and has one of three forms; other fields are left alone. Learned is what stands in capitals, `|`
is the end-of-text token, learned where it follows something learned; the pieces are encoded one by one.

    {"text": ...}                                     tEXT|     (nothing stands before the first)
    {"prompt": ..., "completion": ...}                promptCOMPLETION|
    {"messages": [{"role": ..., "content": ...}]}     user, line end, content|assistant, line end, CONTENT|
"""

import codecs
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memtrain.data.corpus import total_bytes
from memtrain.data.store import (
    BATCH_BYTES,
    DTYPES,
    LAST,
    LEARNED,
    PIECE_BYTES,
    TokenFile,
    cached_tokens,
)
from memtrain.data.tokenizer import Tokenizer
from memtrain.errors import UserError
from memtrain.units import MIB

Part: TypeAlias = tuple[str | None, bool]
"""Text, None for the end-of-text token, and whether it is learned."""
Document: TypeAlias = list[Part]

RECORD_BYTES = 16 * MIB
"""The longest line: a record is read as a whole."""
ROLES = ("system", "developer", "user", "assistant", "tool")
KIND = "documents 1"
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
    found = False
    for number, line in _lines(path):
        found = True
        yield parse_record(line, f"{path}: line {number}"), len(line)
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


def cut(text: str, size: int = PIECE_BYTES) -> Iterator[str]:
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
    """Arrays of (id, role). The first token of a document is not learned: nothing stands before it."""
    all_bytes, done_bytes, at_start = total_bytes(files), 0, True
    end_of_text = np.array([tokenizer.end_of_text_id])
    for batch, line_bytes in _batches(files):
        encoded = iter(tokenizer.encode([text for text, _ in batch if text is not None]))
        for text, role in batch:
            ids = end_of_text if text is None else next(encoded)
            array = np.empty(len(ids), DTYPES["uint32+role"])
            array["id"], array["role"] = ids, role & LEARNED
            if len(ids):
                array["role"][:1] &= 0 if at_start else LEARNED
                array["role"][-1] |= role & LAST
                at_start = bool(role & LAST)
            yield array
        done_bytes += line_bytes
        if progress:
            progress(done_bytes, all_bytes)


def _batches(files: list[Path]) -> Iterator[tuple[list[tuple[str | None, int]], int]]:
    """(pieces of text with their roles, bytes of the lines they end)."""
    batch: list[tuple[str | None, int]] = []
    text_bytes = line_bytes = 0
    for path in files:
        for document, size_bytes in read_documents(path):
            for piece, role in _pieces(document):
                batch.append((piece, role))
                text_bytes += len((piece or "").encode())
                if text_bytes >= BATCH_BYTES:
                    yield batch, line_bytes
                    batch, text_bytes, line_bytes = [], 0, 0
            line_bytes += size_bytes
    yield batch, line_bytes


def _pieces(document: Document) -> Iterator[tuple[str | None, int]]:
    for index, (text, learned) in enumerate(document):
        role = learned * LEARNED | (index == len(document) - 1) * LAST
        if text is None:
            yield None, role
        else:
            yield from ((piece, role) for piece in cut(text))
