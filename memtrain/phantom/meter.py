"""The mode that sees every operator: it makes the tensors, and writes down what they take."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from memtrain.cards import Card
from memtrain.errors import UserError
from memtrain.phantom import dispatch, operators
from memtrain.phantom.allocator import CachingAllocator, OutOfMemoryError
from memtrain.phantom.dispatch import Entry, Template, flat_tensors
from memtrain.phantom.kernels import RESULTS
from memtrain.phantom.ledger import (
    BACKWARD,
    DEVICE,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PAGEABLE,
    PHASES,
    PINNED,
    Ledger,
    Record,
)
from memtrain.phantom.modules import ModuleWatch
from memtrain.phantom.report import held_now
from memtrain.phantom.streams import HOST, RaceError, Schedule, Stream, merge

aten = torch.ops.aten
CPU = torch.device("cpu")
DEVICE_OF = torch.ops.prim.device.default
UNSUPPORTED = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    NotImplementedError,
)
LIFTS = {aten.lift_fresh.default, aten.lift_fresh_copy.default}  # `torch.tensor(3.0)`: a constant
WAYS = ("h2d", "d2h", "nvme_read", "nvme_write")
VALUES_PER_STEP = 10_000
RESIZERS = {  # operators that change the storage of a tensor that exists
    aten.resize_.default,
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
    aten.set_.source_Tensor,
    aten.set_.default,
}


class UnsupportedOperator(RuntimeError):
    """An operator that cannot run without data, or for which torch has no shape function."""


class _FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Builds `torch.tensor(data, device=...)` on the CPU first: no kernel of the phantom is real."""

    @property
    def avoid_device_init(self) -> bool:
        return True


