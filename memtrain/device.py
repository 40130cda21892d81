"""The device a run uses, through torch's device modules: the CPU, CUDA and a phantom run the same lines."""

import ctypes
import mmap
import os
import re
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from memtrain.errors import UserError
from memtrain.units import format_bytes

_ALLOCATOR_KEYS = {
    "allocated_bytes.all.peak": "peak_allocated_bytes",
    "active_bytes.all.peak": "peak_active_bytes",
    "reserved_bytes.all.peak": "peak_reserved_bytes",
    "num_alloc_retries": "alloc_retries",
    "num_ooms": "ooms",
}


def select_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one.

    Raises UserError for `cuda` on a machine without, and where torch's pinned pool is told what breaks it.
    """
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise UserError("device=cuda: torch sees no CUDA GPU here; use device=cpu or device=auto")
    device = torch.device("cuda" if has_cuda and name != "cpu" else "cpu")
    if device.type == "cuda":
        _refuse_a_pool_that_overruns()
    return device


def _refuse_a_pool_that_overruns() -> None:
    """torch 2.13 keeps pinned blocks in bins by power of two and hands out any block of a bin, whatever its size: right
    only as long as all that it keeps are rounded up (ATen/core/CachingHostAllocator.h; mended in 2.14,
    https://github.com/pytorch/pytorch/pull/192722). Earlier versions do not know the settings.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    name = next((name for name in names if name in os.environ), None)
    if name is None or not torch.__version__.startswith("2.13."):
        return
    rounded, kept = (
        float(found[1]) if (found := re.search(rf"{key}:(\d+)", os.environ[name])) else float("inf")
        for key in ("pinned_max_round_threshold_mb", "pinned_max_cached_size_mb")
    )
    if rounded < kept:
        raise UserError(
            f"{name}: with pinned_max_round_threshold_mb torch {torch.__version__} gives pinned buffers less memory "
            "than they ask for; remove it, set pinned_max_cached_size_mb to the same, or use torch 2.14"
        )


def device_module(device: torch.device) -> ModuleType:
    """torch.cuda, torch.cpu or the phantom's module."""
    module: ModuleType = torch.get_device_module(device)
    return module


def pinned_empty(n_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(n_elements,) in host memory that `device` reads and writes by itself, in whole pages; plain memory for the CPU.

    Not of torch's pinned pool, which rounds each buffer up to a power of two (ATen/core/CachingHostAllocator.h) and
    keeps what is let go. Whoever fills it again waits for the copies before. Raises RuntimeError where the machine
    refuses.
    """
    if device.type == "cpu" or not n_elements:
        return torch.empty(n_elements, dtype=dtype, device="cpu")
    if device.type == "cuda":
        return _page_locked(n_elements, dtype)
    empty: Tensor = device_module(device).page_locked_empty(n_elements, dtype)
    return empty


def _page_locked(n_elements: int, dtype: torch.dtype) -> Tensor:
    """Pages of this process that CUDA locks: for torch they are pinned, as cudaPointerGetAttributes says so.

    CUDA Runtime API, 6.9 (Memory Management): cudaHostRegister, cudaHostUnregister.
    """
    size_bytes = n_elements * dtype.itemsize
    try:
        pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no {format_bytes(size_bytes)} of host memory") from error
    owner = memoryview(pages)  # the tensor's storage keeps it
    buffer = torch.frombuffer(owner, dtype=dtype)
    portable = 1  # cudaHostRegisterPortable: pinned for every CUDA context
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(cudart.cudaHostRegister(buffer.data_ptr(), size_bytes, portable))
    if code:
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")  # CUDA tells the next launch again, and only once
        raise RuntimeError(
            f"CUDA error {code}: cannot pin {format_bytes(size_bytes)} of host memory"
        )
    release = weakref.finalize(owner, _unlock, cudart, buffer.data_ptr(), pages)
    release.atexit = False  # the driver does it
    return buffer


def _unlock(cudart: Any, address: int, pages: mmap.mmap) -> None:
    """Before `pages` are unmapped, which this call keeps alive, and after the copies that use them."""
    with suppress(RuntimeError):  # of an earlier kernel: whoever waits for that raises it
        torch.cuda.synchronize()
    cudart.cudaHostUnregister(address)


def allocator_statistics(device: torch.device) -> dict[str, int]:
    """Peaks in bytes, retries and OOMs since the last reset; empty where the device counts none."""
    module = device_module(device)
    if not hasattr(module, "memory_stats"):
        return {}
    statistics = module.memory_stats(device)
    return {ours: int(statistics.get(theirs, 0)) for theirs, ours in _ALLOCATOR_KEYS.items()}


def reset_peaks(device: torch.device) -> None:
    module = device_module(device)
    if hasattr(module, "reset_peak_memory_stats"):
        module.reset_peak_memory_stats(device)


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Autocast to `dtype`; None computes in the weights' own type.

    Without autocast's cache of weight copies: each weight is used once per forward pass, so it would only hold memory.
    """
    if dtype is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype, cache_enabled=False)


def host_memory_bytes() -> int:
    """What this process has in memory now, pages of mapped files left out: the kernel drops those when it needs room.

    VmRSS without RssFile (proc(5)): anonymous memory, and what is shared or lies in a tmpfs.
    """
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    kib = (int(fields.get(name, "0 kB").split()[0]) for name in ("VmRSS", "RssFile"))
    return (next(kib) - next(kib)) * 1024


_peak_lock = threading.Lock()
_peak_bytes = 0


def host_peak_bytes() -> int:
    """The most of `host_memory_bytes` that was seen since `host_peak_watched` began."""
    global _peak_bytes
    with _peak_lock:
        _peak_bytes = max(_peak_bytes, host_memory_bytes())
        return _peak_bytes


@contextmanager
def host_peak_watched(interval_s: float = 0.02) -> Iterator[None]:
    """Let the peak count from here on. What malloc holds free is given back first (malloc_trim(3)).

    A thread looks every `interval_s`, for the kernel's own peak (VmHWM) counts the pages of files: what comes and goes
    between two looks is missed.
    """
    global _peak_bytes
    libc, over = ctypes.CDLL(None), threading.Event()
    if hasattr(libc, "malloc_trim"):  # glibc's
        libc.malloc_trim(0)
    _peak_bytes = 0

    def watch() -> None:
        while not over.wait(interval_s):
            host_peak_bytes()

    watcher = threading.Thread(target=watch, name="host peak", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({torch.get_num_threads()} threads)"


def free_host_bytes() -> int:
    """Host memory that a run can still take: what the machine has available, or what its container is allowed."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    limit, used = (_cgroup_bytes(name) for name in ("memory.max", "memory.current"))
    return free if limit is None or used is None else min(free, max(0, limit - used))


def _cgroup_bytes(name: str) -> int | None:
    """A figure of this process's cgroup (v2); None where there is no limit."""
    path = Path("/sys/fs/cgroup") / name
    text = path.read_text(encoding="ascii").strip() if path.exists() else "max"
    return int(text) if text.isdigit() else None


def placed(state: Mapping[str, Tensor], target: Tensor, fused: bool) -> dict[str, Any]:
    """A saved state as the optimizer of `target` keeps it: there, in its type, without the master of another mode.

    Step counts stay on the host unless the kernel reads them (torch.optim.Optimizer.load_state_dict); what an optimizer
    keeps in 8 bits stays so; a whole number is a number.
    """
    found: dict[str, Any] = {}
    for name, value in state.items():
        if name == "master":
            continue
        if value.ndim == 0 and not value.is_floating_point():
            found[name] = int(value)
        elif name == "step":
            found[name] = value.to(target.device if fused else "cpu", copy=True)
        elif value.shape == target.shape and value.is_floating_point():
            found[name] = value.to(target.device, target.dtype, copy=True)
        else:
            found[name] = value.to(target.device, copy=True)
    return found


def recorded(module: Any, stream: Any) -> Any:
    """An event of `module`'s on `stream`, now; torch.cpu's streams give none by themselves."""
    event = module.Event()
    event.record(stream)
    return event


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Of the host's generator and the device's, by device type."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = device_module(device).get_rng_state().cpu()
    return states


def set_random_states(device: torch.device, states: Mapping[str, Tensor]) -> None:
    """The device's stays as it is where `states` have none of its type."""
    torch.set_rng_state(states["cpu"])
    if device.type in states and device.type != "cpu":
        device_module(device).set_rng_state(states[device.type])
