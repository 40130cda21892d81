"""What every test may use: configs composed as the command line composes them, and the command line itself."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from command import (
    ROOT,
    TIMEOUT_S,
    Run,
    Server,
    Start,
    Started,
    start_interpreter,
    with_places,
)
from composed import compose_config
from workbench import Workbench

from memtrain.config import Config

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """What is imported by now is not looked through for garbage, again and again."""
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture
def config() -> Callable[..., Config]:
    return compose_config


@pytest.fixture
def tiny() -> Callable[..., Config]:
    """The tiny CPU base: vocabulary 64, width 32, 2 heads, 4 layers, seq_len 16, micro_batch 2."""
    return lambda *overrides: compose_config("debug=tiny", "device=cpu", *overrides)


@pytest.fixture
def bench() -> Workbench:
    return Workbench()


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of token files."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def start(server: Server, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """`start(*overrides, cwd=..., folder=..., outputs=...)` starts `python train.py` with them.

    Its run or sweep is in `folder`; with `outputs` it is where the config puts it in that folder of outputs. It is
    forked from a process that has imported all; `fresh=True` starts an interpreter.
    """

    def start(
        *overrides: str,
        cwd: Path = ROOT,
        folder: Path | None = None,
        outputs: Path | None = None,
        fresh: bool = False,
    ) -> Started:
        place = folder or tmp_path_factory.mktemp("run") / "out"
        argv = with_places([*overrides, f"data.cache_dir={cache}"], place, outputs)
        return (start_interpreter if fresh else server.start)(argv, cwd, place)

    return start


@pytest.fixture(scope="session")
def run(start: Start) -> Run:
    """`run(*overrides, timeout=..., ...)`: as `start`, to its end."""
    return lambda *overrides, timeout=TIMEOUT_S, **places: start(*overrides, **places).finish(
        timeout
    )
