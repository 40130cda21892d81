"""Masters, moments, gradients and weights in files, for an optimizer on the host and for weights that come and go.

All memory is in buffers that are used again; how much is said at each class.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memtrain.device import pinned_empty

MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]

MASTER = "master"


class Store(Protocol):
    """Flat tensors in files. Transfers that touch the same bytes happen in the order in which they are asked for."""

    def add(self, name: str, n_elements: int, dtype: torch.dtype) -> None: ...
    def read(self, name: str, out: Tensor, offset: int = 0) -> None: ...
    def write(self, name: str, source: Tensor, offset: int = 0) -> None: ...
    def wait(self, tensor: Tensor) -> None: ...
    def map(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class _Piece:
    number: int
    start: int
    stop: int

    def file(self, name: str) -> str:
        return f"{self.number}.{name}"


class FileState:
    """Masters and moments of an elementwise optimizer, stepped piece by piece in `buffer_bytes` of host memory.

    While one piece is stepped the next ones are read and the last ones are written.
    """

    N_SETS = 4

    def __init__(self, store: Store, make: MakeOptimizer, buffer_bytes: int) -> None:
        self._store, self._make = store, make
        self._moments, self._fresh = fresh_state(make)
        names = (MASTER, *self._moments)
        self._length = buffer_bytes // (self.N_SETS * len(names) * 4)
        self._sets = deque(
            {name: torch.empty(self._length, device="cpu") for name in names}
            for _ in range(self.N_SETS)
        )
        self._settings: list[dict[str, Any]] = []
        self._shapes: list[torch.Size] = []
        self._counters: dict[_Piece, dict[str, Tensor]] = {}
        self._pieces: list[_Piece] = []
        self._first: list[int] = []
        """Index of each parameter's first piece."""
        self._ahead: deque[tuple[int, dict[str, Tensor]]] = deque()

    def add(self, master: Tensor, settings: dict[str, Any]) -> None:
        number = len(self._shapes)
        self._first.append(len(self._pieces))
        self._settings.append(settings)
        self._shapes.append(master.shape)
        flat = master.reshape(-1)
        for start in range(0, flat.numel(), self._length):
            self._pieces.append(_Piece(number, start, min(start + self._length, flat.numel())))
        for name in (MASTER, *self._moments):
            self._store.add(f"{number}.{name}", flat.numel(), torch.float32)
        self._write_all(number, MASTER, flat)

    def step(
        self, number: int, lr: float, gradient: Callable[[int, int], Tensor]
    ) -> Iterator[tuple[int, Tensor]]:
        for index in self._indices(number):
            piece, state = self._pieces[index], self._open(index)
            master = state.pop(MASTER)
            optimizer = self._make([{**self._settings[number], "params": [master], "lr": lr}])
            counters = self._counters.get(piece) or {k: v.clone() for k, v in self._fresh.items()}
            optimizer.state[master] = {**counters, **state}
            master.grad = gradient(piece.start, piece.stop)
            optimizer.step()
            master.grad = None
            self._counters[piece] = {name: optimizer.state[master][name] for name in counters}
            for name, values in ((MASTER, master), *state.items()):
                self._store.write(piece.file(name), values, piece.start)
            yield piece.start, master

    def state(self, number: int) -> dict[str, Tensor]:
        """Mapped from the files: nothing is read before it is used."""
        first = self._pieces[self._first[number]]
        shape = self._shapes[number]
        names = (MASTER, *self._moments)
        mapped = {name: self._store.map(f"{number}.{name}").view(shape) for name in names}
        return {**self._counters.get(first, self._fresh), **mapped}

    def load_state(self, number: int, state: dict[str, Tensor]) -> None:
        self._ahead.clear()
        self._write_all(number, MASTER, state[MASTER])
        for name in self._moments:
            if name in state:
                self._write_all(number, name, state[name])
        counters = {name: state[name] for name in self._fresh if name in state}
        for index in self._indices(number):
            self._counters.pop(self._pieces[index], None)
            if counters:
                self._counters[self._pieces[index]] = {k: v.clone() for k, v in counters.items()}

    def _indices(self, number: int) -> range:
        following = self._first[number + 1 : number + 2] or [len(self._pieces)]
        return range(self._first[number], following[0])

    def _open(self, index: int) -> dict[str, Tensor]:
        """Master and moments of a piece; those of the next are on their way when it returns."""
        while self._ahead and self._ahead[0][0] != index:
            self._ahead.popleft()  # parameters without a gradient are not stepped
        following = self._ahead[-1][0] + 1 if self._ahead else index
        while len(self._ahead) < self.N_SETS - 1 and following < len(self._pieces):
            self._ahead.append((following, self._start_reading(self._pieces[following])))
            following += 1
        _, state = self._ahead.popleft()
        for values in state.values():
            self._store.wait(values)
        return state

    def _start_reading(self, piece: _Piece) -> dict[str, Tensor]:
        buffers = self._sets[0]
        self._sets.rotate(-1)
        state = {name: buffer[: piece.stop - piece.start] for name, buffer in buffers.items()}
        for name, values in state.items():
            self._store.read(piece.file(name), values, piece.start)
        return state

    def _write_all(self, number: int, name: str, values: Tensor) -> None:
        flat = values.detach().reshape(-1).to("cpu", torch.float32)
        self._store.write(f"{number}.{name}", flat)
        self._store.wait(flat)


