"""Which text a run reads, and the text itself in bounded memory."""

import codecs
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from memtrain.errors import UserError
from memtrain.units import MIB

Item = TypeVar("Item")

# Third-party code, and the parts of the standard library that are tests or not kept as UTF-8.
NOT_STDLIB = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "__pycache__",
    "idlelib",
    "lib2to3",
}


def stdlib_files() -> list[Path]:
    """The sources of this Python's standard library, by relative path: a corpus every machine has.

    Raises UserError if the installation ships no sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in NOT_STDLIB]  # not entered
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    files = sorted(found, key=lambda path: path.relative_to(root).as_posix())
    if not files:
        raise UserError(f"no standard library sources in {root}: name your own text files instead")
    return files


def text_files(paths: list[str], base: Path, suffix: str = "") -> list[Path]:
    """The files that `paths` name: files, folders (recursive) and globs, relative to `base`.

    Sorted, each once; hidden files are left out unless named, and of folders those without `suffix`.
    Raises UserError for a path that is missing, unreadable or matches nothing.
    """
    if not paths:
        raise UserError("no text files named: give at least one file, folder or glob")
    try:
        found = {path for entry in paths for path in _named(entry, base.absolute(), suffix)}
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from error
    unique: dict[Path, Path] = {}
    for path in sorted(found, key=Path.as_posix):
        unique.setdefault(path.resolve(), path)
    return [_readable(path) for path in unique.values()]


def split(files: list[Path], val_fraction: float) -> tuple[list[Path], list[Path]]:
    """(train, validation) files: about `val_fraction` of their bytes is held out, the same on every machine.

    Where files are too few or too unlike for that, all are for training: split their tokens instead.
    """
    sizes = [_stat(path).st_size for path in files]
    held_out = set(spread(sizes, val_fraction))
    held_bytes, all_bytes = sum(sizes[i] for i in held_out), sum(sizes)
    wanted_bytes = val_fraction * all_bytes
    if abs(held_bytes - wanted_bytes) > min(wanted_bytes, all_bytes - wanted_bytes) / 2:
        held_out = set()
    train = [path for i, path in enumerate(files) if i not in held_out]
    return train, [files[i] for i in sorted(held_out)]


def spread(sizes: Sequence[int], val_fraction: float) -> list[int]:
    """Which of the files or documents of these sizes are held out: from the largest to the smallest, each that brings
    their share of the whole size nearer to `val_fraction`. So every size is held out in its share, as far as can be.
    """
    check_fraction(val_fraction)
    held_out, seen_size, held_size = [], 0, 0
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        seen_size += sizes[i]
        due = val_fraction * seen_size - held_size
        if 0 < sizes[i] < 2 * due:
            held_out.append(i)
            held_size += sizes[i]
    return held_out


def check_fraction(val_fraction: float) -> None:
    """Raises UserError unless `val_fraction` leaves something to train on."""
    if not 0 <= val_fraction < 1:
        raise UserError(f"val_fraction is {val_fraction}: choose at least 0 and less than 1")


def read_pieces(path: Path, piece_bytes: int = MIB) -> Iterator[str]:
    """The text of a UTF-8 file in pieces of at most two `piece_bytes`, cut at line ends if it can.

    Line ends are kept as they are, a byte-order mark is dropped. Raises UserError with the offset
    of the first byte that is not text.
    """
    try:
        with path.open("rb") as file:
            rest = file.read(len(codecs.BOM_UTF8))
            offset = 0
            if rest == codecs.BOM_UTF8:
                offset, rest = len(rest), b""
            at_end = False
            while not at_end:
                chunk = file.read(piece_bytes)
                at_end = not chunk
                rest += chunk
                line_end = rest.rfind(b"\n") + 1
                complete = rest if at_end or not line_end else rest[:line_end]
                text, used = _decode(complete, at_end, path, offset)
                offset, rest = offset + used, rest[used:]
                if text:
                    yield text
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def fingerprint(files: Iterable[Path]) -> str:
    """A hash that changes when a file is added, removed, renamed, resized or written to."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(_state(path).encode())
    return digest.hexdigest()


