"""The mode that sees every operator: it makes the tensors, and counts what they take and cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from memtrain.cards import Card
from memtrain.phantom import dispatch, operators
from memtrain.phantom.allocator import CachingAllocator
from memtrain.phantom.arguments import asks_for_pinned, only_views, result_tensors
from memtrain.phantom.dispatch import Entry
from memtrain.phantom.failures import Failures
from memtrain.phantom.fakes import FakeMode, Fakes
from memtrain.phantom.kernels import RESULTS
from memtrain.phantom.ledger import BACKWARD, FORWARD, OPTIMIZER, OTHER, PHASES, Ledger
from memtrain.phantom.modules import ModuleWatch
from memtrain.phantom.races import Races
from memtrain.phantom.shapes import Template, make_tensor
from memtrain.phantom.storages import Storages
from memtrain.phantom.streams import HOST, Schedule
from memtrain.phantom.values import Values

aten = torch.ops.aten
DEVICE_OF = torch.ops.prim.device.default
LIFTS = {aten.lift_fresh.default, aten.lift_fresh_copy.default}  # `torch.tensor(3.0)`: a constant
RESIZERS = {  # operators that change the storage of a tensor that exists
    aten.resize_.default,
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
    aten.set_.source_Tensor,
    aten.set_.default,
}


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that run under it, by phase; what they take it leaves to `storages`.

    `device_type` is what counts as the device: "phantom", or "cpu" (then there is no host).
    """

    def __init__(
        self,
        device_type: str,
        card: Card | None = None,
        allocator: CachingAllocator | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type = device_type
        self.card = card
        self.capacity_bytes = allocator.capacity_bytes if allocator is not None else None
        self.compute_capability = 8.0 if card is None else card.compute_capability
        self.keys_of = None if device_type == "cpu" else torch.device(device_type, 0)
        self.entries: dict[Any, Entry] = {}
        self.rare_entries: dict[Any, Entry] = {}
        self.phase_name = ""
        """Set by `PhantomGPU.phase`: overrides what the hooks tell."""
        self.paused = False
        """Nothing counts: DTensor asks for a shape by making tensors of it."""
        self._in_forward = False
        self._task = -1
        self._task_depth = 0
        self._compose(allocator)

    def _compose(self, allocator: CachingAllocator | None) -> None:
        self.ledger = ledger = Ledger(allocator)
        self.schedule = schedule = Schedule()
        self.fake = fake = FakeMode()
        self.failures = failures = Failures()
        self.watch = watch = ModuleWatch(self._start_forward)
        self.races = races = Races(self.device_type, ledger, schedule, watch, failures)
        self.storages = Storages(self.device_type, fake, ledger, schedule, watch, races, failures)
        self.mark = watch.mark = self.storages.mark
        self.fakes = Fakes(fake, self.keys_of, self.storages, watch)
        self.values = Values(self.device_type, schedule, watch, races)
        schedule.on_order = self._ordered
        if allocator is not None:
            allocator.synchronize = lambda: self.storages.retire(finished=True)
        on_cuda = operators.composites(lambda: self.compute_capability)
        self._composites = {} if self.keys_of is None else on_cuda
        self._handlers: dict[Any, Callable[..., Any]] = {
            aten._local_scalar_dense.default: self._item,
            aten.is_pinned.default: lambda t, device=None: ledger.is_pinned(t),
            aten._pin_memory.default: self._pin_memory,
            aten.record_stream.default: self.storages.record_stream,
            aten.equal.default: lambda a, b: False,
        }

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no wrapper around __torch_dispatch__: it costs as much as an operator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is DEVICE_OF:
            return args[0].fake_device
        for kind in types:
            if kind is not FakeTensor:
                return NotImplemented  # a wrapper subclass: its own operators come back here
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        self.settle()
        key = dispatch.metadata_key(func, args, kwargs, self.fake)
        entry = self.entries.get(key) if key is not None else None
        if entry is None:
            return self._first(func, args, kwargs, key)
        if self.schedule.tracking and not entry.views:
            self.races.check(func, args, kwargs)
        out = self._replay(entry, args, kwargs)
        self._account(entry, func, args, kwargs, out)
        return out

    # What runs when

    def settle(self) -> None:
        """Enter what was freed since, then the phase that has begun since."""
        if self.ledger.dead:
            self.storages.bury()
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._turn(task)
        repeated = task != -1 and len(self.watch.stack) > self._task_depth
        phase, last = self._phase(task), self.ledger.spans[-1]
        if phase != last.phase or repeated != last.repeated:
            self.ledger.enter_span(phase, repeated)

    def _phase(self, task: int) -> str:
        if self.phase_name:
            return self.phase_name
        if self.watch.optimizers:
            self._in_forward = False
            self.values.n_read = 0
            return OPTIMIZER
        if task != -1:
            return BACKWARD
        return FORWARD if self._in_forward or self.watch.stack else OTHER

    def _turn(self, task: int) -> None:
        """A backward begins or ends. Autograd has then ordered its streams after the others."""
        self._task = task
        self._task_depth = len(self.watch.stack)
        self._in_forward = False
        self.values.n_read = 0
        if self.schedule.tracking:
            self.schedule.join(self.schedule.current)

    def _start_forward(self) -> None:
        self.settle()  # a backward that has ended is seen now, not after the forward has begun
        if torch.is_grad_enabled():
            self._in_forward = True

    def _ordered(self) -> None:
        self.settle()
        self.storages.retire()

    def begin_step(self) -> None:
        self.settle()
        self._in_forward = False
        for entry in self.all_entries():
            entry.calls = [0, 0, 0, 0]

    def all_entries(self) -> list[Entry]:
        return [*self.entries.values(), *self.rare_entries.values()]

    # Running one operator

    def _first(self, func: Any, args: Any, kwargs: Any, key: Any) -> Any:
        """Through FakeTensorMode, and from there into the table."""
        if func.namespace == "profiler":
            return func(*args, **kwargs)  # record_function: no tensors
        if func not in RESULTS and self._is_composite(func):
            with self:  # inference mode: what autograd would have taken apart
                return self._composites.get(func, func.decompose)(*args, **kwargs)
        if func not in LIFTS:
            args, kwargs = self.fakes.faked(func, args, kwargs)
        if self.schedule.tracking and not only_views(func):
            self.races.check(func, args, kwargs)
        out = self.fakes.run(func, args, kwargs)
        entry = dispatch.describe(func, args, kwargs, out, self.device_type)
        if key is not None and dispatch.replayable(entry, func, args, kwargs, out):
            self.entries[key] = entry
        else:
            entry = self._rare(entry, func)
        if func in RESIZERS:
            self.resized(args[0].untyped_storage())
        pinned = asks_for_pinned(args, kwargs)
        for t in result_tensors(out):
            self.storages.see_if_new(t, entry.name, pinned)
        self._account(entry, func, args, kwargs, out)
        return out

    def _is_composite(self, func: Any) -> bool:
        has_kernel, name = torch._C._dispatch_has_kernel_for_dispatch_key, func.name()
        return (
            torch.is_inference_mode_enabled()
            and has_kernel(name, "CompositeImplicitAutograd")
            and not has_kernel(name, "CPU" if self.keys_of is None else "PrivateUse1")
        )

    def _rare(self, entry: Entry, func: Any) -> Entry:
        """Calls that are not replayed share one entry per operator and cost."""
        key = (func, entry.kind, entry.flops, entry.moved_bytes, entry.dtype, entry.on_device)
        known = self.rare_entries.setdefault(key, entry)
        entry.calls = known.calls
        return entry

    def _replay(self, entry: Entry, args: Any, kwargs: Any) -> Any:
        if entry.returns_arg is not None:
            return args[entry.returns_arg]
        if not entry.results:
            return None if entry.container is None else entry.container()
        base = args[0] if args else None
        pinned = bool(kwargs) and asks_for_pinned(args, kwargs)
        made = []
        for template in entry.results:
            if type(template) is Template:
                t = make_tensor(self.fake, self.keys_of, template, base)
                if template.offset is None:
                    self.storages.see(t, entry.name, pinned)
                made.append(t)
            else:
                made.append(template)
        return made[0] if entry.container is None else entry.container(made)

    def _account(self, entry: Entry, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        span = self.ledger.spans[-1]
        entry.calls[PHASES.index(span.phase)] += 1
        if self.card is not None:
            if entry.cublas:
                self.storages.take_workspace(self.card.workspace_bytes, self._task != -1)
            if entry.temporaries:
                self.storages.take_temporaries(entry.temporaries, entry.name)
        if self.schedule.tracking and not entry.views:
            self.races.note(entry, func, args, kwargs, out)

    # What is not an operator of the table

    def _item(self, t: Any) -> Any:
        """A constant's value; there is no data for any other tensor."""
        if type(t) is not FakeTensor or t.constant is not None:
            return aten._local_scalar_dense.default(t)
        self.settle()
        return self.values.item(t)

    def _pin_memory(self, t: Any, device: Any = None) -> Any:
        self.settle()
        if self.schedule.tracking:
            self.races.check_read(t, HOST, "pin_memory")
        args, _ = self.fakes.faked(aten._pin_memory.default, (t,), {})
        out = self.fakes.rekeyed(aten.clone.default(args[0]), args)
        self.storages.see(out, "aten._pin_memory", pinned=True)
        return out

    def resized(self, storage: Any) -> None:
        self.settle()
        self.storages.resized(storage)
