"""A plain dict to the tree, without guessing: one line with key and remedy for what does not fit."""

import difflib
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from memtrain.cards import CONF_DIR, load_yaml
from memtrain.config.published import with_published_layers
from memtrain.config.rules import RULES
from memtrain.config.tree import Config
from memtrain.errors import UserError

WANTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text (quote it: {key}='\"{value}\"')",
    list: "a list, as in {key}=[...]",
}


def similar_keys(wrong: str) -> list[str]:
    """Full names of the keys, or the group, that `wrong` may mean."""
    keys = [*all_keys(), *sorted(groups())]
    same_name = [key for key in keys if key.rpartition(".")[2] == wrong.rpartition(".")[2]]
    return same_name or difflib.get_close_matches(wrong, keys, n=1, cutoff=0.7)


def groups(folder: Path = CONF_DIR) -> set[str]:
    """What `group=choice` may begin with, by a folder of configs; `hydra/` there holds choices of Hydra's own."""
    return {path.name for path in folder.glob("*") if path.is_dir()} - {"hydra"}


def all_keys(cls: type[Any] | None = None, path: str = "") -> Iterator[str]:
    """Of the whole tree, as in `optimizer.lr`, those of `Config` itself first."""
    for name, hint in get_type_hints(cls or Config).items():
        if is_dataclass(hint):
            yield from all_keys(hint, f"{path}{name}.")  # type: ignore[arg-type]
        else:
            yield f"{path}{name}"


def completed(tree: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A tree of an older version, with today's defaults of the keys that it did not have."""
    if defaults is None:
        whole = load_yaml(CONF_DIR / "config.yaml")
        defaults = {key: whole[key] for key in whole.keys() - {"defaults", "hydra"}}
    found = dict(tree)
    for key, default in defaults.items():
        if isinstance(default, Mapping) and isinstance(found.get(key, {}), Mapping):
            found[key] = completed(found.get(key, {}), default)
        else:
            found.setdefault(key, default)
    return found


def parse(tree: dict[str, Any]) -> Config:
    """The checked config of a composed Hydra tree. Raises UserError with the key and the remedy."""
    built: Config = _build(Config, tree, "")
    config = with_published_layers(built)
    for rule in RULES:
        rule(config)
    return config


def _build(cls: type[Any], tree: Any, path: str) -> Any:
    if not isinstance(tree, dict):
        raise UserError(f"{path.rstrip('.')}: expected a group of keys, got {tree!r}")
    hints = get_type_hints(cls, include_extras=True)
    names = [field.name for field in fields(cls)]
    for key in tree:
        if key not in names:
            close = difflib.get_close_matches(str(key), names, n=1)
            hint = f"did you mean {path}{close[0]}?" if close else f"known: {', '.join(names)}"
            raise UserError(f"{path}{key}: unknown key; {hint}")
    for name in names:
        if name not in tree:
            raise UserError(f"{path}{name}: missing; set it on the command line or in the config")
    return cls(**{name: _convert(hints[name], tree[name], f"{path}{name}") for name in names})


def _convert(hint: Any, value: Any, key: str) -> Any:
    """`value` as the annotated type, without guessing: "off" is not False, True is not 1."""
    if is_dataclass(hint):
        return _build(hint, value, f"{key}.")  # type: ignore[arg-type]
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    fitting = [option for option in options if _fits(value, _plain(option))]
    option = (fitting or options)[0]
    if get_origin(option) is Literal and value not in get_args(option):
        shown = str(value).lower() if isinstance(value, bool) else value
        raise UserError(f"{key}={shown}: choose one of {', '.join(get_args(option))}")
    if not fitting:
        wanted = WANTED[_plain(option)].format(key=key, value=value)
        raise UserError(f"{key}={value}: must be {wanted}")
    if isinstance(value, list):
        return [_convert(get_args(option)[0], item, key) for item in value]
    return _in_range(option, value, key) if get_origin(option) is Annotated else value


def _plain(option: Any) -> Any:
    """The type without its range, its choices, or what the list holds."""
    origin = get_origin(option)
    return {Annotated: get_args(option)[:1], Literal: (str,), None: (option,)}.get(
        origin, (origin,)
    )[0]


def _fits(value: Any, kind: type) -> bool:
    return type(value) in ((int, float) if kind is float else (kind,))


def _in_range(option: Any, value: float, key: str) -> float:
    kind, limits = get_args(option)
    number = float(str(value)) if kind is float else value  # of an int of any length: infinite
    if limits.allows(number):
        return number
    if kind is int or math.isfinite(number):
        raise UserError(f"{key}={value}: must be {limits}")
    name = "nan" if math.isnan(number) else "infinite"
    raise UserError(f"{key}={number}: must be {limits}, not {name}")
