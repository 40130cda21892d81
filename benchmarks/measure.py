"""What the benchmarks share: our training as users run it, timing in alternation, results with machine and date."""

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from rich.table import Table

from memtrain.config import Config, parse
from memtrain.data.prepare import Data
from memtrain.engine import build
from memtrain.engine.loop import Callbacks, Pace, train
from memtrain.report.console import print_table
from memtrain.report.recorder import Recorder

ROOT = Path(__file__).resolve().parent.parent
DEVICE = torch.device("cpu")

OmegaConf.register_new_resolver("project_root", lambda: str(ROOT), replace=True)
OmegaConf.register_new_resolver(  # as in train.py
    "unless", lambda given, value: value if given is None else None, replace=True
)


class Timing(NamedTuple):
    """One training run, what is built before it left out."""

    seconds_s: float
    loss: float
    """Of the last step."""


def composed_config(overrides: Sequence[str]) -> Config:
    """What `python train.py OVERRIDES` would run."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        tree = OmegaConf.to_container(compose("config", list(overrides)), resolve=True)
    return parse(tree)  # type: ignore[arg-type]


def time_memtrain(config: Config, data: Data) -> Timing:
    """The whole loop: loader, schedule, clipping, records. The model is the same one every time."""
    build.prepare_torch(config)
    model = build.build_model(config, build.build_dimensions(config, data.vocab_size), DEVICE)
    step = build.build_step(config, model, DEVICE)
    loader, schedule = build.build_loader(config, data, DEVICE), build.build_schedule(config)
    with (
        tempfile.TemporaryDirectory() as folder,
        Recorder(Path(folder), lambda record: None, peak_flops=0.0, token_flops=0) as recorder,
    ):
        start_s = time.perf_counter()
        train(step, loader, schedule, Pace(config.steps, config.log_every), Callbacks(recorder))
        seconds_s = time.perf_counter() - start_s
    loader.close()
    return Timing(seconds_s, recorder.summary["final_loss"])


def alternate(
    first: Callable[[], float], second: Callable[[], float], pairs: int
) -> list[tuple[float, float]]:
    """Seconds of both, side by side, `pairs` times; who begins changes, and a first pair is thrown away.

    What else the machine does then falls on both sides of a pair alike.
    """
    found = []
    for number in range(pairs + 1):
        if number % 2:
            second_s, first_s = second(), first()
        else:
            first_s, second_s = first(), second()
        found.append((first_s, second_s))
    return found[1:]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles: between the quartiles lies half of what was seen."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"low_quartile": low, "median": median, "high_quartile": high}


def print_rows(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    print_table(table)


def save_result(name: str, packages: Sequence[str], result: Mapping[str, Any]) -> Path:
    """Write benchmarks/results/NAME.json: `result` with machine, date and versions."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    about = {
        "benchmark": name,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **{p: version(p) for p in packages}},
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(about | dict(result), indent=2) + "\n", encoding="utf-8")
    return path


def machine() -> dict[str, Any]:
    """`load_average` over the last 15 minutes tells how busy it was, this benchmark included."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "load_average": round(os.getloadavg()[2], 2),
    }


def cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="ascii", errors="replace").splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
