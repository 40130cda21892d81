"""Configs as the command line composes them, in a thousandth of the time."""

from copy import deepcopy
from functools import cache, reduce
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from omegaconf import OmegaConf

import memtrain.cli  # noqa: F401  registers the resolvers that the config uses
from memtrain.cards import CONF_DIR
from memtrain.config import Config, parse
from memtrain.config.read import groups


@cache
def composed(groups: tuple[str, ...]) -> dict[str, Any]:
    """What Hydra composes of these choices."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        return OmegaConf.to_container(compose("config", list(groups)), resolve=True)  # type: ignore[return-value]


@cache
def plain_override(word: str) -> tuple[str, Any] | None:
    """Key and value of a word that sets one key to what is written there; None for what Hydra is needed for."""
    if "${" in word or word.partition("=")[0] in {*groups(), "epochs"}:  # steps follow from epochs
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
