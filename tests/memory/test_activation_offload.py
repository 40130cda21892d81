"""Segments wrapped by ActivationOffload: the same gradients, what arithmetic says moves, and nothing left behind."""

import gc
import warnings
import weakref
from functools import partial

import pytest
import torch
from allpairspy import AllPairs
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from memtrain.data.loader import Batch
from memtrain.device import autocast
from memtrain.memory.activation_offload import ActivationOffload, _Moved
from memtrain.model.language_model import Segment
from memtrain.model.transformer import Dimensions, make_transformer
from memtrain.phantom import PhantomGPU, RaceError
from memtrain.phantom.ledger import page_bytes

CPU = torch.device("cpu")
GPT = Dimensions(vocab_size=64, dim=32, n_layers=4, n_heads=2, n_kv_heads=2, ffn_dim=128, max_seq_len=16)  # fmt: skip
LLAMA = Dimensions(vocab_size=64, dim=32, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=64, max_seq_len=16,
                   norm="rmsnorm", activation="swiglu", positions="rope", tied=False, bias=False)  # fmt: skip
PRECISIONS = {
    "fp32": (torch.float32, None),
    "bf16": (torch.float32, torch.bfloat16),
    "fp16": (torch.float32, torch.float16),
    "bf16_true": (torch.bfloat16, None),
}


def make_model(dimensions=GPT, dtype=torch.float32, recompute=0, device=CPU, frozen=()):
    torch.manual_seed(0)
    model = make_transformer(dimensions, device, dtype)
    if recompute:
        groups = [
            model.segments[i : i + recompute] for i in range(0, len(model.segments), recompute)
        ]
        model.segments = [
            Segment([], partial(checkpoint, partial(run_all, group), use_reentrant=False))
            for group in groups
        ]
    for index in frozen:
        model.blocks[index].requires_grad_(False)
    return model


def run_all(segments, x, rotary) -> Tensor:
    for segment in segments:
        x = segment(x, rotary)
    return x


def offload(model, min_bytes=0, n_kept=1) -> ActivationOffload:
    """The last `n_kept` segments keep what they save."""
    offloaded = ActivationOffload(model, min_bytes)
    first_kept = len(model.segments) - n_kept
    model.segments = [
        offloaded.wrap(segment, keep=index >= first_kept)
        for index, segment in enumerate(model.segments)
    ]
    return offloaded


def batch(n=4, seq_len=16, device=CPU) -> Batch:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 64, (n, seq_len), generator=generator)
    return Batch(tokens, tokens, tokens.numel())


def loss_of(model, tokens, compute=None):
    with autocast(tokens.device, compute):
        hidden = model(tokens)
        return torch.nn.functional.linear(hidden, model.head.weight).float().square().mean()


def gradients(model, compute=None, micro_batch=4) -> dict[str, Tensor]:
    torch.manual_seed(1)  # dropout
    model.zero_grad()
    for tokens in batch().tokens.split(micro_batch):
        loss_of(model, tokens, compute).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys() and ours
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def free_buffers(offloaded: ActivationOffload) -> list[Tensor]:
    return [buffer for buffers in offloaded._pool.free.values() for buffer in buffers]


def is_idle(offloaded: ActivationOffload) -> bool:
    """Every buffer is back in the pool."""
    return sum(buffer.nbytes for buffer in free_buffers(offloaded)) == offloaded.host_bytes


@pytest.mark.parametrize(
    ("precision", "recompute", "micro_batch", "dropout", "base"),
    list(AllPairs([list(PRECISIONS), (0, 1, 3), (4, 2), (0.0, 0.5), (GPT, LLAMA)])),
)
def test_gradients_are_bit_equal(precision, recompute, micro_batch, dropout, base):
    dtype, compute = PRECISIONS[precision]
    dimensions = Dimensions(**{**vars(base), "dropout": dropout})
    make = partial(make_model, dimensions, dtype, recompute)
    plain = gradients(make(), compute, micro_batch)
    for n_kept in (1, 0, 2):
        model = make()
        offloaded = offload(model, n_kept=n_kept)
        for _ in range(2):
            assert_equal(gradients(model, compute, micro_batch), plain)
        assert (offloaded.moved_bytes > 0) == (n_kept < len(model.segments))
        assert is_idle(offloaded)


