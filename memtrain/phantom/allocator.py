"""The CUDA caching allocator, block by block, without memory behind it.

Source of every rule: c10/cuda/CUDACachingAllocator.cpp (`malloc`, `get_free_block`, `should_split`,
`get_allocation_size`, `release_cached_blocks`, `try_allocate_expandable_block`).
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from memtrain.units import MIB, format_bytes

MIN_BLOCK_BYTES = 512
SMALL_BYTES = 1 * MIB  # a request up to this comes from the small pool
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
MIN_LARGE_BYTES = 10 * MIB  # from here a segment is made to measure
ROUND_LARGE_BYTES = 2 * MIB
SEGMENT_SPACE_BYTES = 2**24 * LARGE_SEGMENT_BYTES  # address space of one expandable segment


def allocator_settings() -> str:
    """What a run started like this process would tell torch's allocators."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return next((os.environ[name] for name in names if name in os.environ), "")


class OutOfMemoryError(torch.OutOfMemoryError):
    """The card is full. `by_category` says what filled it, in bytes."""

    def __init__(
        self, asked_bytes: int, allocated_bytes: int, reserved_bytes: int, capacity_bytes: int
    ) -> None:
        self.asked_bytes = asked_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.capacity_bytes = capacity_bytes
        self.by_category: dict[str, int] = {}
        super().__init__(asked_bytes, allocated_bytes, reserved_bytes, capacity_bytes)

    def __str__(self) -> str:
        held = ", ".join(f"{format_bytes(b)} {name}" for name, b in self.by_category.items())
        return (
            f"phantom out of memory. Tried to allocate {format_bytes(self.asked_bytes)}. "
            f"The GPU has a capacity of {format_bytes(self.capacity_bytes)}, of which "
            f"{format_bytes(max(0, self.capacity_bytes - self.reserved_bytes))} is free. "
            f"{format_bytes(self.allocated_bytes)} is allocated, and "
            f"{format_bytes(self.reserved_bytes - self.allocated_bytes)} is reserved but unallocated."
            + (f" Allocated: {held}." if held else "")
        )


@dataclass(eq=False, slots=True)
class Block:
    """A contiguous piece of one segment. `prev` and `next` are its neighbours in the segment."""

    address: int
    size_bytes: int
    pool: Pool
    free: bool = False
    prev: Block | None = None
    next: Block | None = None


class Pool:
    """The free blocks of one stream and one size class, ordered by size, then by address."""

    __slots__ = ("blocks", "order", "small", "tail")

    def __init__(self, small: bool) -> None:
        self.small = small
        self.order: list[tuple[int, int]] = []
        self.blocks: dict[int, Block] = {}
        self.tail: Block | None = None  # the last block of the pool's expandable segment

    def add(self, block: Block) -> None:
        block.free = True
        self.blocks[block.address] = block
        insort(self.order, (block.size_bytes, block.address))

    def remove(self, block: Block) -> None:
        block.free = False
        del self.blocks[block.address]
        del self.order[bisect_left(self.order, (block.size_bytes, block.address))]

    def best_fit(self, size_bytes: int) -> Block | None:
        """The smallest block that fits. The growing end of a segment counts as the largest."""
        at = bisect_left(self.order, (size_bytes, -1))
        if at < len(self.order) and self.blocks[self.order[at][1]] is self.tail:
            at = min(at + 1, len(self.order) - 1)
        return self.blocks[self.order[at][1]] if at < len(self.order) else None

    def __iter__(self) -> Iterator[Block]:
        return iter(list(self.blocks.values()))


