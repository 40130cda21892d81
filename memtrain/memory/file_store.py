"""Flat tensors in files: read ahead and written behind the computation, in a few threads.

One file per tensor, in a folder of the run's own. `read` and `write` go through two operators of torch, so that a
device without data (phantom) sees how many bytes move, while no file is touched there.

The page cache is no second home of the tensors: a write ends when its bytes are on the device (`fdatasync`), and what
was read or written is then dropped from the cache (`posix_fadvise`). It also brings an I/O error to the `wait` that it
belongs to; a write that only reaches the cache fails later, unseen.
"""

import errno
import fcntl
import itertools
import os
import re
import shutil
import tempfile
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_all
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import torch
from torch import Tensor

from memtrain.errors import UserError
from memtrain.units import MIB, format_bytes

PIECE_BYTES = 64 * MIB
"""Longer transfers are cut, so that the threads share a large tensor."""
MARKER = "memtrain.lock"
"""The file that makes a folder ours; a living run holds its lock."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
REMEDY = "repair that, or set offload.nvme_dir to another disk, and start again"


class _File(NamedTuple):
    path: Path
    n_elements: int
    dtype: torch.dtype


class _Transfer(NamedTuple):
    """Bytes `start` to `stop` of a file, and the memory from `address` on that they go to or come from."""

    path: Path
    is_write: bool
    start: int
    stop: int
    address: int

    @property
    def n_bytes(self) -> int:
        return self.stop - self.start

    def uses(self, address: int, n_bytes: int) -> bool:
        return self.address < address + n_bytes and address < self.address + self.n_bytes

    def must_follow(self, earlier: "_Transfer") -> bool:
        """Whether both touch the same bytes, of the file or of memory, and one of them changes those."""
        in_file = (
            self.path == earlier.path and self.start < earlier.stop and earlier.start < self.stop
        )
        in_memory = self.uses(earlier.address, earlier.n_bytes)
        return (in_file and (self.is_write or earlier.is_write)) or (
            in_memory and not (self.is_write and earlier.is_write)
        )


class FileStore:
    """Tensors kept in the files of `folder`, which is made with the first transfer. For one caller at a time.

    Transfers that touch the same bytes happen in the order in which they were asked for. It holds no memory of its
    own, and a tensor only until its transfer has ended.
    """

    def __init__(self, folder: Path, n_threads: int = 4) -> None:
        self.folder = folder
        self.total_bytes = 0
        """What the files take when they are full."""
        self._files: dict[str, _File] = {}
        self._made: set[Path] = set()
        self._running: list[tuple[_Transfer, Future[None]]] = []
        self._threads = ThreadPoolExecutor(n_threads, "file_store")  # starts them when needed
        self._number = next(_numbers)
        _stores[self._number] = self

    def add(self, name: str, n_elements: int, dtype: torch.dtype) -> None:
        """Reserve room for a tensor; it is zeros until written."""
        assert name not in self._files, f"{name} is there already"
        path = self.folder / quote(name, safe=" ")
        self._files[name] = _File(path, n_elements, dtype)
        self.total_bytes += n_elements * dtype.itemsize

    def read(self, name: str, out: Tensor, offset: int = 0) -> None:
        """Begin to fill `out`, flat on the CPU, from element `offset` on. Raises UserError."""
        self._check(name, out, offset)
        torch.ops.memtrain.file_read(out, self._number, name, offset)

    def write(self, name: str, source: Tensor, offset: int = 0) -> None:
        """Begin to write `source`, flat on the CPU: leave it alone until `wait(source)`. Raises UserError."""
        self._check(name, source, offset)
        torch.ops.memtrain.file_write(source, self._number, name, offset)

    def wait(self, tensor: Tensor) -> None:
        """Until nothing is read into or written from the memory of `tensor`.

        Raises UserError for a transfer that failed, again on every call: what follows from it is lost too.
        """
        if not self._running:  # on the phantom nothing ever runs, and tensors have no address
            return
        address, n_bytes = tensor.data_ptr(), tensor.nbytes
        ended = [future for transfer, future in self._running if transfer.uses(address, n_bytes)]
        wait_all(ended)
        for future in ended:
            future.result()

    def map(self, name: str) -> Tensor:
        """The file as a tensor, after the writes that are under way; to be read, until the next write."""
        file = self._files[name]
        if file.path not in self._made:  # never written; on the phantom nothing is
            return torch.zeros(file.n_elements, dtype=file.dtype, device="cpu")
        wait_all([future for transfer, future in self._running if transfer.path == file.path])
        mapped: Tensor = torch.from_file(
            str(file.path), shared=False, size=file.n_elements, dtype=file.dtype
        )
        return mapped

    def close(self) -> None:
        """Wait for what runs, drop what has not begun, remove the files and the folder; again is a no-op."""
        self._threads.shutdown(cancel_futures=True)
        self._running.clear()
        for path in self._made:
            with suppress(OSError):
                path.unlink()
        self._made.clear()
        _remove_if_empty(self.folder)

    def _check(self, name: str, tensor: Tensor, offset: int) -> None:
        file = self._files[name]
        assert tensor.device.type == "cpu" and tensor.dim() == 1 and tensor.is_contiguous(), name
        assert tensor.dtype == file.dtype, f"{name}: {tensor.dtype} is not {file.dtype}"
        assert 0 <= offset <= file.n_elements - tensor.numel(), f"{name}: outside its file"

    def _start(self, tensor: Tensor, name: str, offset: int, is_write: bool) -> None:
        file = self._files[name]
        if file.path not in self._made:
            self._make(file)
        self._running = [(t, future) for t, future in self._running if not _succeeded(future)]
        memory = tensor.detach().view(torch.uint8).numpy().data
        for begin in range(0, len(memory), PIECE_BYTES):
            piece = memory[begin : begin + PIECE_BYTES]
            start = offset * file.dtype.itemsize + begin
            address = tensor.data_ptr() + begin
            transfer = _Transfer(file.path, is_write, start, start + len(piece), address)
            after = [future for t, future in self._running if transfer.must_follow(t)]
            # First come, first served: what a thread waits for was taken by a thread before.
            future = self._threads.submit(_transfer, transfer, piece, after)
            self._running.append((transfer, future))

    def _make(self, file: _File) -> None:
        """The file at its full length, which takes no room yet."""
        try:
            if not self.folder.is_dir():
                self.folder.mkdir()
                _folders.setdefault(self.folder, None)
            with file.path.open("xb") as made:
                self._made.add(file.path)
                made.truncate(file.n_elements * file.dtype.itemsize)
        except OSError as error:
            raise _failure(file.path, "make", error) from error


def _succeeded(future: "Future[None]") -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _transfer(transfer: _Transfer, memory: memoryview, after: "list[Future[None]]") -> None:
    """All of `memory`, once `after` have ended. Raises UserError, theirs too."""
    for earlier in after:
        earlier.result()
    try:
        fd = os.open(transfer.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _move(fd, transfer, memory)
            if transfer.is_write:
                os.fdatasync(fd)
            os.posix_fadvise(fd, transfer.start, transfer.n_bytes, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    except OSError as error:
        raise _failure(transfer.path, "write" if transfer.is_write else "read", error) from error


def _move(fd: int, transfer: _Transfer, memory: memoryview) -> None:
    move = os.pwritev if transfer.is_write else os.preadv
    done = 0
    while done < transfer.n_bytes:  # one call moves at most 2 GiB, and may move less
        n_bytes = move(fd, [memory[done:]], transfer.start + done)
        if n_bytes == 0:
            place = transfer.start + done
            raise OSError(f"it ends after {place} B, before {transfer.stop} B: it was cut short")
        done += n_bytes


def _failure(path: Path, what: str, error: OSError) -> UserError:
    cause = error.strerror or str(error)
    if error.errno in NO_ROOM:
        with suppress(OSError):
            free_bytes = shutil.disk_usage(path.parent).free
            cause = f"disk full ({cause}; {format_bytes(free_bytes)} free in {path.parent})"
    return UserError(f"cannot {what} {path}: {cause}: {REMEDY}")


# The operators. Whoever counts bytes knows them by their names, `file_read` and `file_write`.

_numbers = itertools.count()
_stores: "weakref.WeakValueDictionary[int, FileStore]" = weakref.WeakValueDictionary()


def _file_read(out: Tensor, store: int, name: str, offset: int) -> None:
    _stores[store]._start(out, name, offset, is_write=False)


def _file_write(source: Tensor, store: int, name: str, offset: int) -> None:
    _stores[store]._start(source, name, offset, is_write=True)


def _nothing(tensor: Tensor, store: int, name: str, offset: int) -> None:
    """Without data there is nothing to move."""


_library: Any = torch.library.Library("memtrain", "FRAGMENT")  # type: ignore[no-untyped-call]
for _operator, _argument, _run in (
    ("file_read", "Tensor(a!) out", _file_read),
    ("file_write", "Tensor source", _file_write),
):
    _library.define(f"{_operator}({_argument}, int store, str name, int offset) -> ()")
    _library.impl(_operator, _run, "CPU")
    torch.library.register_fake(f"memtrain::{_operator}", _nothing, lib=_library)


# The folder

_folders: dict[Path, int | None] = {}
"""The folders that this process made, and the descriptors that hold their locks."""


def check_folder(nvme_dir: Path, needed_bytes: int) -> None:
    """Raises UserError unless files of `needed_bytes` can be made in `nvme_dir`. Leaves nothing there."""
    key = f"offload.nvme_dir={nvme_dir}"
    if not nvme_dir.exists():
        raise UserError(f"{key}: no such folder: make it, or name another")
    if not nvme_dir.is_dir():
        raise UserError(f"{key}: not a folder: name one")
    try:
        with tempfile.TemporaryFile(dir=nvme_dir):
            free_bytes = shutil.disk_usage(nvme_dir).free
    except OSError as error:
        raise UserError(f"{key}: cannot be written to ({error.strerror}): name another") from error
    if free_bytes < needed_bytes:
        raise UserError(
            f"{key}: {format_bytes(needed_bytes)} needed, {format_bytes(free_bytes)} free: "
            "make room, or name another"
        )


def claim_folder(nvme_dir: Path, run_name: str) -> Path:
    """A new folder for this run in `nvme_dir`, locked while this process lives. Raises UserError."""
    name = re.sub(r"[^\w.-]+", "_", run_name)
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"memtrain-{name}-{os.getpid()}-", dir=nvme_dir))
        new = folder / f"{MARKER}.new"
        lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        new.rename(folder / MARKER)  # never seen without its lock: nobody takes it for a leftover
    except OSError as error:
        raise _failure(nvme_dir, "make a folder in", error) from error
    _folders[folder] = lock
    return folder


def release_folder(folder: Path) -> None:
    """End every store in a claimed folder, and remove it."""
    for store in list(_stores.values()):
        if store.folder == folder:
            store.close()
    _remove_if_empty(folder)
    shutil.rmtree(folder, ignore_errors=True)


def files_bytes(folder: Path) -> int:
    """What the files of every store in `folder` take when they are full."""
    return sum(store.total_bytes for store in list(_stores.values()) if store.folder == folder)


def leftovers(nvme_dir: Path) -> list[tuple[Path, int]]:
    """Folders of runs that are gone, and the bytes they take: what a crash left behind."""
    folders = sorted(marker.parent for marker in nvme_dir.glob(f"memtrain-*/{MARKER}"))
    return [(folder, taken_bytes(folder)) for folder in folders if _is_abandoned(folder)]


def _is_abandoned(folder: Path) -> bool:
    """Whether its lock can be taken; what we may not open is not ours to name."""
    try:
        lock = os.open(folder / MARKER, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def taken_bytes(folder: Path) -> int:
    """On the disk: what was never written of a file takes nothing."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def _remove_if_empty(folder: Path) -> None:
    """Remove a folder that this process made, unless another store still has files there."""
    with suppress(OSError):
        if folder not in _folders or {path.name for path in folder.iterdir()} - {MARKER}:
            return
        lock = _folders.pop(folder)
        if lock is not None:
            (folder / MARKER).unlink(missing_ok=True)
            os.close(lock)
        folder.rmdir()
