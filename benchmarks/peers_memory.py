"""Peak memory beside transformers' GPT-2, both on the phantom: the same tied model, learned positions, the same step.

    pip install -e '.[hf]'
    python benchmarks/peers_memory.py

`small` (110.4 M parameters), micro_batch 4 x 512, accum 4, bf16 autocast, AdamW fused, clipped, on an A100 80GB.
nanoGPT's code, measured on the same phantom, gives 3.225 GiB; it is not run here.
"""

import sys
from typing import Any

import torch
from measure import composed_config, print_rows, save_result

from memtrain.cards import load_card
from memtrain.engine.build import build_dimensions
from memtrain.phantom import PhantomGPU
from memtrain.planner.predict import predict
from memtrain.units import gib

try:
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError:
    sys.exit("transformers is missing: pip install -e '.[hf]'")

SHAPE = ("model=small", "micro_batch=4", "seq_len=512", "accum=4", "precision=bf16")
ROWS: dict[str, tuple[str, ...]] = {
    "memtrain, loss=full": ("loss=full",),
    "memtrain, defaults": (),
    "memtrain, checkpointing=selective": ("checkpointing=selective",),
    "memtrain, checkpoint_every=1": ("checkpoint_every=1",),
    "memtrain, checkpoint_every=1 offload=activations": (
        "checkpoint_every=1",
        "offload=activations",
    ),
}
GOALS_GIB = {"memtrain, defaults": 2.65, "memtrain, checkpoint_every=1": 2.0}


def peak_gib(overrides: tuple[str, ...]) -> float:
    config = composed_config([*SHAPE, *overrides])
    report = predict(config, build_dimensions(config, 2048), load_card("a100_80gb")).report
    return gib(report.peak_allocated_bytes)


def transformers_peak_gib() -> float:
    dimensions = GPT2Config(
        vocab_size=32000,
        n_positions=1024,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        use_cache=False,
    )
    with torch.device("meta"):
        model = GPT2LMHeadModel(dimensions).train()
    with PhantomGPU("a100_80gb") as gpu:
        model = model.to_empty(device=gpu.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        for _ in range(2):
            train_step(model, optimizer, gpu.device)
            gpu.step_boundary()
    return gib(gpu.report().peak_allocated_bytes)


def train_step(model: Any, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    for _ in range(4):
        tokens = torch.zeros(4, 512, dtype=torch.int64, device=device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss / 4
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    found = {name: peak_gib(overrides) for name, overrides in ROWS.items()}
    found["transformers GPT2LMHeadModel"] = transformers_peak_gib()
    rows = [
        [name, f"{peak:.3f}", f"under {GOALS_GIB[name]}" if name in GOALS_GIB else ""]
        for name, peak in found.items()
    ]
    print_rows("peak allocated on an A100 80GB, GiB", ("", "peak GiB", "to reach"), rows)
    print(save_result("peers_memory", ("torch", "transformers", "memtrain"), {"peak_gib": found}))


if __name__ == "__main__":
    main()
