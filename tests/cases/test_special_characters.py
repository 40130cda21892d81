"""Characters that the command line's grammar has taken: which need quotes, and that our own names need none."""

import re
from collections.abc import Callable

import pytest
from command import Finished
from hydra.errors import HydraException

from memtrain.config import Config


@pytest.mark.parametrize(
    "path", ["runs/epoch=3.ckpt", "runs/a (1)", "runs/é", "runs/#3", "a,b", "C:\\data\\new\\a.txt"]
)
def test_double_quotes_inside_the_shells(config: Callable[..., Config], path: str) -> None:
    assert config(f'resume="{path}"').resume == path


@pytest.mark.parametrize("path", ["runs/epoch=3.ckpt", "runs/a (1)", "runs/é", "runs/#3", "a,b"])
def test_without_quotes_they_are_refused(config: Callable[..., Config], path: str) -> None:
    with pytest.raises((HydraException, ValueError)):
        config(f"resume={path}")


def test_backslashes_survive(config: Callable[..., Config]) -> None:
    assert config(r"data=text", r"data.path=C:\data\new\a.txt").data.path == r"C:\data\new\a.txt"


def test_our_own_names_need_no_quotes(straight: Finished) -> None:
    """And are read back by `resume=`, as b23 does."""
    for path in straight.folder.rglob("*"):
        assert re.fullmatch(r"[\w.-]+", path.name, re.ASCII), path
