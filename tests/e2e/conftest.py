"""The program as a user runs it: one process per run, everything it writes in a temporary folder."""

from pathlib import Path

import pytest
from command import ROOT, TIMEOUT_S, Finished, Run, Start, Started, start_train


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """`start(*overrides, cwd=..., folder=...)` starts `python train.py` with them."""
    cache = tmp_path_factory.mktemp("cache")

    def start(*overrides: str, cwd: Path = ROOT, folder: Path | None = None) -> Started:
        place = folder or tmp_path_factory.mktemp("run") / "out"
        return start_train([*overrides, f"data.cache_dir={cache}"], cwd, place)

    return start


@pytest.fixture(scope="session")
def run(start: Start) -> Run:
    """`run(*overrides, cwd=..., timeout=...)` runs `python train.py` with them to its end."""

    def run(*overrides: str, cwd: Path = ROOT, timeout: float = TIMEOUT_S) -> Finished:
        return start(*overrides, cwd=cwd).finish(timeout)

    return run


@pytest.fixture(scope="session")
def corpus() -> str:
    """About 10,000 bytes of text."""
    return "".join(f"line {i} of {i * i % 97}\n" for i in range(700))
