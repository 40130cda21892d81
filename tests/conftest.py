"""What every test may use: configs composed as the command line composes them, and the command line itself."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from command import (
    ROOT,
    TIMEOUT_S,
    Finished,
    Run,
    Server,
    Start,
    Started,
    start_train,
    with_places,
)
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from workbench import Workbench

import train  # noqa: F401  registers the resolvers that the config uses
from memtrain.config import Config, parse

CONF = ROOT / "conf"

torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def compose_config(*overrides: str) -> Config:
    """The checked config of `python train.py <overrides>`."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        tree = OmegaConf.to_container(compose("config", list(overrides)), resolve=True)
    return parse(tree)  # type: ignore[arg-type]


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
def start(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """`start(*overrides, cwd=..., folder=..., outputs=...)` starts `python train.py` with them.

    Its run or sweep is in `folder`; with `outputs` it is where the config puts it in that folder of outputs.
    """

    def start(
        *overrides: str, cwd: Path = ROOT, folder: Path | None = None, outputs: Path | None = None
    ) -> Started:
        place = folder or tmp_path_factory.mktemp("run") / "out"
        return start_train([*overrides, f"data.cache_dir={cache}"], cwd, place, outputs)

    return start


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def run(server: Server, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`run(*overrides, cwd=..., folder=..., outputs=..., timeout=...)`: as `start`, to its end.

    Forked from a process that has imported torch; the interpreter of `start` is new.
    """

    def run(
        *overrides: str,
        cwd: Path = ROOT,
        folder: Path | None = None,
        outputs: Path | None = None,
        timeout: float = TIMEOUT_S,
    ) -> Finished:
        place = folder or tmp_path_factory.mktemp("run") / "out"
        argv = with_places([*overrides, f"data.cache_dir={cache}"], place, outputs)
        return server.run(argv, cwd, place, timeout)

    return run
