"""Tensors in files: what comes back, in which order, and what is said and left when it goes wrong."""

import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from memtrain.errors import UserError
from memtrain.memory import file_store
from memtrain.memory.file_store import FileStore, check_folder, claim_folder, leftovers
from memtrain.phantom import PhantomCPU, PhantomGPU, RaceError
from memtrain.units import MIB

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
)
NOBODY = 65534


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    opened = FileStore(claim_folder(tmp_path, "test"))
    yield opened
    opened.close()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_store, "PIECE_BYTES", 1000)


def values(n_elements: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 2 if dtype == torch.bool else 100, (n_elements,)).to(dtype)


def read(store: FileStore, name: str, n: int, dtype=torch.float32, offset: int = 0):
    out = torch.full((n,), 1, dtype=dtype)
    store.read(name, out, offset)
    store.wait(out)
    return out


# What comes back


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_comes_back_whole_and_in_parts(store, small_pieces, dtype):
    name = "blocks.0/attention weight"
    store.add(name, 5000, dtype)
    source = values(5000, dtype)
    store.write(name, source)
    part = values(1234, dtype)
    store.write(name, part, offset=777)
    for tensor in (source, part):
        store.wait(tensor)
    wanted = source.clone()
    wanted[777 : 777 + 1234] = part
    assert torch.equal(read(store, name, 5000, dtype), wanted)
    assert torch.equal(read(store, name, 2000, dtype, offset=500), wanted[500:2500])


def test_views_of_one_buffer_are_read_into_and_written_from(store):
    store.add("a", 100, torch.float32)
    buffer = torch.arange(300.0)
    store.write("a", buffer[100:200])
    store.read("a", buffer[200:300])  # the same memory's neighbour: after the write, which it sees
    store.wait(buffer)
    assert torch.equal(buffer, torch.cat([torch.arange(200.0), torch.arange(100.0, 200.0)]))


def test_what_was_never_written_is_zeros_and_takes_no_room(store):
    store.add("a", 10_000_000, torch.bfloat16)
    store.add("b", 0, torch.float32)
    assert store.total_bytes == 20_000_000
    source = torch.ones(1, dtype=torch.bfloat16)
    store.write("a", source, offset=9_999_999)
    store.wait(source)
    assert read(store, "a", 9_999_999, torch.bfloat16).count_nonzero() == 0
    assert read(store, "b", 0).numel() == 0
    assert sum(path.stat().st_blocks * 512 for path in store.folder.iterdir()) < MIB


def test_what_does_not_fit_its_file_is_our_mistake(store):
    store.add("a", 10, torch.float32)
    for tensor, offset in ((torch.ones(11), 0), (torch.ones(5), 6), (torch.ones(2), -1),
                           (torch.ones(5).half(), 0), (torch.ones(2, 2), 0), (torch.ones(8)[::2], 0)):  # fmt: skip
        with pytest.raises(AssertionError):
            store.read("a", tensor, offset)
    with pytest.raises(AssertionError):
        store.add("a", 10, torch.float32)


# The order


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_calls_gives_what_one_thread_would(store, monkeypatch, seed):
    """Against plain tensors; a source is changed as soon as it may be, a read checked when it may be."""
    monkeypatch.setattr(file_store, "PIECE_BYTES", 100_000)
    draw, n = random.Random(seed), 200_000
    torch.manual_seed(seed)
    model = {name: torch.zeros(n) for name in "abc"}
    for name in model:
        store.add(name, n, torch.float32)
    buffers = [(torch.zeros(n), torch.zeros(n)) for _ in range(6)]  # the second: as it has to be
    for _ in range(300):
        name, (buffer, wanted) = draw.choice("abc"), draw.choice(buffers)
        begin = draw.randrange(n)
        length = draw.randrange(n - begin) + 1
        place = draw.randrange(n - length + 1)
        there, here = slice(begin, begin + length), slice(place, place + length)
        action = draw.choice(("read", "write", "check"))
        if action == "read":
            store.read(name, buffer[here], begin)
            wanted[here] = model[name][there]
        elif action == "write":  # of what may still be on its way into the buffer
            store.write(name, buffer[here], begin)
            model[name][there] = wanted[here]
        else:
            store.wait(buffer)
            assert torch.equal(buffer, wanted)
            buffer.copy_(wanted.uniform_())
    for name, tensor in model.items():
        assert torch.equal(read(store, name, n), tensor)


