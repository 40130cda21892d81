"""The device a run uses, through torch's device modules: the CPU, CUDA and a phantom run the same lines."""

import ctypes
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from memtrain.errors import UserError

_ALLOCATOR_KEYS = {
    "allocated_bytes.all.peak": "peak_allocated_bytes",
    "active_bytes.all.peak": "peak_active_bytes",
    "reserved_bytes.all.peak": "peak_reserved_bytes",
    "num_alloc_retries": "alloc_retries",
    "num_ooms": "ooms",
}


def select_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises UserError for `cuda` on a machine without."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise UserError("device=cuda: torch sees no CUDA GPU here; use device=cpu or device=auto")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def device_module(device: torch.device) -> ModuleType:
    """torch.cuda, torch.cpu or the phantom's module."""
    module: ModuleType = torch.get_device_module(device)
    return module


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


def host_memory_bytes(field: str) -> int:
    """`VmHWM` (peak) or `VmRSS` (now) of this process. Unlike ru_maxrss, not inherited from the parent."""
    for line in (
        Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    ):
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def reset_host_peak() -> None:
    """Let the peak count from here on: what malloc holds free is given back (malloc_trim(3)), `VmHWM` set (proc(5))."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc's
        libc.malloc_trim(0)
    with suppress(OSError):  # where a container does not allow it
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


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
