"""On a machine with a CUDA GPU: what the planner predicts against what the card measures, over 16 configurations.

    python benchmarks/gpu_check.py              # a few minutes; writes benchmarks/results/gpu_<card>.json
    python benchmarks/gpu_check.py --phantom    # try the script itself, without a GPU

Before that it asks whether a pinned buffer of our own is pinned for torch and copied right.
Peaks are torch's own counters over building the model and a few steps, reset before; the context is left out.
"""

import argparse
import gc
import statistics
import time
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
from measure import composed_config, print_rows, save_result

from memtrain.cards import Card
from memtrain.config import Config
from memtrain.device import (
    allocator_statistics,
    device_module,
    pinned_empty,
    reset_peaks,
    select_device,
)
from memtrain.engine.build import build_dimensions
from memtrain.planner.child import PlannerProcess
from memtrain.tasks.card import chosen_card
from memtrain.units import format_bytes

N_STEPS = 6
VOCAB = 32000
BASE = ("data=random", f"data.vocab_size={VOCAB}", "model=small", "micro_batch=4", "seq_len=512")
CONFIGS = (
    (),
    ("precision=fp32", "precision.tf32=true"),
    ("precision=bf16",),
    ("precision=fp16",),
    ("precision=bf16_true",),
    ("precision=bf16", "accum=4"),
    ("precision=bf16", "checkpoint_every=1"),
    ("precision=bf16", "checkpointing=sqrt", "accum=2"),
    ("precision=bf16", "offload=activations"),
    ("precision=bf16", "offload=optimizer"),
    ("precision=bf16_true", "offload=optimizer", "checkpoint_every=1"),
    ("precision=bf16", "optimizer=sgd"),
    ("precision=bf16", "optimizer=adafactor"),
    (
        "precision=bf16",
        "model.norm=rmsnorm",
        "model.activation=swiglu",
        "model.positions=rope",
        "model.n_kv_heads=4",
    ),
    ("precision=bf16", "model.dropout=0.1"),
    ("precision=bf16", "micro_batch=16", "seq_len=1024", "checkpoint_every=1"),
)
MEASURED = ("peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--phantom", action="store_true", help="measure on the phantom itself")
    parser.add_argument("--most", type=int, default=len(CONFIGS), help="only the first so many")
    arguments = parser.parse_args()
    if arguments.most < 1:
        parser.error(f"--most {arguments.most}: must be at least 1")
    if not (torch.cuda.is_available() or arguments.phantom):
        print("no CUDA GPU here: nothing to check (--phantom tries the script without one)")
        return
    device = select_device("auto")
    configs = [composed_config([*BASE, *overrides]) for overrides in CONFIGS[: arguments.most]]
    card = chosen_card(configs[0], device)
    if not arguments.phantom:
        check_pinned(device)
    planner = PlannerProcess()
    try:
        found = [check(config, card, planner, device, arguments.phantom) for config in configs]
    finally:
        planner.close()
    rows = [row(" ".join(names) or "fp32", one) for names, one in zip(CONFIGS, found, strict=False)]
    columns = ("config", *(f"{what} {side}" for what in ("allocated", "active", "reserved") for side in ("", "error")),
               "step s", "predicted s")  # fmt: skip
    print_rows(f"measured on {card.name}, and how far off the prediction is", columns, rows)
    if not arguments.phantom:
        name = f"gpu_{card.name.lower().replace(' ', '_')}"
        print(save_result(name, ("torch", "memtrain"), {"card": asdict(card), "configs": found}))


def check_pinned(device: torch.device) -> None:
    """Raises AssertionError unless a buffer that we registered is pinned, and copied right without waiting."""
    n_elements = 3 * 2**20 + 5
    buffer = pinned_empty(n_elements, torch.float32, device)
    assert buffer.is_pinned(), "torch does not take a registered buffer for pinned"
    source = torch.arange(n_elements, device=device, dtype=torch.float32)
    buffer.copy_(source, non_blocking=True)
    device_module(device).synchronize()
    assert torch.equal(buffer.to(device, non_blocking=True), source), "a copy came back wrong"
    print(f"a pinned buffer of {format_bytes(buffer.nbytes)} is pinned for torch and copied right")


def check(
    config: Config, card: Card, planner: PlannerProcess, device: torch.device, phantom: bool
) -> dict[str, Any]:
    planner.ask("plan", tree=asdict(config), vocab_size=VOCAB, card=asdict(card))
    plan = planner.answer()
    predicted = {key: plan[key] for key in (*MEASURED, "step_seconds")}
    return {"predicted": predicted, "measured": measure(config, device, card, phantom)}


def measure(config: Config, device: torch.device, card: Card, phantom: bool) -> dict[str, float]:
    """Peaks in bytes and the median step in seconds of the real thing (or of the phantom)."""
    from memtrain.planner.predict import make_step

    if phantom:
        from memtrain.phantom import PhantomGPU

        place: Any = PhantomGPU(card, enforce_capacity=False)
        device = place.device
    else:
        place = nullcontext()
    gc.collect()
    seconds = []
    with place:
        module = device_module(device)
        module.empty_cache()
        reset_peaks(device)
        step, window = make_step(config, build_dimensions(config, VOCAB), device)
        for _ in range(N_STEPS):
            start_s = time.perf_counter()
            step(window())
            module.synchronize()
            seconds.append(time.perf_counter() - start_s)
        peaks = allocator_statistics(device)
        del step, window
    return {key: peaks[key] for key in MEASURED} | {"step_seconds": statistics.median(seconds[1:])}


def row(name: str, found: dict[str, Any]) -> list[str]:
    predicted, measured = found["predicted"], found["measured"]
    cells = [name]
    for key in MEASURED:
        cells += [format_bytes(measured[key]), f"{predicted[key] / measured[key] - 1:+.2%}"]
    return [*cells, *(f"{side['step_seconds']:.4f}" for side in (measured, predicted))]


if __name__ == "__main__":
    main()
