"""Sequences worked out by hand from the rules of CUDACachingAllocator.cpp."""

from __future__ import annotations

import pytest
import torch

from memtrain.phantom import CachingAllocator, OutOfMemoryError, PhantomGPU
from memtrain.units import KIB, MIB


def test_small_requests_share_a_2_mib_segment() -> None:
    allocator = CachingAllocator()
    a, b = allocator.malloc(1), allocator.malloc(513)
    assert (a.size_bytes, b.size_bytes) == (512, 1024)
    assert allocator.allocated_bytes == 1536
    assert allocator.reserved_bytes == 2 * MIB
    assert allocator.largest_free_block_bytes == 2 * MIB - 1536


def test_medium_requests_share_a_20_mib_segment() -> None:
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.malloc(5 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.malloc(5 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


def test_large_requests_get_a_segment_to_measure() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(10 * MIB + 1)
    assert allocator.reserved_bytes == 12 * MIB
    # 2 MiB less 512 B are left, which is more than 1 MiB: split.
    assert block.size_bytes == 10 * MIB + 512


def test_a_large_block_keeps_a_rest_of_up_to_1_mib() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(11 * MIB)
    assert block.size_bytes == 12 * MIB
    assert allocator.allocated_bytes == 12 * MIB


def test_free_neighbours_merge() -> None:
    allocator = CachingAllocator()
    a, b, c = (allocator.malloc(600 * KIB) for _ in range(3))
    allocator.free(a)
    allocator.free(c)
    assert allocator.largest_free_block_bytes == 2 * MIB - 1200 * KIB
    allocator.free(b)
    assert allocator.largest_free_block_bytes == 2 * MIB
    assert allocator.allocated_bytes == 0
    assert allocator.reserved_bytes == allocator.fragmentation_bytes == 2 * MIB


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = CachingAllocator()
    large, _, small, _ = (allocator.malloc(size * KIB) for size in (400, 1, 200, 1))
    address = small.address
    allocator.free(large)
    allocator.free(small)
    assert allocator.malloc(150 * KIB).address == address


def test_streams_have_their_own_pools() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(1 * MIB, stream=0)
    allocator.free(block)
    allocator.malloc(1 * MIB, stream=1)
    assert allocator.reserved_bytes == 4 * MIB


def test_free_segments_are_given_back_before_giving_up() -> None:
    allocator = CachingAllocator(capacity_bytes=50 * MIB)
    allocator.free(allocator.malloc(30 * MIB))
    assert allocator.reserved_bytes == 30 * MIB
    allocator.malloc(40 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    assert allocator.peak_reserved_bytes == 40 * MIB


def test_fragmented_memory_is_out_of_memory() -> None:
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    blocks = [allocator.malloc(5 * MIB) for _ in range(8)]
    for block in blocks[::2]:
        allocator.free(block)
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.malloc(10 * MIB)
    assert caught.value.asked_bytes == 10 * MIB
    assert caught.value.allocated_bytes == 20 * MIB
    assert caught.value.reserved_bytes == caught.value.capacity_bytes == 40 * MIB
    assert allocator.fragmentation_bytes == 20 * MIB
    assert allocator.largest_free_block_bytes == 5 * MIB
    assert "phantom out of memory. Tried to allocate 10.00 MiB" in str(caught.value)


def test_expandable_segments_do_not_fragment() -> None:
    allocator = CachingAllocator(capacity_bytes=60 * MIB, expandable_segments=True)
    first = allocator.malloc(15 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    second = allocator.malloc(15 * MIB)  # 5 MiB at the end, and one page more
    assert allocator.reserved_bytes == 40 * MIB
    assert second.address == first.address + 15 * MIB
    allocator.free(first)
    allocator.free(second)
    assert allocator.largest_free_block_bytes == 40 * MIB
    assert allocator.malloc(50 * MIB).size_bytes == 50 * MIB
    assert allocator.reserved_bytes == 60 * MIB


def test_expandable_segments_give_whole_pages_back() -> None:
    allocator = CachingAllocator(capacity_bytes=80 * MIB, expandable_segments=True)
    first = allocator.malloc(50 * MIB)
    keep = allocator.malloc(5 * MIB)
    allocator.free(first)
    assert allocator.reserved_bytes == 60 * MIB
    allocator.malloc(60 * MIB)  # 0-40 MiB is unmapped; 40-50 stays, 55-60 is at the end
    assert allocator.reserved_bytes == 80 * MIB
    allocator.free(keep)
    assert allocator.largest_free_block_bytes == 15 * MIB


def test_a_block_kept_for_another_stream_stays_active() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(1 * MIB)
    allocator.free(block, keep_active=True)
    assert (allocator.allocated_bytes, allocator.active_bytes) == (0, 1 * MIB)
    assert allocator.malloc(1 * MIB).address != block.address
    allocator.retire(block)
    assert allocator.active_bytes == 1 * MIB


def test_without_enforcement_it_counts_on() -> None:
    allocator = CachingAllocator(capacity_bytes=4 * MIB, enforce=False)
    allocator.malloc(10 * MIB)
    assert allocator.reserved_bytes == 10 * MIB


def test_blocks_kept_for_a_stream_are_waited_for_before_giving_up() -> None:
    with PhantomGPU(capacity_bytes=100 * MIB) as gpu:
        module = torch.get_device_module("phantom")
        side = module.Stream()
        x = torch.empty(60 * MIB, dtype=torch.uint8, device=gpu.device)
        side.wait_stream(module.current_stream())
        with module.stream(side):
            x.add_(1)
        x.record_stream(side)
        del x
        assert module.memory_stats()["active_bytes.all.current"] == 60 * MIB
        y = torch.empty(60 * MIB, dtype=torch.uint8, device=gpu.device)
        stats = module.memory_stats()
        assert (stats["num_alloc_retries"], stats["num_ooms"]) == (1, 0)
        assert stats["active_bytes.all.current"] == 60 * MIB
        side.wait_stream(module.current_stream())
        with module.stream(side):
            y.add_(1)
        y.record_stream(side)
        del y
        module.empty_cache()
        assert module.memory_reserved() == 0
        side.synchronize()
        assert module.memory_stats()["active_bytes.all.current"] == 0


@pytest.mark.parametrize("expandable", [False, True])
def test_retries_and_failures_are_counted(expandable: bool) -> None:
    allocator = CachingAllocator(100 * MIB, expandable_segments=expandable)
    allocator.free(allocator.malloc(60 * MIB))
    allocator.malloc(80 * MIB)
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(80 * MIB)
    assert allocator.ooms == 1
    assert allocator.alloc_retries == (1 if expandable else 2)


def test_a_storage_that_grows_is_there_twice_for_a_moment() -> None:
    with PhantomGPU() as gpu:
        memory = torch.get_device_module("phantom")
        x = torch.empty(16 * MIB, dtype=torch.uint8, device=gpu.device)
        x.resize_(32 * MIB)
        assert memory.max_memory_allocated() == 48 * MIB
        assert memory.memory_allocated() == 32 * MIB
        x.resize_(16 * MIB)  # a smaller tensor on the same storage
        y = torch.empty(0, dtype=torch.uint8, device=gpu.device).set_(x)
        assert memory.max_memory_allocated() == 48 * MIB
        x.untyped_storage().resize_(0)
        assert memory.memory_allocated() == 0
        assert y.numel() == 16 * MIB


def test_a_workspace_that_did_not_fit_is_taken_later() -> None:
    with PhantomGPU(capacity_bytes=30 * MIB) as gpu:
        a = torch.empty(512, 512, device=gpu.device)
        big = torch.empty(26 * MIB, dtype=torch.uint8, device=gpu.device)
        with pytest.raises(torch.OutOfMemoryError):
            a @ a
        del big
        a @ a
    assert gpu.report().end_allocated_bytes >= gpu.meter.card.workspace_bytes