def _is_view(func: Any) -> bool:
    """Whether `func` only looks at its argument's storage, without reading it."""
    returns = func._schema.returns
    return bool(returns) and all(
        value.alias_info is not None and not value.alias_info.is_write for value in returns
    )


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages, transfers, FLOPs and bytes of everything that runs under it.

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
        self.ledger = Ledger(allocator)
        self.schedule = Schedule()
        self.schedule.on_order = self._retire
        if allocator is not None:
            allocator.synchronize = self._retire_all
        self.watch = ModuleWatch(self.mark, self._start_forward)
        self.fake = _FakeMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.keys_of = None if device_type == "cpu" else torch.device(device_type, 0)
        self.entries: dict[Any, Entry] = {}
        self.rare_entries: dict[Any, Entry] = {}
        self.moved = dict.fromkeys(WAYS, 0)
        self.phase_name = ""
        """Set by `PhantomGPU.phase`: overrides what the hooks tell."""
        self.deferred: Exception | None = None
        """What went wrong inside backward, to be raised after it."""
        self.paused = False
        """Nothing counts: DTensor asks for a shape by making tensors of it."""
        self._in_forward = False
        self._values_read = 0
        self._task = -1
        self._task_depth = 0
        self._workspaces: set[tuple[bool, int]] = set()
        self._pending: list[tuple[Record, dict[int, int]]] = []
        self._freed_early: list[tuple[Record, dict[int, int]]] = []
        self._handlers: dict[Any, Callable[..., Any]] = {
            aten._local_scalar_dense.default: self._item,
            aten.is_pinned.default: self._is_pinned,
            aten._pin_memory.default: self._pin_memory,
            aten.record_stream.default: self._record_stream,
            aten.equal.default: self._equal,
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
            self._check_order(func, args, kwargs)
        out = self._replay(entry, args, kwargs)
        self._account(entry, func, args, kwargs, out)
        return out

    # What runs when

    def settle(self) -> None:
        """Enter what was freed since, then the phase that has begun since."""
        if self.ledger.dead:
            self._bury()
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._turn(task)
        repeated = task != -1 and len(self.watch.stack) > self._task_depth
        self.ledger.enter_span(self._phase(task), repeated)

    def _phase(self, task: int) -> str:
        if self.phase_name:
            return self.phase_name
        if self.watch.optimizers:
            self._in_forward = False
            self._values_read = 0
            return OPTIMIZER
        if task != -1:
            return BACKWARD
        return FORWARD if self._in_forward or self.watch.stack else OTHER

    def _turn(self, task: int) -> None:
        """A backward begins or ends. Autograd has then ordered its streams after the others."""
        self._task = task
        self._task_depth = len(self.watch.stack)
        self._in_forward = False
        self._values_read = 0
        if self.schedule.tracking:
            self.schedule.join(self.schedule.current)

    def _start_forward(self) -> None:
        self.settle()  # a backward that has ended is seen now, not after the forward has begun
        if torch.is_grad_enabled():
            self._in_forward = True

    def begin_step(self) -> None:
        self.settle()
        self._in_forward = False
        for entry in (*self.entries.values(), *self.rare_entries.values()):
            entry.calls = [0, 0, 0, 0]
        self.moved = dict.fromkeys(WAYS, 0)

    # Running one operator

    def _first(self, func: Any, args: Any, kwargs: Any, key: Any) -> Any:
        """Through FakeTensorMode, and from there into the table."""
        if func.namespace == "profiler":
            return func(*args, **kwargs)  # record_function: no tensors
        if func not in RESULTS and self._is_composite(func):
            with self:  # inference mode: what autograd would have taken apart
                return self._composite(func, args, kwargs)
        if func not in LIFTS:
            args, kwargs = self._faked(func, args, kwargs)
        if self.schedule.tracking and not _is_view(func):
            self._check_order(func, args, kwargs)
        out = self._rekeyed(self._run(func, args, kwargs), args, kwargs)
        entry = dispatch.describe(func, args, kwargs, out, self.device_type)
        if key is not None and dispatch.replayable(entry, func, args, kwargs, out):
            self.entries[key] = entry
        else:
            entry = self._rare(entry, func)
        if func in RESIZERS:
            self.resized(args[0].untyped_storage())
        pinned = _asks_for_pinned(args, kwargs)
        for t in flat_tensors(out if isinstance(out, list | tuple) else (out,)):
            if self.ledger.find(t.untyped_storage()) is None:
                self._see(t, entry.name, pinned)
        self._account(entry, func, args, kwargs, out)
        return out

    def _is_composite(self, func: Any) -> bool:
        has_kernel, name = torch._C._dispatch_has_kernel_for_dispatch_key, func.name()
        return (
            torch.is_inference_mode_enabled()
            and has_kernel(name, "CompositeImplicitAutograd")
            and not has_kernel(name, "CPU" if self.keys_of is None else "PrivateUse1")
        )

    def _composite(self, func: Any, args: Any, kwargs: Any) -> Any:
        on_cuda = operators.composites(lambda: compute_capability(self.card))
        if func in on_cuda and self.keys_of is not None:
            return on_cuda[func](*args, **kwargs)
        return func.decompose(*args, **kwargs)

    def _rare(self, entry: Entry, func: Any) -> Entry:
        """Calls that are not replayed share one entry per operator and cost."""
        key = (func, entry.flops, entry.moved_bytes, entry.dtype, entry.on_device)
        known = self.rare_entries.setdefault(key, entry)
        entry.calls = known.calls
        return entry

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        special = RESULTS.get(func)
        if special is not None and args[0].device.type == self.device_type != "cpu":
            return special(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except UNSUPPORTED as error:
            if func._schema.is_mutable and not func._schema.returns:
                return None  # it writes where it was told to (torch._fused_sgd_): no shape to find
            reason = str(error).strip().partition("\n")[0]
            raise UnsupportedOperator(
                f"{func}{self._where()} cannot run without data: its result has no shape that "
                f"follows from its inputs' shapes ({type(error).__name__}: {reason[:120]})"
            ) from None

    def _where(self) -> str:
        return f" in module {self.watch.path}" if self.watch.stack else ""

    def _faked(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Real tensors (a batch made outside) become fake ones; writing to them is refused."""
        real = []
        for t in flat_tensors(args, kwargs):
            if type(t) is not FakeTensor:
                real.append(t)
            elif t.fake_mode is not self.fake:
                self._adopt(t)
        if not real:
            return args, kwargs
        fakes = {id(t): self._fake_of(t) for t in real}
        for t in _targets(func, args, kwargs):
            if id(t) in fakes:
                raise UserError(
                    f"{func}{self._where()} writes to a tensor of shape {list(t.shape)} that "
                    "holds real data: make it inside the phantom's `with` block"
                )

        def swap(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return type(value)(swap(item) for item in value)
            return fakes.get(id(value), value)

        return tuple(swap(a) for a in args), {name: swap(v) for name, v in kwargs.items()}

    def _fake_of(self, t: torch.Tensor) -> Any:
        if t.device.type not in ("cpu", "meta"):
            raise UserError(
                f"a real tensor on {t.device} cannot be used on the phantom: move it to the CPU"
            )
        fake = self.fake.from_tensor(t)
        if self.ledger.find(fake.untyped_storage()) is None:
            self._see(fake, "real tensor", t.is_pinned() if t.device.type != "meta" else False)
        return fake if self.keys_of is None else dispatch.rekey(self.fake, fake, self.keys_of)

    def _adopt(self, t: FakeTensor) -> None:
        """Count a tensor that an earlier phantom made as one that was on this one all along."""
        t.fake_mode = self.fake
        if self.ledger.find(t.untyped_storage()) is None:
            self._see(t, "earlier phantom")

    def _rekeyed(self, out: Any, args: Any, kwargs: Any) -> Any:
        if self.keys_of is None:
            return out
        if isinstance(out, list | tuple):
            return type(out)(self._rekeyed(item, args, kwargs) for item in out)
        if type(out) is not FakeTensor or out.fake_device == self.keys_of:
            return out
        if any(out is value for value in args):
            return out
        return dispatch.rekey(self.fake, out, self.keys_of)

    def _replay(self, entry: Entry, args: Any, kwargs: Any) -> Any:
        if entry.returns_arg is not None:
            return args[entry.returns_arg]
        if not entry.results:
            return None if entry.container is None else entry.container()
        base = args[0] if args else None
        pinned = bool(kwargs) and _asks_for_pinned(args, kwargs)
        made = []
        for template in entry.results:
            if type(template) is Template:
                t = dispatch.make_tensor(self.fake, self.keys_of, template, base)
                if template.offset is None:
                    self._see(t, entry.name, pinned)
                made.append(t)
            else:
                made.append(template)
        return made[0] if entry.container is None else entry.container(made)

    def _account(self, entry: Entry, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        span = self.ledger.spans[-1]
        entry.calls[PHASES.index(span.phase)] += 1
        if entry.cublas and self.card is not None:
            self._take_workspace()
        if entry.temporaries and self.card is not None:
            self._take_temporaries(entry)
        if entry.transfer is not None:
            way, size_bytes = entry.transfer
            self.moved[way] += size_bytes
        if self.schedule.tracking and not entry.views:
            self._order(entry, func, args, kwargs, out)

    # Storages

    def _see(self, t: Any, op: str, pinned: bool = False) -> Record | None:
        """Count the storage of `t`, which is not known yet."""
        storage = t.untyped_storage()
        size_bytes = storage.nbytes()
        space = self._space(t.fake_device.type, pinned)
        if space is None:
            return None
        record = self._allocate(space, size_bytes, op)
        self.ledger.watch(record, storage)
        return record

    def _space(self, device_type: str, pinned: bool) -> str | None:
        if device_type == self.device_type:
            return DEVICE
        if device_type == "cpu":
            return PINNED if pinned else PAGEABLE
        return None

    def _allocate(self, space: str, size_bytes: int, op: str) -> Record:
        stream = self.schedule.current.stream_id if self.schedule.tracking else 0
        try:
            return self.ledger.allocate(space, size_bytes, op, self.watch.path, stream)
        except OutOfMemoryError as error:
            self.watch.mark_all()
            error.by_category = held_now(self.ledger)
            self._fail(error)
        # In backward: counted past the capacity until `raise_deferred`.
        allocator = self.ledger.allocator
        assert allocator is not None
        allocator.enforce = False
        try:
            return self.ledger.allocate(space, size_bytes, op, self.watch.path, stream)
        finally:
            allocator.enforce = True

    def _fail(self, error: Exception) -> None:
        """Raise `error`; inside backward only once that has returned.

        torch's engine cannot unwind through a device that was registered from Python: it ends the process.
        """
        if torch._C._current_graph_task_id() == -1:
            raise error
        self.deferred = self.deferred or error

    def raise_deferred(self) -> None:
        error, self.deferred = self.deferred, None
        if error is not None:
            raise error

    def _take_temporaries(self, entry: Entry) -> None:
        records = []
        try:
            for size_bytes in entry.temporaries:
                records.append(self._allocate(DEVICE, size_bytes, entry.name))
        finally:
            for record in records:
                self.ledger.free(record)

    def _take_workspace(self) -> None:
        """One cuBLAS workspace per handle (forward's thread, backward's) and stream."""
        assert self.card is not None
        stream = self.schedule.current.stream_id if self.schedule.tracking else 0
        handle = (self._task != -1, stream)
        if handle not in self._workspaces:
            record = self._allocate(DEVICE, self.card.workspace_bytes, "cublas workspace")
            self._workspaces.add(handle)
            record.category, record.module = "workspaces", ""

    def _bury(self) -> None:
        dead = self.ledger.dead
        while dead:
            record = dead.popleft().record
            if record.died is None:
                self._free(record)

    def _free(self, record: Record) -> None:
        waits_for, unfinished = self._waits_for(record), self._unfinished(record)
        self.ledger.free(record, keep_active=bool(waits_for))
        if waits_for:
            self._pending.append((record, waits_for))
        if unfinished:
            self._freed_early.append((record, unfinished))

    def _waits_for(self, record: Record) -> dict[int, int]:
        """Streams that `record_stream` named, and the tick each has reached."""
        if not record.users:
            return {}
        ticks = {}
        for user in record.users:
            tick = self.schedule.last_tick(user)
            if not self.schedule.happened(record.stream, user, tick):
                ticks[user] = tick
        return ticks

    def _unfinished(self, record: Record) -> dict[int, int]:
        """Streams that still use its block, which the allocator does not know of, and their ticks."""
        if record.block is None or not self.schedule.tracking:
            return {}
        return {
            user: tick
            for user, tick in record.uses().items()
            if not self.schedule.happened(record.stream, user, tick)
            and user not in (record.users or ())
        }

    def _retire(self) -> None:
        """Let go of the blocks whose other streams have been waited for."""
        self.settle()
        still = []
        for record, waits_for in self._pending:
            if all(self.schedule.happened(record.stream, s, t) for s, t in waits_for.items()):
                assert record.block is not None and self.ledger.allocator is not None
                self.ledger.allocator.retire(record.block)
            else:
                still.append((record, waits_for))
        self._pending = still

    def _retire_all(self) -> None:
        pending, self._pending = self._pending, []
        for record, _ in pending:
            assert record.block is not None and self.ledger.allocator is not None
            self.ledger.allocator.retire(record.block)

    def resized(self, storage: Any) -> None:
        """`storage` may have another size than when it was counted.

        The new block is there before the old one goes: native/cuda/Resize.cpp, `resize_bytes_cuda`.
        """
        self.settle()
        record = self.ledger.find(storage)
        size_bytes = storage.nbytes()
        if record is None or size_bytes == record.asked_bytes:
            return
        new = self._allocate(record.space, size_bytes, record.op)
        # Who had the block before is done then.
        new.write_tick = self.schedule.last_tick(new.stream)
        self._free(record)
        new.category, new.module = record.category, record.module
        self.ledger.watch(new, storage)

    def mark(self, t: torch.Tensor, category: str, module: str | None = None) -> None:
        """Say what the storage of `t` is."""
        if type(t) is not FakeTensor:
            for name in _parts_of(t):
                self.mark(getattr(t, name), category, module)
            return
        if t.fake_mode is not self.fake:
            self._adopt(t)
        record = self.ledger.find(t.untyped_storage())
        if record is None or (category == "inputs" and record.category is not None):
            return
        record.category = category
        if module is not None:
            record.module = module

    # Operators with a meaning of their own

    def _item(self, t: Any) -> Any:
        """A constant's value; there is no data for any other tensor, so 0."""
        if type(t) is not FakeTensor or t.constant is not None:
            return aten._local_scalar_dense.default(t)
        self.settle()
        self._count_read(t)
        if t.fake_device.type == self.device_type:
            merge(self.schedule.host, self.schedule.current.clock)
        elif self.schedule.tracking:
            self._check_read(t, HOST, "item")
        if t.dtype.is_complex:
            return 0j
        if t.dtype == torch.bool:
            warnings.warn(
                f"a truth value was read{self._where()} from a tensor without data: it is False, and "
                "the program goes on as it would then",
                stacklevel=3,  # the program's line, which called __torch_dispatch__
            )
            return False
        return 0.0 if t.dtype.is_floating_point else 0

    def _count_read(self, t: Any) -> None:
        """A program that reads on and on loops on a value that never comes; a bool decides more."""
        self._values_read += 10 if t.dtype == torch.bool else 1
        if self._values_read > VALUES_PER_STEP:
            raise UnsupportedOperator(
                f"too many values were read{self._where()} (`.item()`) with no backward or optimizer "
                "step in between: every one is 0, and a loop that waits for another never ends"
            )

    def _equal(self, a: Any, b: Any) -> bool:
        return False

    def _is_pinned(self, t: Any, device: Any = None) -> bool:
        record = self.ledger.find(t.untyped_storage())
        return record is not None and record.space == PINNED

    def _pin_memory(self, t: Any, device: Any = None) -> Any:
        self.settle()
        if self.schedule.tracking:
            self._check_read(t, HOST, "pin_memory")
        args, _ = self._faked(aten._pin_memory.default, (t,), {})
        out = self._rekeyed(aten.clone.default(args[0]), args, {})
        self._see(out, "aten._pin_memory", pinned=True)
        return out

    def _record_stream(self, t: Any, stream: Any) -> None:
        record = self.ledger.find(t.untyped_storage())
        if record is not None and stream.stream_id != record.stream:
            record.users = (record.users or set()) | {stream.stream_id}

    # Who waits for whom

    def _check_order(self, func: Any, args: Any, kwargs: Any) -> None:
        inputs = flat_tensors(args, kwargs)
        on_device = any(t.device.type == self.device_type for t in inputs)
        user = self.schedule.current.stream_id if on_device else HOST
        operator, targets = str(func), _overwritten(func, args, kwargs)
        for t in inputs:
            check = self._check_write if id(t) in targets else self._check_read
            check(t, user, operator)

    def _check_read(self, t: Any, reader: int, operator: str) -> None:
        record = self.ledger.find(t.untyped_storage())
        if record is None:
            return
        writer, tick = record.write_stream, record.write_tick
        if not self.schedule.happened(reader, writer, tick):
            self._race(operator, reader, f"reads {_said(record, t)} that stream {writer} writes")

    def _check_write(self, t: Any, writer: int, operator: str) -> None:
        record = self.ledger.find(t.untyped_storage())
        if record is None:
            return
        for user, tick in record.uses().items():
            if not self.schedule.happened(writer, user, tick):
                does = "reads" if user in (record.readers or ()) else "writes"
                self._race(operator, writer, f"writes {_said(record, t)} that stream {user} {does}")

    def _race(self, operator: str, user: int, what: str) -> None:
        who = "the host" if user == HOST else f"stream {user}"
        self._fail(
            RaceError(
                f"{operator}{self._where()}: {who} {what}, and has not waited for it: "
                "wait_stream, wait_event or synchronize first"
            )
        )

    def _check_reuse(self, stream: Stream, operator: str) -> None:
        """What was freed too early goes to the next operator of the stream that took it."""
        owner = stream.stream_id
        due = [freed for freed in self._freed_early if freed[0].stream == owner]
        self._freed_early = [freed for freed in self._freed_early if freed[0].stream != owner]
        for record, unfinished in due:
            for user, tick in unfinished.items():
                if not self.schedule.happened(owner, user, tick):
                    self._fail(
                        RaceError(
                            f"{operator}{self._where()}: stream {owner} may get the memory of a tensor "
                            f"of {record.asked_bytes} bytes, made by {record.op}, that was freed while "
                            f"stream {user} uses it: wait_stream or wait_event before it is freed, or "
                            "record_stream"
                        )
                    )

    def _order(self, entry: Entry, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """The operator's tick on its stream, noted at what it read and wrote."""
        if not entry.on_device:
            for t in _written(func, args, kwargs, out):
                self._note(t, HOST, 0)
            return
        stream: Stream = self.schedule.current
        if self._freed_early:
            self._check_reuse(stream, str(func))
        tick = self.schedule.tick(stream)
        if entry.transfer is not None and not _is_async(func, args, kwargs, self._is_pinned, out):
            merge(self.schedule.host, stream.clock)
        self._note_read(flat_tensors(args, kwargs), stream.stream_id, tick)
        for t in _written(func, args, kwargs, out):
            self._note(t, stream.stream_id, tick)

    def _note_read(self, tensors: list[torch.Tensor], stream: int, tick: int) -> None:
        for t in tensors:
            record = self.ledger.find(t.untyped_storage())
            if record is None:
                continue
            if record.readers is None:
                record.readers = {stream: tick}
            else:
                record.readers[stream] = tick

    def _note(self, t: torch.Tensor, stream: int, tick: int) -> None:
        """A write. It came after the reads before it, so whoever waits for it waits for them."""
        record = self.ledger.find(t.untyped_storage())
        if record is not None:
            record.write_stream, record.write_tick, record.readers = stream, tick, None


def _said(record: Record, t: torch.Tensor) -> str:
    return f"a {record.space} tensor of shape {list(t.shape)}"


def _parts_of(t: torch.Tensor) -> list[str]:
    """Attributes of a wrapper subclass (DTensor) that hold its tensors."""
    flatten = getattr(t, "__tensor_flatten__", None)
    return list(flatten()[0]) if flatten is not None else []


def _written(func: Any, args: Any, kwargs: Any, out: Any) -> list[torch.Tensor]:
    written = flat_tensors(out if isinstance(out, list | tuple) else (out,))
    return written + _targets(func, args, kwargs)


def _targets(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that `func` writes to, by its schema."""
    if not func._schema.is_mutable:
        return []
    targets: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            targets += flat_tensors((value,))
    return targets


def _overwritten(func: Any, args: Any, kwargs: Any) -> set[int]:
    """Ids of the arguments whose content `func` changes, not only their sizes and strides."""
    if torch.Tag.inplace_view in func.tags:
        return set()
    return {id(t) for t in _targets(func, args, kwargs)}


def _is_async(func: Any, args: Any, kwargs: Any, is_pinned: Any, out: Any) -> bool:
    """Whether a copy returns before it has happened: non_blocking, and to or from pinned memory."""
    if func is aten.copy_.default:
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        ends = args[:2]
    else:
        non_blocking, ends = kwargs.get("non_blocking", False), (args[0], out)
    return bool(non_blocking) and any(is_pinned(t) for t in ends)


def compute_capability(card: Card | None) -> float:
    return 8.0 if card is None else card.compute_capability


def _asks_for_pinned(args: Any, kwargs: Any) -> bool:
    """`pin_memory=True`; `to("cpu", non_blocking=True)` from the device pins as well
    (native/TensorConversions.cpp, `_to_copy`)."""
    if kwargs.get("pin_memory"):
        return True
    to = kwargs.get("device")
    return bool(
        kwargs.get("non_blocking")
        and to is not None
        and to.type == "cpu"
        and args
        and args[0].device.type != "cpu"
    )
