"""What torch and other libraries do otherwise while tensors have no data: patched inside the `with` block."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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

from memtrain.phantom import arrivals, autocast, backend
from memtrain.phantom.meter import Meter

FOREACH_TYPES: tuple[list[Any], ...] = (
    optimizer._foreach_supported_types,
    _foreach_utils._foreach_supported_types,
)
"""The tensors that optimizers and clipping take by the list unless told otherwise, as they do on CUDA."""

Patch = tuple[Any, str, Any]
"""An object, the name of its attribute, and what stands there instead."""


def patch(meter: Meter, stack: ExitStack) -> None:
    """Until `stack` ends."""
    # FakeTensorMode logs a traceback before it raises what the meter says in one line.
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    stack.callback(logger.setLevel, logger.level)
    logger.setLevel(logging.CRITICAL)
    for owner, name, value in _of_torch(meter):
        _put(stack, owner, name, value)
    meter.watch.on_new_root = _adapter_of_libraries(meter, stack.enter_context(ExitStack()))
    meter.watch.on_new_root()


def behave_as_cuda(meter: Meter, stack: ExitStack) -> None:
    """Autocast's weight cache, shape functions and lists of tensors, until `stack` ends."""
    autocast.clear_weight_cache()
    stack.callback(autocast.clear_weight_cache)
    autocast.on_weight_copy.append(lambda copy: meter.mark(copy, "weight_copies"))
    stack.callback(autocast.on_weight_copy.clear)
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        clear()
        autocast.clear_weight_cache()

    _put(stack, torch, "clear_autocast_cache", clear_both)
    is_enabled = torch.is_autocast_enabled

    def is_autocast_enabled(*device_type: str) -> bool:
        """Without a device it asks for CUDA's, as peft and apex do."""
        return is_enabled(*(device_type or (meter.device_type,)))

    _put(stack, torch, "is_autocast_enabled", is_autocast_enabled)
    hint = _as_on_cuda(meter.device_type, _meta_registrations.device_hint)
    _put(stack, _meta_registrations, "device_hint", hint)
    for types in FOREACH_TYPES:
        types.append(FakeTensor)
        stack.callback(types.remove, FakeTensor)


def _of_torch(meter: Meter) -> Iterator[Patch]:
    for module in (torch.autograd, torch.autograd.graph):
        name = "_engine_run_backward"
        yield module, name, _run_backward(meter, getattr(module, name))
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        yield torch.Tensor, name, _speaking(getattr(torch.Tensor, name))
    saved = torch.autograd.graph.saved_tensors_hooks  # a checkpoint recomputes in one of them
    yield saved, "__init__", _speaking(saved.__init__)
    yield torch.UntypedStorage, "resize_", _resize(meter)
    yield nn.Module, "_apply", arrivals.apply
    yield DataLoader, "_get_iterator", _in_process(DataLoader)
    yield FakeTensor, "data", arrivals.data


def _put(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """`owner.name` is `value` until `stack` ends, and then what it was (inherited included)."""
    if name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)


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
            meter.failures.raise_kept()
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
                _put(stack, owner, attribute, value)

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
