"""`PhantomGPU` and `PhantomCPU`: run a program's own code, and learn what it would take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from memtrain.cards import Card, load_card
from memtrain.errors import UserError
from memtrain.phantom import backend, patches
from memtrain.phantom.allocator import CachingAllocator, OutOfMemoryError
from memtrain.phantom.held import CATEGORIES
from memtrain.phantom.ledger import PHASES
from memtrain.phantom.meter import Meter
from memtrain.phantom.report import OpUse, Report, make_report, used_operators
from memtrain.phantom.streams import use_schedule


class _Phantom:
    """A meter, and a `with` block in which it measures."""

    device: torch.device

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self._stack: ExitStack | None = None
        self._last_ops: list[OpUse] = []
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
        if meter.keys_of is not None:
            patches.behave_as_cuda(meter, stack)
        meter.watch.install()
        stack.callback(meter.watch.remove)
        patches.patch(meter, stack)
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
        self._last_ops = self._ops()
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
        meter = self.meter
        card = meter.card.name if meter.card else meter.device_type
        # The step in progress, or the last one if none has begun.
        return make_report(card, meter.ledger, self._fits(), self._ops() or self._last_ops)

    def _ops(self) -> list[OpUse]:
        return used_operators(self.meter.all_entries())

    def _fits(self) -> bool:
        """What an error kept from being allocated is in no peak."""
        allocator = self.meter.ledger.allocator
        if allocator is None or allocator.capacity_bytes is None:
            return True
        within = allocator.peak_reserved_bytes <= allocator.capacity_bytes
        return within and not self._ended_out_of_memory


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
