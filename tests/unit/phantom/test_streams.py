"""What one stream may do with memory that another still uses: with the wait, and without."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from memtrain.phantom import PhantomGPU, RaceError

N = 2**20
LET_GO = ["del", "resize_"]
both = pytest.mark.parametrize("waits", [True, False], ids=["waits", "races"])


def race_unless(waits: bool, match: str) -> AbstractContextManager[object]:
    return nullcontext() if waits else pytest.raises(RaceError, match=match)


@pytest.fixture
def gpu():
    with PhantomGPU() as gpu:
        yield gpu


@pytest.fixture
def module(gpu):
    return torch.get_device_module("phantom")


@pytest.fixture
def side(module):
    return module.Stream()


@both
@pytest.mark.parametrize("let_go", LET_GO)
def test_memory_that_a_copy_still_reads_is_not_reused(gpu, module, side, waits, let_go) -> None:
    x, host = torch.ones(N, device=gpu.device), torch.empty(N, pin_memory=True)
    side.wait_stream(module.current_stream())
    with module.stream(side):
        host.copy_(x, non_blocking=True)
    if waits:
        module.current_stream().wait_stream(side)
    if let_go == "resize_":
        x.untyped_storage().resize_(0)
    else:
        del x
    with race_unless(waits, r"aten\.empty.*stream 0 may get the memory .*while stream \d+ uses it"):
        torch.empty(N, device=gpu.device)


@both
@pytest.mark.parametrize("let_go", LET_GO)
def test_memory_that_is_being_filled_is_not_reused(gpu, module, side, waits, let_go) -> None:
    host = torch.ones(N).pin_memory()
    x = torch.empty(N, device=gpu.device)
    side.wait_stream(module.current_stream())
    with module.stream(side):
        x.copy_(host, non_blocking=True)
    if waits:
        module.current_stream().wait_event(side.record_event())
    if let_go == "resize_":
        x.untyped_storage().resize_(0)
    else:
        del x
    with race_unless(waits, "may get the memory"):
        torch.ones(N, device=gpu.device)


@pytest.mark.parametrize("let_go", LET_GO)
def test_memory_of_a_recorded_stream_is_kept(gpu, module, side, let_go) -> None:
    x = torch.ones(N, device=gpu.device)
    side.wait_stream(module.current_stream())
    with module.stream(side):
        x.mul_(2)
    x.record_stream(side)
    if let_go == "resize_":
        x.untyped_storage().resize_(0)
    else:
        del x
    y = torch.ones(N, device=gpu.device)
    assert module.memory_allocated() == y.nbytes
    assert module.memory_stats()["active_bytes.all.current"] == 2 * y.nbytes


def test_memory_that_nobody_gets_may_be_freed_early(gpu, module, side) -> None:
    """The owner has waited before it runs anything; the last is freed at the end of the run."""
    x, y = torch.ones(N, device=gpu.device), torch.ones(N, device=gpu.device)
    side.wait_stream(module.current_stream())
    with module.stream(side):
        x.mul_(2)
        del x
        y.mul_(2)
    module.current_stream().wait_stream(side)
    torch.ones(N, device=gpu.device)
    with module.stream(side):
        y.mul_(2)
        del y


def test_memory_of_a_side_stream_goes_back_to_it(gpu, module, side) -> None:
    with module.stream(side):
        x = torch.ones(N, device=gpu.device)
    module.current_stream().wait_stream(side)
    x.mul_(2)
    del x
    torch.ones(N, device=gpu.device)
    with module.stream(side), pytest.raises(RaceError, match="while stream 0 uses it"):
        torch.ones(N, device=gpu.device)


@both
def test_memory_that_is_filled_again_was_done_with(gpu, module, side, waits) -> None:
    """The new block is the computing stream's: another fills it after what was launched there."""
    x, host = torch.ones(N, device=gpu.device), torch.ones(N).pin_memory()
    x.untyped_storage().resize_(0)
    y = torch.ones(N, device=gpu.device)
    del y
    x.untyped_storage().resize_(4 * N)
    if waits:
        side.wait_stream(module.current_stream())
    with module.stream(side), race_unless(waits, "writes a device tensor .* that stream 0 writes"):
        x.copy_(host, non_blocking=True)


@both
def test_what_a_copy_still_reads_is_not_overwritten(gpu, module, side, waits) -> None:
    x, host = torch.ones(N, device=gpu.device), torch.empty(N, pin_memory=True)
    side.wait_stream(module.current_stream())
    with module.stream(side):
        host.copy_(x, non_blocking=True)
    x + 1
    if waits:
        module.current_stream().wait_stream(side)
    with race_unless(waits, r"aten\.mul_.*stream 0 writes a device tensor .* stream \d+ reads"):
        x.mul_(2)


def test_a_write_orders_the_reads_before_it(gpu, module, side) -> None:
    x, other = torch.ones(N, device=gpu.device), module.Stream()
    side.wait_stream(module.current_stream())
    with module.stream(side):
        x + 1
    module.current_stream().wait_stream(side)
    x.mul_(2)
    other.wait_stream(module.current_stream())
    with module.stream(other):
        x.mul_(2)


@both
def test_a_pinned_buffer_on_its_way_is_not_filled_again(gpu, module, side, waits) -> None:
    host, x = torch.ones(N).pin_memory(), torch.ones(N, device=gpu.device)
    y = torch.empty(N, device=gpu.device)
    to_device = module.Stream()
    for stream in (side, to_device):
        stream.wait_stream(module.current_stream())
    with module.stream(to_device):
        y.copy_(host, non_blocking=True)
    if waits:
        side.wait_stream(to_device)
    with module.stream(side), race_unless(waits, r"writes a pinned tensor .* stream \d+ reads"):
        host.copy_(x, non_blocking=True)


@both
def test_two_streams_do_not_fill_one_buffer(gpu, module, side, waits) -> None:
    host, x = torch.empty(N, pin_memory=True), torch.ones(N, device=gpu.device)
    side.wait_stream(module.current_stream())
    with module.stream(side):
        host.copy_(x, non_blocking=True)
    if waits:
        module.current_stream().wait_stream(side)
    with race_unless(waits, r"stream 0 writes a pinned tensor .* that stream \d+ writes"):
        host.copy_(x, non_blocking=True)


@both
@pytest.mark.parametrize("way", ["h2d", "d2h"])
def test_the_host_does_not_overwrite_what_a_copy_uses(gpu, module, side, waits, way) -> None:
    host, x = torch.ones(N).pin_memory(), torch.ones(N, device=gpu.device)
    target, source = (x, host) if way == "h2d" else (host, x)
    side.wait_stream(module.current_stream())
    with module.stream(side):
        target.copy_(source, non_blocking=True)
    if waits:
        side.synchronize()
    with race_unless(waits, r"aten\.zero_.*the host writes a pinned tensor"):
        host.zero_()


def test_pinned_memory_may_be_freed_at_any_time(gpu, module, side) -> None:
    host, x = torch.ones(N).pin_memory(), torch.empty(N, device=gpu.device)
    side.wait_stream(module.current_stream())
    with module.stream(side):
        x.copy_(host, non_blocking=True)
    del host
    torch.ones(N).pin_memory()
    torch.ones(N, device=gpu.device)
