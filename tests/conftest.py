"""What every test may use: configs composed as the command line composes them, and the command line itself."""

import gc
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache, reduce
from pathlib import Path
from typing import Any

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
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from omegaconf import OmegaConf
from workbench import Workbench

import memtrain.cli  # noqa: F401  registers the resolvers that the config uses
from memtrain.config import Config, parse

CONF = ROOT / "conf"
GROUPS = {path.name for path in CONF.iterdir() if path.is_dir()}

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """What is imported by now is not looked through for garbage, again and again."""
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@cache
def composed(groups: tuple[str, ...]) -> dict[str, Any]:
    """What Hydra composes of these choices."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return OmegaConf.to_container(compose("config", list(groups)), resolve=True)  # type: ignore[return-value]


@cache
def plain_override(word: str) -> tuple[str, Any] | None:
    """Key and value of a word that sets one key to what is written there; None for what Hydra is needed for."""
    if "${" in word or word.partition("=")[0] in (*GROUPS, "epochs"):  # steps follow from epochs
        return None
    (override,) = OverridesParser.create().parse_overrides([word])
    plain = override.type == OverrideType.CHANGE and not override.is_sweep_override()
    return (override.key_or_group, override.value()) if plain and not override.package else None


def compose_tree(*overrides: str) -> dict[str, Any]:
    """What Hydra composes of the words. It takes a tenth of a second, so it composes the choices of groups alone, once;
    values are put in here, where it would put them."""
    words = [(word, plain_override(word)) for word in overrides]
    tree = deepcopy(composed(tuple(word for word, plain in words if plain is None)))
    for plain in (plain for _, plain in words if plain is not None):
        *path, name = plain[0].split(".")
        branch = reduce(lambda part, key: part.get(key, {}), path, tree)
        if name not in branch or isinstance(branch[name], dict):  # Hydra says what is wrong with it
            return composed(overrides)
        branch[name] = deepcopy(plain[1])
    return tree


@cache
def compose_config(*overrides: str) -> Config:
    """The checked config of `python train.py <overrides>`."""
    return parse(compose_tree(*overrides))


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
