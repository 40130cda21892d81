"""On a CUDA GPU: the same lines as on the CPU, and the prediction against the card's own counters."""

import os
from dataclasses import asdict

import pytest
import torch

from memtrain.device import allocator_statistics, pinned_empty, reset_peaks
from memtrain.engine.build import build_dimensions
from memtrain.planner.child import PlannerProcess
from memtrain.planner.predict import N_STEPS, make_step
from memtrain.tasks.card import chosen_card

pytestmark = pytest.mark.gpu
SHAPE = (
    "data=random",
    "data.vocab_size=32000",
    "model=small",
    "model.n_layers=4",
    "micro_batch=4",
    "seq_len=512",
)
FORMS = [
    (),
    ("precision=bf16",),
    ("precision=fp16", "accum=2"),
    ("precision=bf16", "data.source=jsonl", "data.path=x", "data.document_mask=true"),
    ("precision=bf16_true", "offload=optimizer"),
    ("precision=bf16", "checkpoint_every=1"),
    ("precision=bf16", "checkpointing=selective"),
    ("precision=bf16", "offload=activations"),
]


@pytest.mark.parametrize("overrides", FORMS, ids=" ".join)
def test_predicted_peak_is_measured(config, overrides):
    wanted, device = config(*SHAPE, *overrides), torch.device("cuda")
    card = chosen_card(wanted, device)
    planner = PlannerProcess()
    try:
        planner.ask("plan", tree=asdict(wanted), vocab_size=32000, card=asdict(card))
        predicted = planner.answer()["peak_allocated_bytes"]
    finally:
        planner.close()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    reset_peaks(device)
    step, window = make_step(wanted, build_dimensions(wanted, 32000), device)
    for _ in range(N_STEPS):
        step(window())
    torch.cuda.synchronize()
    measured = allocator_statistics(device)["peak_allocated_bytes"] - before
    assert predicted == pytest.approx(measured, rel=0.03)


def test_copies_to_and_from_a_buffer_of_our_own():
    """It is pinned for torch, so that copies do not wait, and torch's pool holds nothing for it."""
    device, n = torch.device("cuda"), 3 * 2**20 + 5
    kept = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    buffer = pinned_empty(n, torch.float32, device)
    assert buffer.is_pinned() and buffer[7:].is_pinned()
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == kept
    source = torch.arange(n, device=device, dtype=torch.float32)
    buffer.copy_(source, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    assert torch.equal(buffer, torch.arange(n, dtype=torch.float32))
    back = buffer.neg_().to(device, non_blocking=True)
    del buffer  # while it may still be read: it is let go after the copy
    assert torch.equal(back, -source)
    assert pinned_empty(n, torch.float32, device).is_pinned()  # the pages can be registered anew


def test_what_cannot_be_pinned_is_refused_and_leaves_the_device_well():
    n = 64 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with pytest.raises((RuntimeError, MemoryError)):
        pinned_empty(n, torch.uint8, torch.device("cuda"))
    assert torch.ones(3, device="cuda").sum().item() == 3


@pytest.mark.parametrize("overrides", FORMS[5:], ids=" ".join)
def test_gradients_are_those_of_the_plain_run(config, overrides):
    device = torch.device("cuda")
    found = []
    for form in (("precision=bf16",), overrides):
        wanted = config(*SHAPE, "deterministic=true", *form)
        torch.manual_seed(0)
        step, window = make_step(wanted, build_dimensions(wanted, 32000), device)
        step.accumulate(window())
        found.append({name: p.grad for name, p in step.model.named_parameters()})
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name
