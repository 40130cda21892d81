"""What our loop costs: memtrain's training against a bare hand-written PyTorch loop over the same model.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --pairs 21 --steps 50 model=small micro_batch=4

Both start from the same weights and make the same steps with the same loss (`loss=full`, what one writes by hand).
The bare loop gets its batches for nothing, from a list, and records nothing; ours reads them with its loader and logs
every 10 steps. To reach: at most 3 % slower.
"""

import argparse
import time
from collections.abc import Sequence
from itertools import islice

import torch
from measure import (
    DEVICE,
    ROOT,
    Timing,
    alternate,
    composed_config,
    print_rows,
    save_result,
    spread,
    time_memtrain,
)
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from memtrain.config import Config
from memtrain.data.loader import Batch
from memtrain.data.prepare import Data
from memtrain.engine import build
from memtrain.engine.optimizers import decay_groups
from memtrain.report.console import task_progress

GOAL = 1.03
"""Our seconds over the bare loop's, at most."""


def time_bare(config: Config, data: Data, windows: Sequence[Sequence[Batch]]) -> Timing:
    """What one would write by hand for `precision=fp32 accum=1`."""
    build.prepare_torch(config)
    model = build.build_model(config, build.build_dimensions(config, data.vocab_size), DEVICE)
    settings, schedule = config.optimizer, build.build_schedule(config)
    optimizer = torch.optim.AdamW(
        decay_groups(model.named_parameters(), settings.weight_decay),
        lr=settings.lr,
        betas=(settings.betas[0], settings.betas[1]),
        eps=settings.eps,
        fused=True,
    )
    start_s = time.perf_counter()
    for number, (batch,) in enumerate(windows):
        for group in optimizer.param_groups:
            group["lr"] = schedule(number)
        logits = model.head(model(batch.tokens))
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
    last = loss.item()
    return Timing(time.perf_counter() - start_s, last)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of one run")
    parser.add_argument("overrides", nargs="*", help="as for train.py; precision and accum stay")
    arguments = parser.parse_args()
    fixed = [
        f"steps={arguments.steps}",
        "precision=fp32",
        "accum=1",
        "optimizer=adamw",
        "loss=full",
    ]
    config = composed_config([*arguments.overrides, *fixed])
    data = build.build_data(config, ROOT, task_progress)
    loader = build.build_loader(config, data, DEVICE)
    windows = list(islice(loader, config.steps))
    loader.close()

    ours, bare = time_memtrain(config, data), time_bare(config, data, windows)
    if abs(ours.loss - bare.loss) > 1e-3 * bare.loss:
        raise SystemExit(f"not the same training: loss {ours.loss} and {bare.loss}")
    pairs = alternate(
        lambda: time_memtrain(config, data).seconds_s,
        lambda: time_bare(config, data, windows).seconds_s,
        arguments.pairs,
    )
    report(arguments.overrides, config, pairs)


def report(overrides: list[str], config: Config, pairs: list[tuple[float, float]]) -> None:
    step_ms = [spread([1e3 * pair[side] / config.steps for pair in pairs]) for side in (0, 1)]
    ratio = spread([ours_s / bare_s for ours_s, bare_s in pairs])
    rows = [
        [name, *(f"{value:.2f}" for value in times.values())]
        for name, times in zip(
            ("memtrain, ms a step", "bare loop, ms a step"), step_ms, strict=True
        )
    ]
    rows.append(["ratio of a pair", *(f"{value:.3f}" for value in ratio.values())])
    reached = ratio["median"] <= GOAL
    title = f"median of {len(pairs)} pairs x {config.steps} steps; at most {GOAL}: {reached}"
    print_rows(title, ("", "quartile", "median", "quartile"), rows)
    result = {
        "setup": {"overrides": overrides, "steps": config.steps, "pairs": len(pairs)},
        "memtrain_step_ms": step_ms[0],
        "bare_step_ms": step_ms[1],
        "ratio": ratio,
        "goal": GOAL,
        "reached": reached,
    }
    print(save_result("overhead_cpu", ("torch", "memtrain"), result))


if __name__ == "__main__":
    main()
