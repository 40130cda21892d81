"""Tokens to batches. Shapes: B samples of a micro-batch, T tokens of a sample.

A *window* is what one optimizer step learns from: up to `accum` micro-batches.
"""

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from memtrain.errors import UserError

IGNORE_INDEX = -100
"""A target that is not learned from."""

Ids: TypeAlias = npt.NDArray[np.int64]


@dataclass
class Batch:
    """One micro-batch."""

    tokens: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64
    n_targets: int
    """Targets that count, counted on the host."""
    starts: Tensor | None = None  # (B, T) int64
    """Where in its sample the document of each token begins; None: documents are not kept apart."""
    n_padding: int = 0
    """Places that hold no token of the data."""

    @property
    def n_tokens(self) -> int:
        return self.tokens.numel() - self.n_padding

    def to(self, device: torch.device) -> "Batch":
        """A copy on `device`, without waiting for it if this one is pinned."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> "Batch":
        """A copy in page-locked memory."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        starts = None if self.starts is None else change(self.starts)
        tokens, targets = change(self.tokens), change(self.targets)
        return Batch(tokens, targets, self.n_targets, starts, self.n_padding)


@dataclass(frozen=True)
class Batching:
    """How samples become windows."""

    micro_batch: int
    accum: int
    seed: int
    shuffle: bool = True
    pin: bool = False
    """Batches come in page-locked memory."""
    prefetch: int = 2
    """Windows read ahead by a thread; 0 reads in line."""


Window: TypeAlias = list[Batch]
Position: TypeAlias = tuple[int, int]
"""(epoch, samples of it that are done)"""


