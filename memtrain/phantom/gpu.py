"""`PhantomGPU` and `PhantomCPU`: run a program's own code, and learn what it would take."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import reduce, wraps
from typing import Any

import torch
from torch import _meta_registrations, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import _StopRecomputationError
from torch.utils.data import DataLoader

from memtrain.cards import Card, load_card
from memtrain.errors import UserError
from memtrain.phantom import autocast, backend
from memtrain.phantom.allocator import CachingAllocator, OutOfMemoryError
from memtrain.phantom.ledger import PAGEABLE, PHASES, PINNED
from memtrain.phantom.meter import Meter
from memtrain.phantom.report import CATEGORIES, HOST, OpUse, Report, peaks
from memtrain.phantom.streams import use_schedule


class _Phantom:
    """A meter, and a `with` block in which it measures."""

    device: torch.device

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self._stack: ExitStack | None = None
        self._last: tuple[dict[str, int], list[OpUse]] | None = None
        self._ended_out_of_memory = False

    def __enter__(self) -> Any:
        assert self._stack is None, "already entered"
        with ExitStack() as stack:
            self._prepare(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        assert self._stack is not None
        if isinstance(error, OutOfMemoryError):
            self._ended_out_of_memory = True
        stack, self._stack = self._stack, None
        try:
            self.meter.settle()
            self.meter.watch.mark_all()
        finally:
            stack.close()

    def _prepare(self, stack: ExitStack) -> None:
        if backend.active() is not None:
            raise UserError("a phantom is already in use: leave its `with` block first")
        meter = self.meter
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        backend.push(meter)
        stack.callback(backend.pop)
        stack.callback(use_schedule, use_schedule(meter.schedule))
        stack.enter_context(_quiet_log("torch._subclasses.fake_tensor"))
        for module in (torch.autograd, torch.autograd.graph):
            name = "_engine_run_backward"
            stack.enter_context(_patched(module, name, _run_backward(meter, getattr(module, name))))
        for name in ("register_hook", "register_post_accumulate_grad_hook"):
            register = _speaking(getattr(torch.Tensor, name))
            stack.enter_context(_patched(torch.Tensor, name, register))
        saved = torch.autograd.graph.saved_tensors_hooks  # a checkpoint recomputes in one of them
        stack.enter_context(_patched(saved, "__init__", _speaking(saved.__init__)))
        meter.watch.install()
        stack.callback(meter.watch.remove)
        stack.enter_context(_patched(torch.UntypedStorage, "resize_", _resize(meter)))
        stack.enter_context(_patched(nn.Module, "_apply", _apply))
        stack.enter_context(_patched(DataLoader, "_get_iterator", _in_process(DataLoader)))
        stack.enter_context(_patched(FakeTensor, "data", property(_get_data, _set_data)))
        meter.watch.on_new_root = _adapter_of_libraries(meter, stack.enter_context(ExitStack()))
        meter.watch.on_new_root()
        # In the caller's thread: the engine has no queue for a device it did not know at its start.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        eager = torch.compiler.set_stance("force_eager")  # what is measured is eager code
        stack.enter_context(eager)
        stack.enter_context(meter.fake)
        stack.enter_context(meter)

    def step_boundary(self) -> None:
        """A training step ends here: what moved and was computed is counted from zero again."""
        self.meter.settle()
        self.meter.ledger.steps.append(len(self.meter.ledger.events))
        self._last = self._moved()
        self.meter.begin_step()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside is `forward`, `backward`, `optimizer` or `other`, whatever it looks like."""
        _known(name, "phase", PHASES)
        before, self.meter.phase_name = self.meter.phase_name, name
        try:
            yield
        finally:
            self.meter.settle()
            self.meter.phase_name = before

    def label(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Say what `tensors` are, where it does not show (a hand-made optimizer's state)."""
        _known(category, "category", CATEGORIES)
        for t in tensors:
            self.meter.mark(t, category)

    def report(self) -> Report:
        """What was measured so far; after the `with` block, as it was at its end."""
        if self._stack is not None:
            self.meter.settle()
            self.meter.watch.mark_all()
        return _report(self.meter, self._fits(), *self._last_step())

    def _fits(self) -> bool:
        """What an error kept from being allocated is in no peak."""
        allocator = self.meter.ledger.allocator
        if allocator is None or allocator.capacity_bytes is None:
            return True
        within = allocator.peak_reserved_bytes <= allocator.capacity_bytes
        return within and not self._ended_out_of_memory

    def _last_step(self) -> tuple[dict[str, int], list[OpUse]]:
        """The step in progress, or the last one if none has begun."""
        moved, ops = self._moved()
        return (moved, ops) if ops or self._last is None else self._last

    def _moved(self) -> tuple[dict[str, int], list[OpUse]]:
        return dict(self.meter.moved), _ops(self.meter)


class PhantomGPU(_Phantom):
    """A GPU that is not there. `card` is a name of `conf/gpu` or a Card.

    `capacity_bytes` is what the allocator may reserve (the card's memory less the CUDA context);
    with `enforce_capacity=False` a run that does not fit goes on, and its report says so.
    Raises OutOfMemoryError, UnsupportedOperator and RaceError from the code that runs on it. Inside backward, torch's
    engine ends the process on any exception: out of memory and races are raised when it has returned, other exceptions
    (a hook's own) cannot be caught there.
    """

    def __init__(
        self,
        card: str | Card = "a100_80gb",
        *,
        capacity_bytes: int | None = None,
        expandable_segments: bool = False,
        enforce_capacity: bool = True,
    ) -> None:
        self.device = backend.register()
        if isinstance(card, str):
            card = _card(card)
        if not isinstance(card, Card):
            raise UserError(f"{card!r} is no card: give a name of conf/gpu or a Card")
        if capacity_bytes is None:
            capacity_bytes = card.memory_bytes - card.context_bytes
        if capacity_bytes < 1:
            raise UserError(f"capacity_bytes is {capacity_bytes}: give at least 1")
        allocator = CachingAllocator(capacity_bytes, expandable_segments, enforce_capacity)
        super().__init__(Meter(self.device.type, card, allocator))

    def _prepare(self, stack: ExitStack) -> None:
        autocast.clear_weight_cache()
        stack.callback(autocast.clear_weight_cache)
        autocast.on_weight_copy.append(lambda copy: self.meter.mark(copy, "weight_copies"))
        stack.callback(autocast.on_weight_copy.clear)
        clear = torch.clear_autocast_cache

        def clear_both() -> None:
            clear()
            autocast.clear_weight_cache()

        stack.enter_context(_patched(torch, "clear_autocast_cache", clear_both))
        hint = _as_on_cuda(self.device.type, _meta_registrations.device_hint)
        stack.enter_context(_patched(_meta_registrations, "device_hint", hint))
        for types in FOREACH_TYPES:
            types.append(FakeTensor)
            stack.callback(types.remove, FakeTensor)
        super()._prepare(stack)


class PhantomCPU(_Phantom):
    """The same meter over fake CPU tensors: the CPU's autocast and kernels, raw bytes."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        super().__init__(Meter("cpu"))


def _card(name: str) -> Card:
    try:
        return load_card(name)
    except ValueError as error:
        raise UserError(str(error)) from None


def _known(name: str, what: str, names: tuple[str, ...]) -> None:
    if name not in names:
        raise UserError(f"unknown {what} {name!r}: choose one of {', '.join(names)}")


_MISSING = object()


@contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` inside, and afterwards what it was (inherited included)."""
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def _quiet_log(name: str) -> Iterator[None]:
    """FakeTensorMode logs a traceback before it raises what the meter says in one line."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _as_on_cuda(device_type: str, device_hint: Any) -> Any:
    """Shape functions that ask for the device, of which some give other strides, answer as for CUDA."""

    def hint(t: Any) -> str:
        name: str = device_hint(t)
        return "cuda" if name == device_type else name

    return hint


def _run_backward(meter: Meter, run: Any) -> Any:
    """Backward, after which is raised what could not be raised inside it."""

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        outermost = torch._C._current_graph_task_id() == -1
        out = run(*args, **kwargs)
        if outermost:
            meter.raise_deferred()
        return out

    return run_backward


def _speaking(register: Any) -> Any:
    """`register` of hooks whose error inside backward is told: torch's engine loses it, or ends the process on it."""

    def told(hook: Any) -> Any:
        @wraps(hook)
        def run(*args: Any) -> Any:
            try:
                return hook(*args)
            except _StopRecomputationError:  # how checkpoint ends what it repeats
                raise
            except Exception:
                if backend.active() is not None and torch._C._current_graph_task_id() != -1:
                    traceback.print_exc()
                raise

        return run

    def register_told(owner: Any, *hooks: Any, **named: Any) -> Any:
        named = {name: told(hook) for name, hook in named.items()}
        return register(owner, *map(told, hooks), **named)

    return register_told


def _resize(meter: Meter) -> Any:
    """`UntypedStorage.resize_` does not pass the dispatcher, and FSDP frees by it."""
    resize = torch.UntypedStorage.resize_

    def resize_(self: Any, size_bytes: int) -> Any:
        out = resize(self, size_bytes)
        meter.resized(self)
        return out

    return resize_


def _in_process(loader_class: Any) -> Any:
    """Batches are made here: a worker's tensors are real, and arrive by no operator.

    What workers would hold ahead of time is not counted.
    """
    get_iterator = loader_class._get_iterator

    def run(loader: Any) -> Any:
        chosen = loader.num_workers, loader.timeout
        loader.num_workers = loader.timeout = 0
        try:
            return get_iterator(loader)
        finally:
            loader.num_workers, loader.timeout = chosen

    return run


def _adapter_of_libraries(meter: Meter, stack: ExitStack) -> Callable[[], None]:
    """Called again and again, patches each of these modules once, when it has been imported, until `stack` ends."""
    waiting = dict(LIBRARIES)

    def adapt() -> None:
        for name in waiting.keys() & sys.modules.keys():
            path, change = waiting.pop(name)
            *owners, attribute = path.split(".")
            owner = reduce(getattr, owners, sys.modules[name])
            if hasattr(owner, attribute):
                value = change(meter, getattr(owner, attribute))
                stack.enter_context(_patched(owner, attribute, value))

    return adapt


def _one_sequence_a_row(meter: Meter, find_packed_sequence_indices: Any) -> Any:
    """Positions have no data here in which a second sequence could be found.

    transformers takes tensors without data for a graph that is traced, and would make a mask, which no flash kernel
    takes, where a run makes none.
    """
    return lambda position_ids: None


def _with_data(meter: Meter, load_file: Any) -> Any:
    """What is in a file is real, and counted when it is used; as a storage without data it cannot be read."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return load_file(*args, **kwargs)

    return run


def _quiet(meter: Meter, function: Any) -> Any:
    """`function` without counting what it makes."""

    def run(*args: Any, **kwargs: Any) -> Any:
        meter.paused = True
        try:
            return function(*args, **kwargs)
        finally:
            meter.paused = False

    return run


LIBRARIES = {
    "torch.distributed.tensor._sharding_prop": (
        "ShardingPropagator._propagate_tensor_meta_non_cached",
        _quiet,
    ),
    "transformers.masking_utils": ("find_packed_sequence_indices", _one_sequence_a_row),
    "safetensors.torch": ("load_file", _with_data),
}
"""Code of others that does something else with tensors without data: module, function, and what stands for it."""

FOREACH_TYPES: tuple[list[Any], ...] = (
    optimizer._foreach_supported_types,
    _foreach_utils._foreach_supported_types,
)
"""The tensors that optimizers and clipping take by the list unless told otherwise, as they do on CUDA."""

HOOK_DICTS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_tensor_data: Any = torch.Tensor.data


def _get_data(self: Any) -> Any:
    return _tensor_data.__get__(self)


def _set_data(self: Any, value: Any) -> None:
    """`parameter.data = value` moves the parameter to where `value` is."""
    _tensor_data.__set__(self, value)
    if isinstance(value, FakeTensor):
        self.fake_device = value.fake_device


def _apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
    """`nn.Module._apply` as between CPU and CUDA: parameters keep their identity.

    Only those on meta are replaced, tied ones by one parameter.
    """
    moved: dict[int, nn.Parameter] = {}
    modules = list(self.modules()) if recurse else [self]
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = _move(parameter, fn, moved)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
    return self


def _move(parameter: Any, fn: Any, moved: dict[int, nn.Parameter]) -> Any:
    if id(parameter) in moved:
        return moved[id(parameter)]
    with torch.no_grad():
        applied = fn(parameter)
        grad = None if parameter.grad is None else fn(parameter.grad)
    if applied is parameter:
        target = parameter
    elif parameter.device.type == "meta":
        target = nn.Parameter(applied, parameter.requires_grad)
    elif isinstance(parameter, FakeTensor):
        parameter.data = applied
        target = parameter
    else:
        target = _become(parameter, nn.Parameter(applied, parameter.requires_grad))
    if grad is not None:
        target.grad = grad
    meter = backend.active()
    if meter is not None:
        meter.mark(target, "weights")
    moved[id(parameter)] = target
    return target


def _become(parameter: Any, fake: Any) -> Any:
    """`parameter`, the same object, as the tensor `fake` is; its hooks and attributes stay.

    `torch.utils.swap_tensors` refuses what something refers to weakly, and leaves the hooks to
    the tensor that goes: a dict of hooks must be set again to reach the new one.
    """
    hooks = {name: getattr(parameter, name) for name in HOOK_DICTS}
    attributes = {**vars(parameter), **vars(fake)}
    parameter.__class__ = type(fake)
    torch._C._swap_tensor_impl(parameter, fake)
    vars(parameter).update(attributes)
    for name, registered in hooks.items():
        if registered is not None:
            setattr(parameter, name, registered)
    return parameter


def _ops(meter: Meter) -> list[OpUse]:
    totals: dict[tuple[Any, ...], list[int]] = {}
    for entry in (*meter.entries.values(), *meter.rare_entries.values()):
        for phase, calls in zip(PHASES, entry.calls, strict=True):
            if calls and not entry.views:
                key = (entry.name, phase, entry.dtype, entry.kind, entry.on_device)
                total = totals.setdefault(key, [0, 0, 0])
                total[0] += calls
                total[1] += calls * entry.flops
                total[2] += calls * entry.moved_bytes
    return [OpUse(*key, *total) for key, total in sorted(totals.items())]


def _report(meter: Meter, fits: bool, moved: dict[str, int], ops: list[OpUse]) -> Report:
    ledger, allocator = meter.ledger, meter.ledger.allocator
    phases, timeline, maxima = peaks(ledger)
    top = phases.get(maxima.phase)
    host_phases, host_timeline, host_maxima = peaks(ledger, HOST)
    host_top = host_phases.get(host_maxima.phase)
    allocated = top.allocated_bytes if top else 0
    reserved = allocator.peak_reserved_bytes if allocator else allocated
    return Report(
        card=meter.card.name if meter.card else meter.device_type,
        capacity_bytes=meter.capacity_bytes,
        fits=fits,
        peak_allocated_bytes=allocated,
        peak_active_bytes=allocator.peak_active_bytes if allocator else allocated,
        peak_reserved_bytes=reserved,
        end_allocated_bytes=maxima.end_bytes,
        peak_phase=top.phase if top else "other",
        peak_step=maxima.step_of(top.event) if top else 0,
        categories=top.categories if top else {},
        modules_at_peak=top.modules if top else {},
        phases=phases,
        step_peak_bytes=maxima.steps,
        timeline=timeline,
        fragmentation_bytes=allocator.fragmentation_bytes if allocator else 0,
        largest_free_block_bytes=allocator.largest_free_block_bytes if allocator else 0,
        host_peak_bytes=host_top.allocated_bytes if host_top else 0,
        host_pageable_peak_bytes=ledger.peak[PAGEABLE],
        host_pinned_peak_bytes=ledger.peak[PINNED],
        host_end_bytes=host_maxima.end_bytes,
        host_peak_phase=host_top.phase if host_top else "other",
        host_categories=host_top.categories if host_top else {},
        host_modules=host_top.modules if host_top else {},
        host_timeline=host_timeline,
        h2d_bytes=moved["h2d"],
        d2h_bytes=moved["d2h"],
        nvme_read_bytes=moved["nvme_read"],
        nvme_written_bytes=moved["nvme_write"],
        ops=ops,
    )