def unchanged(files: list[Path], items: Iterable[Item]) -> Iterator[Item]:
    """`items`, which are read from `files`. Raises UserError at their end if a file has changed meanwhile."""
    before = [_state(path) for path in files]
    return _unchanged(files, before, items)


def _unchanged(files: list[Path], before: list[str], items: Iterable[Item]) -> Iterator[Item]:
    yield from items
    for path, state in zip(files, before, strict=True):
        if _state(path) != state:
            raise UserError(f"{path}: changed while it was read: try again when it is complete")


def total_bytes(files: Iterable[Path]) -> int:
    return sum(_stat(path).st_size for path in files)


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def _state(path: Path) -> str:
    stat = _stat(path)
    return f"{path.as_posix()!r} {stat.st_size} {stat.st_mtime_ns}\n"


def _decode(data: bytes, final: bool, path: Path, offset: int) -> tuple[str, int]:
    """(text, bytes used); a character cut off at the end is left for later unless `final`."""
    if (nul := data.find(0)) >= 0:
        raise UserError(
            f"{path}: NUL byte at offset {offset + nul}, so not a text file: leave it out"
        )
    try:
        return codecs.utf_8_decode(data, "strict", final)
    except UnicodeDecodeError as error:
        where = f"byte 0x{data[error.start]:02x} at offset {offset + error.start}"
        raise UserError(
            f"{path}: {where} is not UTF-8: convert the file or leave it out"
        ) from error


def _named(entry: str, base: Path, suffix: str) -> list[Path]:
    if not entry:
        raise UserError("an empty name among the text files: remove it")
    relative = _expanded(entry)
    path = base / relative
    if path.is_file():
        return [path]
    if path.is_dir():
        found = [path for path in _walk(path) if path.name.endswith(suffix)]
    elif any(map(_is_pattern, relative.parts)):
        found = list(_glob(relative, base))
    else:
        raise UserError(f"{path}: no such file or folder: correct the path {entry!r}")
    if not found:
        what = f"{suffix} file" if suffix and path.is_dir() else "file"
        raise UserError(f"{entry!r} matches no {what} in {base}: correct the path")
    return found


def _expanded(entry: str) -> Path:
    try:
        return Path(entry).expanduser()
    except RuntimeError as error:
        raise UserError(f"{entry!r}: no home folder of that user: write the path out") from error


def _is_pattern(part: str) -> bool:
    return not set("*?[").isdisjoint(part)


def _is_visible(path: Path, root: Path) -> bool:
    return not any(part.startswith(".") for part in path.relative_to(root).parts)


def _glob(pattern: Path, base: Path) -> Iterator[Path]:
    """Files that match; what is written out before the first pattern may be hidden."""
    parts = pattern.parts
    n_fixed = next(i for i, part in enumerate(parts) if _is_pattern(part))
    root = base.joinpath(*parts[:n_fixed])
    try:
        for path in root.glob("/".join(parts[n_fixed:])):
            if path.is_file() and _is_visible(path, root):
                yield path
    except ValueError as error:
        raise UserError(f"'{pattern}' is no valid pattern: {error}") from error


def _walk(folder: Path) -> Iterator[Path]:
    """Visible regular files below `folder`. Linked folders are entered once, so loops end."""
    seen: set[Path] = set()
    for root, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        real = Path(root).resolve()
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        # In a fixed order, so that the name under which a linked folder is met first is fixed too.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        visible = (Path(root, name) for name in names if not name.startswith("."))
        yield from (path for path in visible if path.is_file())


def _readable(path: Path) -> Path:
    if not os.access(path, os.R_OK):
        raise UserError(f"{path}: no permission to read: change its mode or leave it out")
    return path


def _raise(error: OSError) -> NoReturn:
    raise error