class Windows(ABC):
    """Endless windows; each sample once per epoch, no window across epochs.

    One iterator at a time: a new one goes on where the last one stopped.
    """

    def __init__(self, n_samples: int, batching: Batching, content: str = "") -> None:
        """`content`: a hash of the data, so that a position in it is not taken for one in other data."""
        assert min(n_samples, batching.micro_batch, batching.accum) >= 1
        assert batching.prefetch >= 0
        self.n_samples = n_samples
        self._batching = batching
        self._window = batching.micro_batch * batching.accum
        self._content = content
        self._position: Position = (0, 0)
        self._iterator: weakref.ref[Generator[Window, None, None]] | None = None

    @abstractmethod
    def _read(self, epoch: int, samples: Ids) -> Batch:
        """These samples of an epoch."""

    @property
    def windows_per_epoch(self) -> int:
        return -(-self.n_samples // self._window)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last window handed out, whatever was read ahead."""
        epoch, sample = self._position
        return {"epoch": epoch, "sample": sample, "content": self._content}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a saved position. Raises UserError if it lies outside this data, or in other data."""
        epoch, sample = state["epoch"], state["sample"]
        if state["content"] != self._content:
            raise UserError(
                "the data has changed since the run began; restore it, or start a new run"
            )
        if epoch < 0 or not 0 <= sample < self.n_samples:
            raise UserError(
                f"cannot resume at sample {sample} of epoch {epoch}: the data has {self.n_samples} "
                "samples: resume with the data and seq_len of the first run"
            )
        self.close()
        self._position = (epoch, sample)

    def close(self) -> None:
        """End the iterator and its thread."""
        iterator = self._iterator and self._iterator()
        if iterator:
            iterator.close()

    def __iter__(self) -> Generator[Window, None, None]:
        self.close()
        iterator = self._iterate()
        # Weak, so that an iterator nobody holds is collected and its thread ends.
        self._iterator = weakref.ref(iterator)
        return iterator

    def _iterate(self) -> Generator[Window, None, None]:
        windows = self._windows(*self._position)
        with closing(
            _ahead(windows, self._batching.prefetch) if self._batching.prefetch else windows
        ) as source:
            for window, position in source:
                self._position = position
                yield window

    def _windows(self, epoch: int, sample: int) -> Generator[tuple[Window, Position], None, None]:
        """Windows, each with the position after it."""
        while True:
            order = self._order(epoch)
            while sample < self.n_samples:
                samples = order[sample : sample + self._window]
                sample += len(samples)
                after = (epoch, sample) if sample < self.n_samples else (epoch + 1, 0)
                parts = range(0, len(samples), self._batching.micro_batch)
                yield (
                    [
                        self._batch(epoch, samples[i : i + self._batching.micro_batch])
                        for i in parts
                    ],
                    after,
                )
            epoch, sample = epoch + 1, 0

    def _order(self, epoch: int) -> Ids:
        """(n_samples,): the samples in the order of an epoch, which depends on (seed, epoch) alone."""
        if not self._batching.shuffle:
            return np.arange(self.n_samples)
        return np.random.default_rng([self._batching.seed, epoch]).permutation(self.n_samples)

    def _batch(self, epoch: int, samples: Ids) -> Batch:
        batch = self._read(epoch, samples)
        return batch.pin() if self._batching.pin else batch


class Loader(Windows):
    """Windows of a token array, cut into samples of `seq_len` tokens and one more as last target.

    Raises UserError if `tokens` hold no sample; `name` says there whose tokens they are.
    """

    def __init__(
        self,
        tokens: npt.NDArray[np.integer[Any]],
        seq_len: int,
        batching: Batching,
        name: str = "the training text",
        content: str = "",
    ) -> None:
        super().__init__(count_samples(tokens, seq_len, name), batching, content)
        self._tokens = tokens
        self._seq_len = seq_len

    def _read(self, epoch: int, samples: Ids) -> Batch:
        return _to_batch(_gather(self._tokens, self._seq_len, samples))


class RandomTokens(Windows):
    """Windows of uniform ids that depend on (seed, epoch, sample) alone: no text needed."""

    def __init__(
        self, vocab_size: int, seq_len: int, samples_per_epoch: int, batching: Batching
    ) -> None:
        super().__init__(samples_per_epoch, replace(batching, shuffle=False))
        self._vocab_size = vocab_size
        self._seq_len = seq_len

    def _read(self, epoch: int, samples: Ids) -> Batch:
        rows = (np.random.default_rng([self._batching.seed, epoch, sample]) for sample in samples)
        ids = [rng.integers(self._vocab_size, size=self._seq_len + 1) for rng in rows]
        return _to_batch(np.stack(ids))


def eval_batches(
    tokens: npt.NDArray[np.integer[Any]],
    seq_len: int,
    micro_batch: int,
    max_samples: int | None = None,
    name: str = "the validation text",
) -> Iterator[Batch]:
    """The first `max_samples` samples in order, in batches. Raises UserError if there is no sample."""
    n_samples = count_samples(tokens, seq_len, name)
    n_samples = min(n_samples, max_samples or n_samples)
    starts = range(0, n_samples, micro_batch)
    groups = (np.arange(start, min(start + micro_batch, n_samples)) for start in starts)
    return (_to_batch(_gather(tokens, seq_len, samples)) for samples in groups)


def count_samples(tokens: npt.NDArray[np.integer[Any]], seq_len: int, name: str) -> int:
    """How many samples of `seq_len` tokens and a target there are. Raises UserError if none."""
    if len(tokens) < seq_len + 1:
        raise UserError(
            f"{name}: {len(tokens)} tokens found, {seq_len + 1} needed for one sample of seq_len="
            f"{seq_len}: give more text or a smaller seq_len"
        )
    return (len(tokens) - 1) // seq_len


def _gather(tokens: npt.NDArray[np.integer[Any]], seq_len: int, samples: Ids) -> Ids:
    """(B, T + 1): sample i starts at token i * T, its last token is the next one's first."""
    positions = samples[:, None] * seq_len + np.arange(seq_len + 1)
    ids: Ids = tokens[positions].astype(np.int64)
    return ids


def _to_batch(ids: Ids) -> Batch:
    """`ids` (B, T + 1) as inputs and the targets one further."""
    tokens, targets = np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])
    n_targets = int(np.count_nonzero(targets != IGNORE_INDEX))
    return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), n_targets)


Item: TypeAlias = tuple[Window, Position]


def _ahead(source: Iterator[Item], depth: int) -> Generator[Item, None, None]:
    """What `source` gives, read up to `depth` items ahead in a thread that ends with this."""
    items: SimpleQueue[Item | BaseException] = SimpleQueue()
    free, stop = threading.Semaphore(depth), threading.Event()
    # A daemon, so that a program that ends without closing does not hang.
    thread = threading.Thread(
        target=_produce, args=(source, items, free, stop), name="prefetch", daemon=True
    )
    thread.start()
    try:
        while True:
            item = items.get()
            if isinstance(item, BaseException):
                raise item
            free.release()
            yield item
    finally:
        stop.set()
        free.release()
        # The garbage collector may run this in the very thread that is to end.
        if thread is not threading.current_thread():
            thread.join()


def _produce(
    source: Iterator[Item],
    items: "SimpleQueue[Item | BaseException]",
    free: threading.Semaphore,
    stop: threading.Event,
) -> None:
    try:
        while free.acquire() and not stop.is_set():
            items.put(next(source))
    except BaseException as error:
        items.put(error)