# What goes wrong


@contextmanager
def files_up_to(size_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("made_before", [False, True])
def test_a_file_that_may_not_grow_is_a_full_disk(store, made_before):
    kept, source = torch.full((1000,), 2.0), torch.full((MIB,), 3.0)
    store.add("kept", 1000, torch.float32)
    store.add("large", MIB, torch.float32)
    store.write("kept", kept)
    store.wait(kept)
    if made_before:
        read(store, "large", 1)
    with files_up_to(MIB):
        with pytest.raises(UserError, match=r"large: disk full \(.*; .* free in ") as found:
            store.write("large", source)
            store.wait(source)
    assert str(store.folder) in str(found.value)
    assert "\n" not in str(found.value)
    assert torch.equal(source, torch.full((MIB,), 3.0))
    assert torch.equal(read(store, "kept", 1000), kept)
    if made_before:
        # What follows is told, and keeps being told: it would read what is not there.
        for _ in range(2):
            with pytest.raises(UserError, match="disk full"):
                read(store, "large", MIB)


@pytest.fixture
def small_disk() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        options = ["-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]
        if os.geteuid() or subprocess.run(["mount", *options], capture_output=True).returncode:
            pytest.skip("needs the right to mount a file system")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def test_a_disk_that_fills_up_loses_nothing_that_was_there(small_disk):
    check_folder(small_disk, MIB // 2)
    with pytest.raises(UserError, match=r"2\.00 MiB needed, .* free"):
        check_folder(small_disk, 2 * MIB)
    store = FileStore(claim_folder(small_disk, "run"))
    kept, source = torch.arange(1000.0), torch.ones(MIB)
    store.add("kept", 1000, torch.float32)
    store.add("large", MIB, torch.float32)
    store.write("kept", kept)
    store.wait(kept)  # else the other may take the room first
    store.write("large", source)
    with pytest.raises(UserError, match=r"disk full \(No space left on device; 0 B free in "):
        store.wait(source)
    store.wait(kept)
    assert torch.equal(read(store, "kept", 1000), torch.arange(1000.0))
    store.close()
    assert not list(small_disk.iterdir())


@pytest.mark.parametrize(
    ("harm", "cause"),
    [
        (lambda path: os.truncate(path, 100), "it ends after 100 B, before 4000 B: it was cut"),
        (Path.unlink, "No such file or directory"),
    ],
    ids=["truncated", "removed"],
)
def test_a_file_that_something_harmed_is_named(store, harm, cause):
    store.add("a", 1000, torch.float32)
    source = torch.ones(1000)
    store.write("a", source)
    store.wait(source)
    harm(store.folder / "a")
    with pytest.raises(UserError, match=f"cannot read {store.folder / 'a'}: {cause}"):
        read(store, "a", 1000)
    store.wait(source)  # had ended well
    store.close()
    assert not store.folder.exists()


# The folder


def test_a_folder_that_will_not_do_is_refused_before(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"")
    for path, reason in ((tmp_path / "missing", "no such folder"), (file, "not a folder")):
        with pytest.raises(UserError, match=rf"offload\.nvme_dir={path}: {reason}: "):
            check_folder(path, 0)
    with pytest.raises(UserError, match=r"1024\.00 GiB needed, .* GiB free: make room"):
        check_folder(tmp_path, 2**40)
    check_folder(tmp_path, 1000)
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_that_may_not_be_written_to_is_refused():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o555)
        user = os.geteuid()
        if user == 0:  # root may write anywhere
            os.seteuid(NOBODY)
        try:
            with pytest.raises(UserError, match=r"cannot be written to \(Permission denied\)"):
                check_folder(folder, 0)
            with pytest.raises(UserError, match=r"cannot make .*: Permission denied"):
                claim_folder(folder, "run")
        finally:
            if user == 0:
                os.seteuid(user)
            folder.chmod(0o755)


def test_close_removes_everything_once_and_twice(tmp_path):
    folder = claim_folder(tmp_path, "a b/c")
    assert folder.name.startswith("memtrain-a_b_c-")
    stores = [FileStore(folder), FileStore(folder), FileStore(tmp_path / "plain")]
    sources = [torch.full((MIB,), float(i)) for i in range(3)]
    for i, (store, source) in enumerate(zip(stores, sources, strict=True)):
        store.add(f"{i}.weight", MIB, torch.float32)
        store.write(f"{i}.weight", source)
    stores[0].close()
    stores[0].close()
    assert torch.equal(read(stores[1], "1.weight", MIB), sources[1])  # one folder, two stores
    for store in stores:
        store.close()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_ours_stays(tmp_path):
    store = FileStore(tmp_path)
    store.add("a", 10, torch.float32)
    read(store, "a", 10)
    store.close()
    FileStore(tmp_path).close()
    assert tmp_path.is_dir()
    assert not list(tmp_path.iterdir())


CHILD = """
import sys, time
from pathlib import Path
import torch
from memtrain.memory.file_store import FileStore, claim_folder
store = FileStore(claim_folder(Path(sys.argv[1]), "child"))
store.add("a", 100_000, torch.float32)
source = torch.ones(100_000)
store.write("a", source)
store.wait(source)
print(store.folder, flush=True)
time.sleep(120)
"""


def test_a_killed_run_is_named_and_a_living_one_is_not(tmp_path):
    own = claim_folder(tmp_path, "own")
    (tmp_path / "memtrain-unmarked").mkdir()
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        folder = Path(child.stdout.readline().strip())
        assert folder.parent == tmp_path
        assert leftovers(tmp_path) == []
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    ((found, size_bytes),) = leftovers(tmp_path)
    assert found == folder
    assert 400_000 <= size_bytes < 500_000
    assert torch.equal(torch.from_file(str(folder / "a"), size=100_000), torch.ones(100_000))
    FileStore(own).close()
    assert not own.exists()


# The phantom


@pytest.mark.parametrize("phantom", [PhantomGPU, PhantomCPU])
def test_on_the_phantom_bytes_are_counted_and_no_file_is_touched(tmp_path, phantom):
    store = FileStore(tmp_path / "run")
    store.add("a", 10**12, torch.bfloat16)  # larger than any disk here
    with phantom() as gpu:
        buffer = torch.empty(1000, dtype=torch.bfloat16)
        store.write("a", buffer, offset=10**11)
        for n_reads in (1, 3):
            gpu.step_boundary()
            with gpu.phase("optimizer"):
                for _ in range(n_reads):
                    store.read("a", buffer[:500])
                    store.wait(buffer)
                    buffer.add_(1)
                    store.write("a", buffer)
    store.close()
    report = gpu.report()
    assert not list(tmp_path.iterdir())
    assert (report.nvme_read_bytes, report.nvme_written_bytes) == (3 * 1000, 3 * 2000)
    assert (report.h2d_bytes, report.d2h_bytes) == (0, 0)
    moved = [
        (op.name, op.phase, op.calls, op.moved_bytes) for op in report.ops if "nvme" in op.kind
    ]
    assert moved == [
        ("memtrain.file_read", "optimizer", 3, 3000),
        ("memtrain.file_write", "optimizer", 3, 6000),
    ]


def test_on_the_phantom_what_a_stream_still_fills_may_not_be_written(tmp_path):
    store = FileStore(tmp_path / "run")
    store.add("a", 1000, torch.float32)
    with PhantomGPU() as gpu:
        module = torch.get_device_module(gpu.device)
        on_device, host = torch.ones(1000, device=gpu.device), torch.empty(1000, pin_memory=True)
        side = module.Stream()
        side.wait_stream(module.current_stream())
        with module.stream(side):
            host.copy_(on_device, non_blocking=True)
        with pytest.raises(RaceError, match="file_write"):
            store.write("a", host)
        side.synchronize()
        store.write("a", host)
