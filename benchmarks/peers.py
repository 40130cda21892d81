"""Our speed beside transformers' GPT-2: the same dimensions, the same tokens, each with its own code.

    pip install -e '.[hf]'
    python benchmarks/peers.py
    python benchmarks/peers.py --pairs 15 model.dim=512 model.n_heads=8

Ours is the whole loop of `python train.py`; theirs is GPT2LMHeadModel in a bare loop with torch's fused AdamW, clipped
as ours is. To reach: 1.15 times its tokens per second in fp32, 1.05 times in bf16.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from measure import (
    DEVICE,
    ROOT,
    alternate,
    composed_config,
    print_rows,
    save_result,
    spread,
    time_memtrain,
)
from torch.nn.utils import clip_grad_norm_

from memtrain.config import Config
from memtrain.data.loader import Batch
from memtrain.device import autocast
from memtrain.engine import build
from memtrain.engine.build import COMPUTE_DTYPES
from memtrain.model.transformer import count_parameters
from memtrain.report.console import task_progress

try:
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError:
    sys.exit("transformers is missing: pip install -e '.[hf]'")

GOALS = {"fp32": 1.15, "bf16": 1.05}
"""Our tokens per second over theirs, at least."""
DIMENSIONS = ("model.vocab_size=4096", "model.dim=256", "model.n_layers=4", "model.n_heads=4")
TOKENS = ("data=random", "data.vocab_size=4096", "micro_batch=8", "seq_len=256")


def make_gpt2(config: Config) -> GPT2LMHeadModel:
    """Their model in our dimensions; a cache for generation would only slow it down."""
    model = config.model
    dimensions = GPT2Config(
        vocab_size=model.vocab_size,
        n_positions=model.max_seq_len,
        n_embd=model.dim,
        n_layer=model.n_layers,
        n_head=model.n_heads,
        resid_pdrop=model.dropout,
        embd_pdrop=model.dropout,
        attn_pdrop=model.dropout,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return GPT2LMHeadModel(dimensions).train()


def time_gpt2(config: Config, windows: Sequence[Sequence[Batch]]) -> float:
    """Seconds for one optimizer step on each window of one micro-batch."""
    model, settings = make_gpt2(config), config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.lr,
        betas=(settings.betas[0], settings.betas[1]),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    compute_dtype = COMPUTE_DTYPES.get(config.precision.name)
    start_s = time.perf_counter()
    for (batch,) in windows:
        with autocast(DEVICE, compute_dtype):
            loss = model(input_ids=batch.tokens, labels=batch.tokens).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - start_s


def compare(precision: str, overrides: list[str], steps: int, pairs: int) -> dict[str, Any]:
    """Tokens per second of both in one precision."""
    fixed = [f"precision={precision}", f"steps={steps}", "accum=1", "optimizer=adamw"]
    config = composed_config([*DIMENSIONS, *TOKENS, *overrides, *fixed])
    data = build.build_data(config, ROOT, task_progress)
    ours = build.build_model(config, build.build_dimensions(config, data.vocab_size), DEVICE)
    if count_parameters(ours) != count_parameters(make_gpt2(config)):
        raise SystemExit("not the same dimensions: the two models differ in parameters")
    loader = build.build_loader(config, data, DEVICE)
    windows = list(islice(loader, steps))
    loader.close()
    found = alternate(
        lambda: time_memtrain(config, data).seconds_s, lambda: time_gpt2(config, windows), pairs
    )
    tokens = steps * config.micro_batch * config.seq_len
    ratio = spread([theirs_s / ours_s for ours_s, theirs_s in found])
    return {
        "memtrain_tokens_per_second": spread([tokens / ours_s for ours_s, _ in found]),
        "transformers_tokens_per_second": spread([tokens / theirs_s for _, theirs_s in found]),
        "ratio": ratio,
        "goal": GOALS[precision],
        "reached": ratio["median"] >= GOALS[precision],
    }


def row(precision: str, result: dict[str, Any]) -> list[str]:
    rates = [result[f"{side}_tokens_per_second"]["median"] for side in ("memtrain", "transformers")]
    ratio = result["ratio"]
    quartiles = f"{ratio['low_quartile']:.3f} to {ratio['high_quartile']:.3f}"
    goal = f"{result['goal']}: {result['reached']}"
    return [
        precision,
        *(f"{rate:.0f}" for rate in rates),
        f"{ratio['median']:.3f}",
        quartiles,
        goal,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of one run")
    parser.add_argument("--precisions", nargs="+", choices=list(GOALS), default=list(GOALS))
    parser.add_argument("overrides", nargs="*", help="as for train.py; accum stays 1")
    arguments = parser.parse_args()
    results = {
        precision: compare(precision, arguments.overrides, arguments.steps, arguments.pairs)
        for precision in arguments.precisions
    }
    columns = ("", "memtrain tok/s", "transformers tok/s", "ratio", "quartiles", "to reach")
    title = f"median of {arguments.pairs} pairs x {arguments.steps} steps"
    print_rows(title, columns, [row(name, result) for name, result in results.items()])
    setup = {"overrides": [*DIMENSIONS, *TOKENS, *arguments.overrides]}
    setup |= {"steps": arguments.steps, "pairs": arguments.pairs}
    print(
        save_result("peers_cpu", ("torch", "transformers", "memtrain"), {"setup": setup, **results})
    )


if __name__ == "__main__":
    main()
