"""How long a user waits: from the start of `python train.py` to the end of the first step of the default model.

    python benchmarks/startup.py
    python benchmarks/startup.py plan=off
    python benchmarks/startup.py --runs 15 --imports 20 model=small

The token cache is warm. Beside it stands what PyTorch alone takes: import, one optimizer, one step of one layer.
To reach: under 5 seconds; with plan=off, at most 1 second more than PyTorch alone.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import ROOT, alternate, print_rows, save_result, spread

GOAL_S = 5.0
MORE_THAN_PYTORCH_GOAL_S = 1.0
POLL_S = 0.005
PYTORCH_ALONE = """
import torch
layer = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
layer(torch.ones(1, 8)).sum().backward()
optimizer.step()
"""


def training_command(overrides: list[str], folder: str) -> list[str]:
    """Two steps: the record of the first is then written before any validation."""
    fixed = ["steps=2", "schedule.warmup=1", "generate.tokens=0", f"hydra.run.dir={folder}"]
    return [str(ROOT / "train.py"), *overrides, *fixed]


def time_first_step(overrides: list[str]) -> float:
    """Seconds from the start of the process until the first step is in metrics.jsonl."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *training_command(overrides, folder)]
        metrics, start_s = Path(folder) / "metrics.jsonl", time.perf_counter()
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
                time.sleep(POLL_S)
            seconds_s = time.perf_counter() - start_s
        if process.returncode:
            raise SystemExit(f"train.py ended with exit code {process.returncode}")
    return seconds_s


def time_pytorch() -> float:
    start_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", PYTORCH_ALONE], check=True)
    return time.perf_counter() - start_s


def slowest_imports(overrides: list[str], count: int) -> list[tuple[str, float]]:
    """Modules by seconds, what they import included, from one run under `python -X importtime`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-X", "importtime", *training_command(overrides, folder)]
        lines = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True
        ).stderr.splitlines()
    parts = [line.split("|") for line in lines if line.startswith("import time:")]
    found = [
        (name.strip(), int(total) / 1e6) for _, total, name in parts if total.strip().isdigit()
    ]
    return sorted(found, key=lambda pair: -pair[1])[:count]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--imports", type=int, default=0, help="also list this many slow imports")
    parser.add_argument("overrides", nargs="*", help="as for train.py")
    arguments = parser.parse_args()
    overrides = arguments.overrides
    pairs = alternate(lambda: time_first_step(overrides), time_pytorch, arguments.runs)
    first_step, pytorch = (spread([pair[side] for pair in pairs]) for side in (0, 1))
    more = spread([ours - alone for ours, alone in pairs])
    planned = "plan=off" not in overrides
    reached = (
        first_step["median"] < GOAL_S if planned else more["median"] <= MORE_THAN_PYTORCH_GOAL_S
    )
    rows = [
        [name, *(f"{value_s:.2f}" for value_s in times.values())]
        for name, times in (
            ("first step done", first_step),
            ("PyTorch alone", pytorch),
            ("difference", more),
        )
    ]
    title = f"seconds, median of {len(pairs)} runs; goal reached: {reached}"
    print_rows(title, ("", "quartile", "median", "quartile"), rows)
    if arguments.imports:
        slow = slowest_imports(overrides, arguments.imports)
        print_rows("imports", ("module", "s"), [(name, f"{s:.2f}") for name, s in slow])
    result = {
        "setup": {"overrides": overrides, "runs": len(pairs)},
        "first_step_s": first_step,
        "pytorch_alone_s": pytorch,
        "more_than_pytorch_s": more,
        "goal_s": GOAL_S if planned else None,
        "more_than_pytorch_goal_s": None if planned else MORE_THAN_PYTORCH_GOAL_S,
        "reached": reached,
    }
    name = "startup_cpu" if planned else "startup_cpu_plan_off"
    print(save_result(name, ("torch", "hydra-core", "memtrain"), result))


if __name__ == "__main__":
    main()
