"""What holding less costs: step time on the CPU, each form beside the plain one, and its predicted peak on a GPU.

    python benchmarks/recompute.py
    python benchmarks/recompute.py --pairs 15 model.n_layers=12

To reach, against nothing recomputed: every block and sqrt segments at most 1.30 x, selective at most 1.12 x, and the
chunked loss at most 1.03 x the full one.
"""

import argparse
from typing import Any

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

from memtrain.cards import load_card
from memtrain.engine import build
from memtrain.planner.predict import predict
from memtrain.report.console import task_progress
from memtrain.units import gib

SHAPE = ("data=random", "data.vocab_size=4096", "model.vocab_size=4096", "model.dim=256", "model.n_layers=8",
         "model.n_heads=4", "micro_batch=4", "seq_len=256")  # fmt: skip
FORMS: dict[str, tuple[tuple[str, ...], tuple[str, ...], float]] = {
    "loss=chunked against full": (("loss=full",), ("loss=chunked",), 1.03),
    "checkpointing=selective": ((), ("checkpointing=selective",), 1.12),
    "checkpoint_every=1": ((), ("checkpoint_every=1",), 1.30),
    "checkpointing=sqrt": ((), ("checkpointing=sqrt",), 1.30),
}
ON_A_CARD = ("model=small", "micro_batch=16", "seq_len=1024", "precision=bf16")
"""What the predicted peaks are of, on an A100 80GB."""


def compare(name: str, overrides: list[str], steps: int, pairs: int) -> dict[str, Any]:
    plain, changed, goal = FORMS[name]
    configs = [
        composed_config([*SHAPE, *overrides, f"steps={steps}", *form]) for form in (plain, changed)
    ]
    data = build.build_data(configs[0], ROOT, task_progress)
    found = alternate(
        lambda: time_memtrain(configs[0], data).seconds_s,
        lambda: time_memtrain(configs[1], data).seconds_s,
        pairs,
    )
    ratio = spread([changed_s / plain_s for plain_s, changed_s in found])
    peaks = [peak_gib(form) for form in (plain, changed)]
    return {"ratio": ratio, "goal": goal, "reached": ratio["median"] <= goal, "peaks_gib": peaks}


def peak_gib(overrides: tuple[str, ...]) -> float:
    config = composed_config([*ON_A_CARD, *overrides])
    report = predict(config, build.build_dimensions(config, 2048), load_card("a100_80gb")).report
    return gib(report.peak_allocated_bytes)


def row(name: str, found: dict[str, Any]) -> list[str]:
    ratio = found["ratio"]
    quartiles = f"{ratio['low_quartile']:.3f} to {ratio['high_quartile']:.3f}"
    peaks = " -> ".join(f"{peak:.2f}" for peak in found["peaks_gib"])
    goal = f"{found['goal']}: {found['reached']}"
    return [name, f"{ratio['median']:.3f}", quartiles, goal, peaks]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of one run")
    parser.add_argument("overrides", nargs="*", help="as for train.py")
    arguments = parser.parse_args()
    found = {
        name: compare(name, arguments.overrides, arguments.steps, arguments.pairs) for name in FORMS
    }
    columns = ("", "step time", "quartiles", "to reach", "predicted peak GiB")
    print_rows(
        f"median of {arguments.pairs} pairs on {DEVICE}",
        columns,
        [row(*item) for item in found.items()],
    )
    setup = {"overrides": [*SHAPE, *arguments.overrides], "steps": arguments.steps}
    print(save_result("recompute_cpu", ("torch", "memtrain"), {"setup": setup, **found}))


if __name__ == "__main__":
    main()
