"""The device "phantom": PyTorch's spare device key, registered from Python, once per process.

`torch.get_device_module("phantom")` is the part of `torch.cuda` that trainers call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from memtrain.errors import UserError
from memtrain.phantom import autocast, operators, streams
from memtrain.phantom.ledger import page_bytes, pinned_block_bytes
from memtrain.phantom.streams import schedule

if TYPE_CHECKING:
    from memtrain.phantom.meter import Meter

DEVICE_TYPE = "phantom"

_libraries: list[Any] = []  # what is registered lives as long as these do
_meters: list[Meter] = []  # the run in progress is the last


def active() -> Meter | None:
    return _meters[-1] if _meters else None


def push(meter: Meter) -> None:
    _meters.append(meter)


def pop() -> None:
    _meters.pop()


def register() -> torch.device:
    """Register the device, its autocast rules and its kernels; again is a no-op.

    Raises UserError if another package holds the spare device key.
    """
    if not _libraries:
        name = torch._C._get_privateuse1_backend_name()
        if name not in ("privateuseone", DEVICE_TYPE):
            raise UserError(
                f"torch's spare device key already belongs to {name!r}: run the phantom in a "
                "process without that backend"
            )
        from torch.utils import backend_registration

        backend_registration._setup_privateuseone_for_python_backend(
            DEVICE_TYPE, backend_module=DeviceModule()
        )
        _register_operators()
    return torch.device(DEVICE_TYPE, 0)


def _register_operators() -> None:
    rest: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    rest.fallback(torch.library.fallthrough_kernel, autocast.KEY)
    rest.fallback(_refuse, "PrivateUse1")
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    autocast.register(library, DEVICE_TYPE)
    operators.register(library, compute_capability, _refuse)
    _libraries.extend([rest, library])


def _refuse(operator: Any, *args: Any, **kwargs: Any) -> Any:
    raise UserError(
        f"{operator} ran on the phantom outside the `with` block or in another thread: "
        "run it inside, in the thread that entered"
    )


def compute_capability() -> float:
    meter = active()
    return 8.0 if meter is None else meter.compute_capability


class DeviceModule:
    """What `torch.get_device_module("phantom")` answers."""

    Stream = streams.Stream
    Event = streams.Event
    StreamContext = streams.Stream

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def init(self) -> None:
        """Nothing to do."""

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        """There is one."""

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    def get_device_name(self, device: Any = None) -> str:
        meter = active()
        return meter.card.name if meter is not None and meter.card is not None else DEVICE_TYPE

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        major, minor = str(compute_capability()).split(".")
        return int(major), int(minor)

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        """As `torch.cuda.is_bf16_supported`: every card emulates it, from 8.0 on they have it."""
        return including_emulation or compute_capability() >= 8.0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    # Streams

    def current_stream(self, device: Any = None) -> streams.Stream:
        return schedule().current

    def default_stream(self, device: Any = None) -> streams.Stream:
        return schedule().default

    def set_stream(self, stream: streams.Stream) -> None:
        schedule().stack[:] = [stream]

    @contextmanager
    def stream(self, stream: streams.Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        with stream:
            yield

    def synchronize(self, device: Any = None) -> None:
        schedule().synchronize()

    def page_locked_empty(self, n_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A pinned buffer that is not of torch's pool (cudaHostRegister): it takes whole pages."""
        meter = active()
        assert meter is not None, "outside the phantom's block there is no host to count"
        meter.ledger.pinned_bytes = page_bytes
        try:
            return torch.empty(n_elements, dtype=dtype, device="cpu", pin_memory=True)
        finally:
            meter.ledger.pinned_bytes = pinned_block_bytes

    # Random numbers: none are drawn

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8, device="cpu")

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """No generator."""

    def manual_seed(self, seed: int) -> None:
        """No generator."""

    def manual_seed_all(self, seed: int) -> None:
        """No generator."""

    def initial_seed(self) -> int:
        return 0

    # Memory statistics, of the run in progress

    def memory_allocated(self, device: Any = None) -> int:
        return _statistic("allocated_bytes")

    def max_memory_allocated(self, device: Any = None) -> int:
        return _statistic("peak_allocated_bytes")

    def memory_reserved(self, device: Any = None) -> int:
        return _statistic("reserved_bytes")

    def max_memory_reserved(self, device: Any = None) -> int:
        return _statistic("peak_reserved_bytes")

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        meter = active()
        if meter is not None:
            meter.settle()
            meter.ledger.reset_peak()

    def empty_cache(self) -> None:
        meter = active()
        if meter is not None and meter.ledger.allocator is not None:
            meter.settle()
            meter.ledger.allocator.empty_cache()

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        meter = active()
        total_bytes = meter.capacity_bytes if meter is not None else None
        return (total_bytes or 0) - _statistic("reserved_bytes"), total_bytes or 0

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """The keys of `torch.cuda.memory_stats` that have a meaning here."""
        stats = {}
        for name in ("allocated_bytes", "active_bytes", "reserved_bytes"):
            stats[f"{name}.all.current"] = _statistic(name)
            stats[f"{name}.all.peak"] = _statistic(f"peak_{name}")
        return {
            **stats,
            "num_alloc_retries": _statistic("alloc_retries"),
            "num_ooms": _statistic("ooms"),
        }


def _statistic(attribute: str) -> int:
    meter = active()
    if meter is None or meter.ledger.allocator is None:
        return 0
    meter.settle()
    value: int = getattr(meter.ledger.allocator, attribute)
    return value