class CachingAllocator:
    """Allocated, active and reserved bytes as `torch.cuda.memory_stats` would give them.

    `capacity_bytes=None` is a card without end; `enforce=False` counts on past the capacity.
    Pages that an expandable segment gave back are not mapped again: it grows at its end instead,
    which may take a page more than filling the hole.
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        expandable_segments: bool = False,
        enforce: bool = True,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.expandable_segments = expandable_segments
        self.enforce = enforce
        self.allocated_bytes = 0
        self.active_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_active_bytes = 0
        self.peak_reserved_bytes = 0
        self.alloc_retries = 0
        self.ooms = 0
        self.synchronize: Callable[[], None] = lambda: None
        """Has every block retired that `free` kept active (`synchronize_and_free_events`)."""
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._next_address = 0

    def malloc(self, size_bytes: int, stream: int = 0) -> Block:
        """A block of at least `size_bytes`. Raises OutOfMemoryError."""
        rounded_bytes = max(MIN_BLOCK_BYTES, -(-size_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)
        pool = self._pool(stream, rounded_bytes <= SMALL_BYTES)
        block = pool.best_fit(rounded_bytes)
        if block is not None:
            pool.remove(block)
        else:
            block = self._new_block(pool, rounded_bytes, size_bytes)
        self._split(block, rounded_bytes)
        self.allocated_bytes += block.size_bytes
        self.active_bytes += block.size_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self.peak_active_bytes = max(self.peak_active_bytes, self.active_bytes)
        return block

    def free(self, block: Block, keep_active: bool = False) -> None:
        """Give `block` back; `keep_active` holds it until `retire`, for another stream's sake."""
        self.allocated_bytes -= block.size_bytes
        if not keep_active:
            self.retire(block)

    def retire(self, block: Block) -> None:
        """Return a block that `free` kept active to its pool, merged with its free neighbours."""
        self.active_bytes -= block.size_bytes
        if block.next is not None and block.next.free:
            self._merge(block, block.next)
        if block.prev is not None and block.prev.free:
            previous = block.prev
            block.pool.remove(previous)
            self._absorb(previous, block)
            block = previous
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Return what is free to the card: whole segments, or whole pages if they expand."""
        self.synchronize()
        for pool in self._pools.values():
            for block in pool:
                if self.expandable_segments:
                    self._unmap(block)
                elif block.prev is None and block.next is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size_bytes

    @property
    def fragmentation_bytes(self) -> int:
        """Reserved, but in no block that is in use."""
        return self.reserved_bytes - self.active_bytes

    @property
    def largest_free_block_bytes(self) -> int:
        return max((pool.order[-1][0] for pool in self._pools.values() if pool.order), default=0)

    def reset_peaks(self) -> None:
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_active_bytes = self.active_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def _pool(self, stream: int, small: bool) -> Pool:
        key = (stream, small)
        if key not in self._pools:
            self._pools[key] = Pool(small)
        return self._pools[key]

    def _new_block(self, pool: Pool, rounded_bytes: int, asked_bytes: int) -> Block:
        if self.expandable_segments:
            return self._expand(pool, rounded_bytes, asked_bytes)
        segment_bytes = _segment_bytes(rounded_bytes)
        self._make_room(segment_bytes)
        self._reserve(segment_bytes, asked_bytes)
        return self._place(pool, segment_bytes)

    def _place(self, pool: Pool, size_bytes: int) -> Block:
        block = Block(self._next_address, size_bytes, pool)
        self._next_address += size_bytes + MIN_BLOCK_BYTES  # a gap: segments never merge
        return block

    def _reserve(self, size_bytes: int, asked_bytes: int) -> None:
        if self.enforce and not self._fits(size_bytes):
            assert self.capacity_bytes is not None
            self.ooms += 1
            raise OutOfMemoryError(
                asked_bytes, self.allocated_bytes, self.reserved_bytes, self.capacity_bytes
            )
        self.reserved_bytes += size_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _make_room(self, size_bytes: int) -> None:
        if not self._fits(size_bytes):
            self.alloc_retries += 1
            self.empty_cache()

    def _fits(self, size_bytes: int) -> bool:
        return (
            self.capacity_bytes is None or self.reserved_bytes + size_bytes <= self.capacity_bytes
        )

    def _split(self, block: Block, size_bytes: int) -> None:
        """Cut `block` to size if the rest is worth keeping (`should_split`)."""
        rest_bytes = block.size_bytes - size_bytes
        if block.pool.small or self.expandable_segments:
            worth_it = rest_bytes >= MIN_BLOCK_BYTES
        else:
            worth_it = rest_bytes > SMALL_BYTES
        if not worth_it:
            return
        rest = Block(block.address + size_bytes, rest_bytes, block.pool)
        rest.prev, rest.next, block.next = block, block.next, rest
        if rest.next is not None:
            rest.next.prev = rest
        block.size_bytes = size_bytes
        if block.pool.tail is block:
            block.pool.tail = rest
        block.pool.add(rest)

    def _merge(self, block: Block, neighbour: Block) -> None:
        neighbour.pool.remove(neighbour)
        self._absorb(block, neighbour)

    def _absorb(self, block: Block, after: Block) -> None:
        block.size_bytes += after.size_bytes
        block.next = after.next
        if after.next is not None:
            after.next.prev = block
        if block.pool.tail is after:
            block.pool.tail = block

    def _expand(self, pool: Pool, rounded_bytes: int, asked_bytes: int) -> Block:
        """Map more pages at the end of the pool's segment, until its last block is large enough."""
        self._make_room(_missing_bytes(pool, rounded_bytes))  # may take pages of the last block
        new_bytes = _missing_bytes(pool, rounded_bytes)
        self._reserve(new_bytes, asked_bytes)
        tail = pool.tail
        if tail is not None and tail.free:
            pool.remove(tail)
            tail.size_bytes += new_bytes
            return tail
        return self._grow(pool, new_bytes)

    def _grow(self, pool: Pool, new_bytes: int) -> Block:
        last = pool.tail
        if last is None:
            block = Block(self._next_address, new_bytes, pool)
            self._next_address += SEGMENT_SPACE_BYTES
        else:
            block = Block(last.address + last.size_bytes, new_bytes, pool)
            block.prev, last.next = last, block
        pool.tail = block
        return block

    def _unmap(self, block: Block) -> None:
        """Give the whole pages inside a free block back. The hole is not filled again:
        the segment grows at its end instead, and address space costs nothing."""
        page_bytes = _page_bytes(block.pool)
        end = block.address + block.size_bytes
        first = -(-block.address // page_bytes) * page_bytes
        last = end // page_bytes * page_bytes
        if last <= first:
            return
        pool = block.pool
        pool.remove(block)
        self.reserved_bytes -= last - first
        before, after = block.prev, block.next
        if first > block.address:
            left = Block(block.address, first - block.address, pool)
            left.prev = before
            if before is not None:
                before.next = left
            pool.add(left)
            before = left
        elif before is not None:
            before.next = None
        if end > last:
            right = Block(last, end - last, pool)
            right.next = after
            if after is not None:
                after.prev = right
            pool.add(right)
        elif after is not None:
            after.prev = None
        if pool.tail is block:
            pool.tail = before


def _segment_bytes(size_bytes: int) -> int:
    """What is asked of the driver for a block of `size_bytes` (`get_allocation_size`)."""
    if size_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size_bytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


def _page_bytes(pool: Pool) -> int:
    return SMALL_SEGMENT_BYTES if pool.small else LARGE_SEGMENT_BYTES


def _missing_bytes(pool: Pool, size_bytes: int) -> int:
    """Pages to map so that the end of the segment holds `size_bytes`."""
    at_hand_bytes = pool.tail.size_bytes if pool.tail is not None and pool.tail.free else 0
    return -(-(size_bytes - at_hand_bytes) // _page_bytes(pool)) * _page_bytes(pool)
