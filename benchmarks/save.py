"""What saving costs training: how long the loop waits, against writing the same bytes and waiting for the disk.

    python benchmarks/save.py
    python benchmarks/save.py --saves 9 model=nano

The real loop trains on random tokens and saves after every `--every` steps. Waiting is what `Checkpoints.save`, and
`before_change` at the next update, take. Then the same tensors are written in line, as one would by hand:
`torch.save`, `fsync`. To reach: under 10 % of that.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import DEVICE, composed_config, print_rows, save_result, spread
from torch import Tensor

from memtrain.config import Config
from memtrain.data.loader import Batching, RandomTokens
from memtrain.engine import build
from memtrain.engine.checkpoint import Checkpoints, Contents
from memtrain.engine.loop import Callbacks, Pace, Progress, train
from memtrain.engine.resume import capture

GOAL = 0.1
"""Waiting over writing in line, at most."""


class Stopwatch:
    """Adds up what calls take; the next save begins a new sum."""

    def __init__(self) -> None:
        self.waits_s: list[float] = []

    def __call__(self, call: Callable[[], object], begins: bool) -> None:
        start_s = time.perf_counter()
        call()
        taken_s = time.perf_counter() - start_s
        if begins:
            self.waits_s.append(taken_s)
        elif self.waits_s:
            self.waits_s[-1] += taken_s


def train_and_save(config: Config, every: int, folder: Path) -> tuple[list[float], Contents, float]:
    """Seconds that training waited for each save, the last one's contents, and the seconds of all steps."""
    build.prepare_torch(config)
    assert config.model.vocab_size
    dimensions = build.build_dimensions(config, config.model.vocab_size)
    model = build.build_model(config, dimensions, DEVICE)
    step = build.build_step(config, model, DEVICE)
    batching = Batching(config.micro_batch, config.accum, seed=0)
    loader = RandomTokens(config.model.vocab_size, config.seq_len, 1000, batching)
    checkpoints, watch, found = Checkpoints(folder, keep=1), Stopwatch(), {}
    step.before_change = lambda: watch(checkpoints.before_change, begins=False)

    def save(progress: Progress, val_loss: float | None) -> None:
        def save_now() -> None:
            found["last"] = capture(step, model, loader, progress, val_loss, "")
            checkpoints.save(found["last"])

        watch(save_now, begins=True)

    start_s = time.perf_counter()
    with checkpoints:
        train(
            step,
            loader,
            build.build_schedule(config),
            Pace(config.steps, config.log_every, save_every=every),
            Callbacks(lambda record: None, save=save, judge=checkpoints.followed),
        )
        seconds_s = time.perf_counter() - start_s
    loader.close()
    return watch.waits_s[:-1], found["last"], seconds_s  # nothing changes after the last one


def write_in_line(contents: Contents, folder: Path) -> float:
    tensors: dict[str, dict[str, Tensor]] = {"w": contents.weights, "o": contents.optimizer}
    start_s = time.perf_counter()
    with (folder / "in_line.pt").open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--saves", type=int, default=7)
    parser.add_argument("--every", type=int, default=4, help="steps between two saves")
    parser.add_argument(
        "--folder", type=Path, help="on the disk to be measured; default: a temporary one"
    )
    parser.add_argument("overrides", nargs="*", help="as for train.py")
    arguments = parser.parse_args()
    base = ["model=small", "micro_batch=1", "seq_len=128", "data=random", "schedule=constant"]
    n_steps = (arguments.saves + 1) * arguments.every
    config = composed_config(
        [
            *base,
            *arguments.overrides,
            f"steps={n_steps}",
            "model.vocab_size=50257",
            "data.vocab_size=50257",
        ]
    )
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        waits_s, contents, seconds_s = train_and_save(config, arguments.every, folder)
        in_line_s = [write_in_line(contents, folder) for _ in range(arguments.saves)]
    finally:
        shutil.rmtree(folder)
    size_bytes = sum(
        t.nbytes for kind in (contents.weights, contents.optimizer) for t in kind.values()
    )
    report(arguments, config, size_bytes, seconds_s / n_steps, waits_s, in_line_s)


def report(
    arguments: Any,
    config: Config,
    size_bytes: int,
    step_s: float,
    waits_s: list[float],
    in_line_s: list[float],
) -> None:
    waiting, writing = spread(waits_s), spread(in_line_s)
    share = waiting["median"] / writing["median"]
    rows = [
        [name, *(f"{value:.3f}" for value in times.values())]
        for name, times in (("training waits, s a save", waiting), ("written in line, s", writing))
    ]
    title = f"{size_bytes / 1e9:.2f} GB, {step_s:.2f} s a step: {share:.1%}; under {GOAL:.0%}: {share < GOAL}"
    print_rows(title, ("", "quartile", "median", "quartile"), rows)
    result = {
        "setup": {
            "overrides": arguments.overrides,
            "saves": arguments.saves,
            "steps_between": arguments.every,
            "checkpoint_bytes": size_bytes,
            "step_s": step_s,
        },
        "waits_s": waiting,
        "in_line_s": writing,
        "share": share,
        "goal": GOAL,
        "reached": share < GOAL,
    }
    print(save_result("save", ("torch", "memtrain"), result))


if __name__ == "__main__":
    main()
