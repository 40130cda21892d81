"""Documents in rows of `seq_len` tokens, without losing one. Shapes: B rows of a micro-batch, T tokens of a row.

A document that is longer than a row is cut into pieces of a row each; each target stays with the token that predicts
it, so none is lost at a cut. Pieces are placed from the longest to the shortest, each into the row that it fills most
(best fit decreasing: at most about 11/9 of the fewest rows possible, Johnson et al. 1974). The rows are the same in
every epoch, their order is drawn from seed and epoch. What stays free at the end of a row is padding.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from memtrain.data.corpus import spread
from memtrain.data.loader import IGNORE_INDEX, Batch, Batching, Ids, Windows
from memtrain.data.store import CHUNK_TOKENS, LAST, LEARNED, TokenFile, Tokens, chunks, entropy

PADDING = 0
"""An id like any other; nothing after it sees it, and it is no target."""


@dataclass(frozen=True)
class Packed:
    """Documents in rows; a piece is what a row holds of one document."""

    tokens: Tokens  # (N,)
    roles: npt.NDArray[np.uint8]  # (N,)
    seq_len: int
    keep_apart: bool
    """Batches say where documents start."""
    starts: Ids  # (P,), the pieces of row r are first[r] to first[r + 1]
    lengths: Ids  # (P,)
    first: Ids  # (R + 1,)
    n_documents: int
    n_targets: int

    @property
    def n_rows(self) -> int:
        return len(self.first) - 1

    @property
    def padding_share(self) -> float:
        return 1 - int(self.lengths.sum()) / (self.n_rows * self.seq_len)

    @property
    def target_share(self) -> float:
        return self.n_targets / (self.n_rows * self.seq_len)

    def batch(self, rows: Ids) -> Batch:
        """These rows as a micro-batch."""
        shape = (len(rows), self.seq_len)
        tokens = np.full(shape, PADDING, dtype=np.int64)
        targets = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        starts = np.empty(shape, dtype=np.int64)
        n_padding = 0
        for index, row in enumerate(rows):
            pieces = slice(self.first[row], self.first[row + 1])
            lengths = self.lengths[pieces]
            places = _ranges(self.starts[pieces], lengths)
            n = len(places)
            tokens[index, :n] = self.tokens[places]
            targets[index, :n] = self._targets(places)
            starts[index, :n] = np.repeat(np.cumsum(lengths) - lengths, lengths)
            starts[index, n:] = n
            n_padding += self.seq_len - n
        n_targets = int(np.count_nonzero(targets != IGNORE_INDEX))
        kept_apart = torch.from_numpy(starts) if self.keep_apart else None
        return Batch(
            torch.from_numpy(tokens), torch.from_numpy(targets), n_targets, kept_apart, n_padding
        )

    def target_entropy(self, vocab_size: int) -> float:
        """Entropy of the frequencies of what is learned, in nats."""
        learned = (targets[targets != IGNORE_INDEX] for targets in self._all_targets())
        return entropy(learned, vocab_size)

    def _all_targets(self) -> Iterator[Ids]:
        cuts = np.flatnonzero(np.diff(np.cumsum(self.lengths) // CHUNK_TOKENS)) + 1
        for part in np.split(np.arange(len(self.starts)), cuts):
            yield self._targets(_ranges(self.starts[part], self.lengths[part]))

    def _targets(self, places: Ids) -> Ids:
        """(n,): the token after each, if it is of the same document and learned."""
        following = np.minimum(places + 1, len(self.tokens) - 1)
        learned = (self.roles[following] & LEARNED) > 0
        learned &= (self.roles[places] & LAST) == 0
        return np.where(learned, self.tokens[following].astype(np.int64), IGNORE_INDEX)


def pack_split(
    file: TokenFile, val_fraction: float, seq_len: int, keep_apart: bool
) -> tuple[Packed, Packed | None]:
    """(train, validation) documents in rows; `val_fraction` of the tokens are held out, as near as whole documents
    allow, but at least one document. One document alone is all training.
    """
    assert file.roles is not None
    ends, n_targets = _documents(file.roles)
    begins = np.concatenate(([0], ends[:-1]))
    held_out = _held_out(ends - begins, val_fraction)

    def pack(chosen: npt.NDArray[np.bool_]) -> Packed:
        starts, lengths = _pieces(begins[chosen], ends[chosen], seq_len)
        rows = best_fit(lengths, seq_len)
        order = np.argsort(rows, kind="stable")
        first = np.searchsorted(rows[order], np.arange(rows.max(initial=-1) + 2))
        return Packed(
            file.tokens,
            file.roles,  # type: ignore[arg-type]
            seq_len,
            keep_apart,
            starts[order],
            lengths[order],
            first,
            int(chosen.sum()),
            int(n_targets[chosen].sum()),
        )

    return pack(~held_out), pack(held_out) if held_out.any() else None


def _held_out(lengths: Ids, val_fraction: float) -> npt.NDArray[np.bool_]:
    """(D,): which documents. One at least on each side if two there are: the one whose length is nearest to the share,
    of several the middle one.
    """
    chosen = np.zeros(len(lengths), dtype=bool)
    chosen[spread(lengths.tolist(), val_fraction)] = True
    if val_fraction and len(lengths) > 1 and chosen.all() == chosen.any():
        share = (1 - val_fraction if chosen.all() else val_fraction) * lengths.sum()
        distance = np.abs(lengths - share)
        nearest = np.flatnonzero(distance == distance.min())
        chosen[nearest[len(nearest) // 2]] ^= True
    return chosen


def best_fit(lengths: Ids, capacity: int) -> Ids:
    """(P,): the row of each piece, rows numbered by their first piece. Pieces of one length are placed together."""
    rows = np.empty(len(lengths), dtype=np.int64)
    free: dict[int, list[int]] = {}  # rows by what is free in them
    sizes: list[int] = []  # its keys, sorted
    n_rows = 0
    order = np.argsort(-lengths, kind="stable")
    for pieces in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1):
        while len(pieces):
            length = int(lengths[pieces[0]])
            place = bisect_left(sizes, length)
            size = sizes.pop(place) if place < len(sizes) else capacity
            each = size // length
            wanted = -(-len(pieces) // each)
            there = free.pop(size, None) or list(range(n_rows, n_rows + wanted))
            taken, left = there[:wanted], there[wanted:]
            n_rows = max(n_rows, taken[-1] + 1)
            placed = pieces[: each * len(taken)]
            rows[placed] = np.repeat(taken, each)[: len(placed)]
            n_last = len(placed) - each * (len(taken) - 1)
            for group, rest in (
                (taken[:-1], size - each * length),
                (taken[-1:], size - n_last * length),
                (left, size),
            ):
                if group and rest and rest not in free:
                    insort(sizes, rest)
                if group and rest:
                    free.setdefault(rest, []).extend(group)
            pieces = pieces[len(placed) :]
    return _renumbered(rows)


def packed_batches(packed: Packed, micro_batch: int, max_rows: int) -> Iterator[Batch]:
    """The first `max_rows` rows in order, in batches."""
    n_rows = min(packed.n_rows, max_rows)
    for start in range(0, n_rows, micro_batch):
        yield packed.batch(np.arange(start, min(start + micro_batch, n_rows)))


class PackedLoader(Windows):
    """Windows of packed rows."""

    def __init__(self, packed: Packed, batching: Batching, content: str = "") -> None:
        super().__init__(packed.n_rows, batching, content)
        self._packed = packed

    def _read(self, epoch: int, samples: Ids) -> Batch:
        return self._packed.batch(samples)


def _documents(roles: npt.NDArray[np.uint8]) -> tuple[Ids, Ids]:
    """(end of each document, how many targets it has), (D,) each."""
    ends, learned_before, n_learned = [], [np.zeros(1, dtype=np.int64)], 0
    for start, chunk in chunks(roles):
        last = np.flatnonzero(chunk & LAST)
        learned = n_learned + np.cumsum(chunk & LEARNED, dtype=np.int64)
        ends.append(start + last + 1)
        learned_before.append(learned[last])
        n_learned = int(learned[-1])
    before = np.concatenate(learned_before)
    return np.concatenate(ends), before[1:] - before[:-1]


def _pieces(begins: Ids, ends: Ids, seq_len: int) -> tuple[Ids, Ids]:
    """(start, length) of each piece, in the order of the documents."""
    counts = -(-(ends - begins) // seq_len)
    within = _ranges(np.zeros_like(counts), counts)
    starts = np.repeat(begins, counts) + seq_len * within
    return starts, np.minimum(np.repeat(ends, counts) - starts, seq_len)


def _ranges(starts: Ids, lengths: Ids) -> Ids:
    """`lengths[0]` numbers from `starts[0]` on, then `lengths[1]` from `starts[1]` on, ..."""
    before = np.cumsum(lengths) - lengths
    places: Ids = np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
    return places


def _renumbered(rows: Ids) -> Ids:
    """Rows in the order of their first pieces, so that the unshuffled order is about that of the files."""
    _, first, inverse = np.unique(rows, return_index=True, return_inverse=True)
    numbers = np.empty(len(first), dtype=np.int64)
    numbers[np.argsort(first)] = np.arange(len(first))
    return numbers[inverse]