def fresh_state(make: MakeOptimizer) -> tuple[list[str], dict[str, Tensor]]:
    """Names of the moments, and the other tensors (step counts) that an optimizer keeps, before its first step."""
    probe = torch.zeros(7, device="cpu")
    optimizer = make([{"params": [probe]}])
    probe.grad = torch.zeros_like(probe)
    optimizer.step()
    state = optimizer.state.get(probe, {})
    moments = [name for name, value in state.items() if value.shape == probe.shape]
    counters = {name: value for name, value in state.items() if name not in moments}
    return moments, {name: torch.zeros_like(value) for name, value in counters.items()}


class FileGradients:
    """Gradients in files; in memory are those on their way, in buffers of their own length."""

    def __init__(self, store: Store, device: torch.device) -> None:
        self._store, self._device = store, device
        self._lengths: list[int] = []
        self._dtype = torch.float32
        self._free: defaultdict[int, deque[Tensor]] = defaultdict(deque)
        """By length: buffers, some of which may still be written."""
        self._norms: dict[int, Tensor] = {}

    def add(self, n_elements: int, dtype: torch.dtype) -> None:
        self._store.add(self._file(len(self._lengths)), n_elements, dtype)
        self._lengths.append(n_elements)
        self._dtype = dtype

    def landing(self, number: int, first: bool) -> Tensor:
        length = self._lengths[number]
        if not self._free[length]:
            return pinned_empty(length, self._dtype, self._device)
        buffer = self._free[length].popleft()
        self._store.wait(buffer)
        return buffer

    def landed(self, number: int, landing: Tensor, first: bool, copied: Any) -> None:
        copied.synchronize()
        if not first:
            before = self.piece(number, 0, landing.numel())
            landing.copy_(before.add_(landing))
            self._norms[number] = torch.linalg.vector_norm(landing, dtype=torch.float32)
        self._store.write(self._file(number), landing)
        self._free[landing.numel()].append(landing)

    def norm(self, number: int) -> Tensor:
        return self._norms[number]

    def piece(self, number: int, start: int, stop: int) -> Tensor:
        values = torch.empty(stop - start, dtype=self._dtype, device="cpu")
        self._store.read(self._file(number), values, start)
        self._store.wait(values)
        return values

    def _file(self, number: int) -> str:
        return f"{number}.gradient"


class FileWeights:
    """Weights in files; in memory are those on their way to the device."""

    def __init__(self, store: Store, device: torch.device) -> None:
        self._store, self._device = store, device
        self._files: dict[nn.Parameter, str] = {}
        self._free: defaultdict[int, deque[tuple[Tensor, Any]]] = defaultdict(deque)
        """By length: buffers, each with the event after which nothing reads it."""
        self._reading: dict[nn.Parameter, Tensor] = {}
        self._writing: deque[Tensor] = deque()

    def put(self, weight: nn.Parameter) -> None:
        self._files[weight] = f"{len(self._files)}.weight"
        self._store.add(self._files[weight], weight.numel(), weight.dtype)
        values = weight.detach().view(-1).to("cpu", copy=True)
        self._store.write(self._files[weight], values)
        self._store.wait(values)

    def prepare(self, weight: nn.Parameter) -> None:
        if weight not in self._reading:
            self._reading[weight] = self._buffer(weight)
            self._store.read(self._files[weight], self._reading[weight])

    def get(self, weight: nn.Parameter) -> Tensor:
        self.prepare(weight)
        self._store.wait(self._reading[weight])
        return self._reading[weight]

    def done(self, weight: nn.Parameter, copied: Any) -> None:
        self._free[weight.numel()].append((self._reading.pop(weight), copied))

    def read(self, weight: nn.Parameter) -> Tensor:
        """Mapped from the file: nothing is read before it is used."""
        return self._store.map(self._files[weight])

    def write(self, weight: nn.Parameter, start: int, piece: Tensor) -> None:
        values = piece.to(weight.dtype, copy=True)
        self._store.write(self._files[weight], values, start)
        self._writing.append(values)
        if len(self._writing) > 2:
            self._store.wait(self._writing.popleft())

    def _buffer(self, weight: nn.Parameter) -> Tensor:
        if not self._free[weight.numel()]:
            return pinned_empty(weight.numel(), weight.dtype, self._device)
        buffer, copied = self._free[weight.numel()].popleft()
        copied.synchronize()
        return buffer