@pytest.mark.parametrize("frozen", [(0,), (1, 2), (0, 1, 2), (3,), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("recompute", [0, 1])
def test_frozen_layers(frozen, recompute):
    make = partial(make_model, LLAMA, recompute=recompute, frozen=frozen)
    plain = gradients(make())
    model = make()
    offloaded = offload(model)
    assert_equal(gradients(model), plain)
    assert is_idle(offloaded)


def test_a_frozen_start_moves_nothing():
    model = make_model(frozen=(0, 1, 2, 3))
    model.embedding.requires_grad_(False)
    model.positions.requires_grad_(False)
    offloaded = offload(model, n_kept=0)
    loss_of(model, batch().tokens).backward()
    assert offloaded.moved_bytes == 0


@pytest.mark.parametrize("dimensions", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("compute", [None, torch.bfloat16])
@pytest.mark.parametrize("recompute", [0, 1])
@pytest.mark.parametrize("min_bytes", [0, 5000])
def test_every_storage_moves_once(dimensions, compute, recompute, min_bytes):
    """Against hooks that only look: the storages that segments save, parameters and the rotary table aside."""
    plain = make_model(dimensions, recompute=recompute)
    seen: dict[int, Tensor] = {}
    stay = {p.untyped_storage()._cdata for p in plain.parameters()}

    def look(tensor):
        seen[tensor.untyped_storage()._cdata] = tensor  # alive, so that no address comes twice
        return tensor

    def watch(segment):
        def run(x, rotary):
            if rotary is not None:
                stay.add(rotary.untyped_storage()._cdata)
            with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
                return segment(x, rotary)

        return run

    plain.segments = [*map(watch, plain.segments[:-1]), plain.segments[-1]]
    loss = loss_of(plain, batch().tokens, compute)
    sizes = [t.untyped_storage().nbytes() for address, t in seen.items() if address not in stay]
    expected_bytes = sum(size for size in sizes if size >= min_bytes)
    del loss
    model = make_model(dimensions, recompute=recompute)
    offloaded = offload(model, min_bytes)
    loss_of(model, batch().tokens, compute).backward()
    assert offloaded.moved_bytes == expected_bytes > 0
    if recompute:
        assert expected_bytes == 3 * 4 * 16 * 32 * 4  # the inputs of three segments


def test_views_of_one_storage_come_back_as_they_were():
    offloaded = ActivationOffload(torch.nn.Linear(1, 1), 0)
    saved: list[Tensor] = []

    def save(x, rotary):
        base = (x * 2).detach()
        views = (base, base[2:4].t(), base[:, 1], base.view(-1)[::3], base.expand(2, 4, 6), base[1])
        for view in (*views, base.view(torch.int32)[1:]):
            saved.append(view.clone())
            saves.append(_Saves.apply(x, view))
        return x + 1

    saves: list[Tensor] = []
    x = torch.randn(4, 6, requires_grad=True)
    run = offloaded.wrap(Segment([0], save))
    run(x, None)
    for output, expected in zip(saves, saved, strict=True):
        (view,) = output.grad_fn.saved_tensors
        assert torch.equal(view, expected)
    assert offloaded.moved_bytes == 4 * 6 * 4


class _Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, view):
        ctx.save_for_backward(view)
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError


def test_nothing_moves_without_gradients():
    model = make_model()
    offloaded = offload(model)
    expected = make_model()(batch().tokens)
    with torch.no_grad():
        assert torch.equal(model(batch().tokens), expected)
    with torch.inference_mode():
        model.eval()(batch().tokens)
    assert offloaded.moved_bytes == offloaded.host_bytes == 0


def test_backward_twice():
    plain, model = make_model(), make_model()
    offloaded = offload(model, n_kept=0)
    for each in (plain, model):
        loss = loss_of(each, batch().tokens)
        loss.backward(retain_graph=True)
        loss.backward()
        del loss
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert is_idle(offloaded)


def test_a_forward_pass_drops_the_one_before():
    model = make_model()
    offloaded = offload(model)
    old, new = (loss_of(model, batch().tokens) for _ in range(2))
    with pytest.raises(AssertionError, match="another one has followed"):
        old.backward()
    model.zero_grad()
    new.backward()
    assert_equal({n: p.grad for n, p in model.named_parameters()}, gradients(make_model()))
    assert is_idle(offloaded)


@pytest.mark.parametrize("recompute", [0, 1])
def test_buffers_are_reused(recompute):
    model = make_model(LLAMA, recompute=recompute)
    offloaded = offload(model)
    sizes = []
    for _ in range(5):
        before = offloaded.moved_bytes
        gradients(model, micro_batch=2)
        sizes.append(offloaded.host_bytes)
        assert is_idle(offloaded)
    assert len(set(sizes)) == 1
    assert sizes[0] == (offloaded.moved_bytes - before) // 2  # one forward pass, of two


def test_buffers_fit_other_shapes():
    model = make_model()
    offloaded = offload(model)
    loss_of(model, batch(4).tokens).backward()
    full_bytes = offloaded.host_bytes
    for n in (1, 3, 4, 2, 4):
        loss_of(model, batch(n).tokens).backward()
        assert is_idle(offloaded)
    assert offloaded.host_bytes == full_bytes


@pytest.mark.parametrize("recompute", [0, 1])
@pytest.mark.parametrize(
    "where", ["head.weight", "blocks.3.mlp.up.weight", "blocks.1.mlp.up.weight"]
)
def test_an_exception_in_backward_leaves_nothing_behind(recompute, where):
    """Autograd on the CPU keeps the nodes that it had queued; the next forward pass takes their buffers back."""
    plain = gradients(make_model(LLAMA, recompute=recompute))
    model = make_model(LLAMA, recompute=recompute)
    offloaded = offload(model)
    gradients(model)
    host_bytes = offloaded.host_bytes

    def fail(grad):
        raise RuntimeError("in the middle")

    handle = model.get_parameter(where).register_hook(fail)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="in the middle"):
            gradients(model)
    handle.remove()
    for _ in range(2):
        assert_equal(gradients(model), plain)
        assert is_idle(offloaded) and offloaded.host_bytes == host_bytes
    buffers = [weakref.ref(buffer) for buffer in free_buffers(offloaded)]
    del model, offloaded, handle
    gc.collect()
    assert buffers and not any(buffer() is not None for buffer in buffers)


def test_an_exception_in_forward_leaves_nothing_behind():
    model = make_model()
    offloaded = offload(model)
    expected = gradients(model)

    def fail(*args):
        raise RuntimeError("in the middle")

    handle = model.blocks[2].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        gradients(model)
    handle.remove()
    gc.collect()
    assert is_idle(offloaded)
    assert_equal(gradients(model), expected)


def test_no_reference_cycle_keeps_tensors():
    """What is freed is freed at once: the peak does not depend on the garbage collector."""
    gc.disable()
    try:
        model = make_model(LLAMA)
        offloaded = offload(model)
        loss = loss_of(model, batch().tokens)
        assert not is_idle(offloaded)
        del loss
        assert is_idle(offloaded)
    finally:
        gc.enable()


# --- on the phantom -----------------------------------------------------------------------------------------------

N_LAYERS, DIM, N_HEADS, SEQ_LEN, MICRO_BATCH = 8, 768, 12, 512, 8
N_TOKENS = MICRO_BATCH * SEQ_LEN
WIDE = Dimensions(vocab_size=64, dim=DIM, n_layers=N_LAYERS, n_heads=N_HEADS, n_kv_heads=N_HEADS, ffn_dim=4 * DIM,
                  max_seq_len=SEQ_LEN)  # fmt: skip
BLOCK_BYTES = N_TOKENS * (36 * DIM + 16 + 4 * N_HEADS)
"""Saved by one block under bf16 autocast. Bytes per token and width: residual stream twice in fp32 (8), both norms'
outputs (4), q, k, v (6), attention's output (2), hidden units before and after GELU (16); per token: two norms'
statistics (16) and attention's log-sum-exp of every head (4)."""


def run_phantom(recompute=0, offloads=True, n_kept=1, n_steps=2, accum=2):
    """The report of the last step, and the pages of host memory after every step."""
    host_bytes = []
    with PhantomGPU() as gpu:
        model = make_model(WIDE, recompute=recompute, device=gpu.device)
        offloaded = offload(model, n_kept=n_kept) if offloads else None
        for _ in range(n_steps):
            gpu.step_boundary()
            for _ in range(accum):
                tokens = torch.zeros(MICRO_BATCH, SEQ_LEN, dtype=torch.int64, device=gpu.device)
                loss_of(model, tokens, torch.bfloat16).backward()
            model.zero_grad()
            if offloaded is not None:
                assert is_idle(offloaded)
                host_bytes.append(sum(page_bytes(b.nbytes) for b in free_buffers(offloaded)))
        return gpu.report(), host_bytes


def test_bytes_on_the_phantom():
    plain, _ = run_phantom(offloads=False)
    report, host_bytes = run_phantom()
    moved_bytes = 2 * (N_LAYERS - 1) * BLOCK_BYTES
    assert report.d2h_bytes == report.h2d_bytes == pytest.approx(moved_bytes, rel=0.02)
    assert report.host_pinned_peak_bytes == host_bytes[0]
    assert host_bytes[0] == pytest.approx((N_LAYERS - 1) * BLOCK_BYTES, rel=0.02)
    # At the peak, in backward, the last block's are there, and those of the block before are on their way.
    fallen_bytes = plain.peak_allocated_bytes - report.peak_allocated_bytes
    assert fallen_bytes == pytest.approx((N_LAYERS - 2) * BLOCK_BYTES, rel=0.02)
    assert report.peak_active_bytes == report.peak_allocated_bytes  # nothing waits for an event


def test_half_of_the_blocks_on_the_phantom():
    """They are gone from the device until backward comes near them."""
    n_moved = N_LAYERS // 2
    plain, _ = run_phantom(offloads=False)
    report, _ = run_phantom(n_kept=N_LAYERS - n_moved)
    fallen_bytes = plain.peak_allocated_bytes - report.peak_allocated_bytes
    assert fallen_bytes == pytest.approx(n_moved * BLOCK_BYTES, rel=0.02)
    assert report.d2h_bytes == pytest.approx(2 * n_moved * BLOCK_BYTES, rel=0.02)


def test_only_segment_inputs_travel_with_recompute():
    report, host_bytes = run_phantom(recompute=2)
    input_bytes = N_TOKENS * DIM * 4
    assert report.d2h_bytes == report.h2d_bytes == pytest.approx(2 * 3 * input_bytes, rel=0.02)
    assert host_bytes == [3 * input_bytes] * 2


def test_pinned_bytes_do_not_grow_on_the_phantom():
    report, host_bytes = run_phantom(n_steps=5)
    assert set(host_bytes) == {report.host_pinned_peak_bytes}


def test_without_pinned_memory_it_goes_on_and_says_so_once(monkeypatch):
    empty = torch.empty

    def refuse(*size, pin_memory=False, **settings):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nand many lines more")
        return empty(*size, **settings)

    monkeypatch.setattr(torch, "empty", refuse)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report, host_bytes = run_phantom()
    (warning,) = [w for w in caught if "pinned" in str(w.message)]
    assert "no pinned memory (CUDA error: out of memory); pageable" in str(warning.message)
    assert report.host_pinned_peak_bytes == 0
    assert report.d2h_bytes == pytest.approx(2 * host_bytes[0], rel=0.02)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_without_any_host_memory_the_error_is_that_one(monkeypatch):
    def refuse(*size, **settings):
        raise MemoryError("no host memory")

    with PhantomGPU() as gpu:
        x = torch.ones(1000, device=gpu.device, requires_grad=True) + 1
        run = ActivationOffload(torch.nn.Linear(1, 1), 0).wrap(Segment([0], lambda x, _: x * x))
        monkeypatch.setattr(torch, "empty", refuse)
        with pytest.raises(MemoryError, match="no host memory"):
            run(x, None)
        gc.collect()


def test_two_runs_in_one_process_are_alike():
    first, second = run_phantom(), run_phantom()
    assert first[0].peak_allocated_bytes == second[0].peak_allocated_bytes
    assert first[0].timeline == second[0].timeline
    assert (first[0].h2d_bytes, first[1]) == (second[0].h2d_bytes, second[1])


def read_back(gpu) -> Tensor:
    """Square in the first of three segments, and ask for what it saved, as backward does."""
    torch.get_device_module("phantom").Stream()  # from the second stream on the phantom looks
    offloaded = ActivationOffload(torch.nn.Linear(1, 1), 0)
    square, double = Segment([0], lambda x, _: x * x), Segment([1], lambda x, _: x * 2)
    x = torch.empty(1000, device=gpu.device, requires_grad=True) + 1
    y = offloaded.wrap(square)(x, None)
    z = offloaded.wrap(double)(y, None)
    assert z.shape == y.shape
    return y.grad_fn._saved_self + 1


def test_streams_wait_for_each_other():
    with PhantomGPU() as gpu:
        assert read_back(gpu).shape == (1000,)


def test_a_read_before_the_fetch_is_a_race(monkeypatch):
    monkeypatch.setattr(_Moved, "settle", lambda self: None)
    with PhantomGPU() as gpu, pytest.raises(RaceError, match="reads a device tensor"):
        read_back(gpu)


@pytest.mark.parametrize("stream", [0, 1], ids=["copy", "fetch"])
def test_a_copy_stream_that_does_not_wait_is_a_race(monkeypatch, stream):
    """To the host before the tensor is written; or back before it is on the host."""
    original = ActivationOffload._copy_streams

    def racy(self, device):
        streams = original(self, device)
        streams[stream].wait_event = lambda event: None
        return streams

    monkeypatch.setattr(ActivationOffload, "_copy_streams", racy)
    with PhantomGPU() as gpu, pytest.raises(RaceError):
        read_back(gpu)


def step_on_phantom(gpu):
    """A backward, and what is allocated after it."""
    model = make_model(device=gpu.device)
    offload(model, n_kept=0)
    loss_of(model, torch.zeros(4, 16, dtype=torch.int64, device=gpu.device)).backward()


def test_a_step_is_in_order():
    with PhantomGPU() as gpu:
        step_on_phantom(gpu)


def test_letting_go_before_the_copy_to_the_host_is_a_race(monkeypatch):
    """The compute stream waits for everything but what `_end` waits for."""
    original = ActivationOffload._end

    def racy(self, call):
        call.compute.wait_event = lambda event: None
        try:
            original(self, call)
        finally:
            del call.compute.wait_event

    monkeypatch.setattr(ActivationOffload, "_end", racy)
    with PhantomGPU() as gpu, pytest.raises(RaceError, match="may get the memory of a tensor"):
        step_on_phantom(gpu)


def test_dropping_what_is_still_fetched_is_a_race(monkeypatch):
    """A backward fetches the segment before its own; it fails there, and the next forward pass drops that."""

    def racy(self):
        self._wait = None
        drop(self)

    drop = _Moved.drop
    monkeypatch.setattr(_Moved, "drop", racy)
    with PhantomGPU() as gpu, pytest.raises(RaceError, match=r"memory of a tensor .* aten\.empty"):
        drop_what_was_fetched(gpu, keep=True)


@pytest.mark.parametrize("keep", [True, False])
def test_dropping_what_has_been_waited_for_is_in_order(keep):
    """With a last segment that is not kept, also what is still on its way to the host."""
    with PhantomGPU() as gpu:
        drop_what_was_fetched(gpu, keep)


def drop_what_was_fetched(gpu, keep):
    offloaded = ActivationOffload(torch.nn.Linear(1, 1), 0)
    torch.get_device_module("phantom").Stream()  # from the second stream on the phantom looks
    x = torch.empty(1000, device=gpu.device, requires_grad=True) + 1
    for number in range(3):
        square = Segment([number], lambda x, _: x * x)
        x = offloaded.wrap(square, keep=keep and number == 2)(x, None)
    offloaded._fetch(offloaded._last.previous.previous)
    offloaded._drop_unfinished()
    return torch.empty(1000, device=gpu.device)
