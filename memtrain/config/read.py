"""A plain dict to the tree, without guessing: one line with key and remedy for what does not fit."""

import difflib
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from memtrain.cards import CONF_DIR, load_yaml
from memtrain.config.bounds import is_finite
from memtrain.config.published import with_published_layers
from memtrain.config.rules import RULES
from memtrain.config.tree import Config
from memtrain.errors import UserError


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
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        number = _convert_plain(arguments[0], value, key)
        if not arguments[1].allows(number):
            shown = value if is_finite(number) else number  # an int may have a hundred digits
            raise UserError(f"{key}={shown}: {arguments[1].refusal_of(number)}")
        return number
    if origin is Literal:
        if isinstance(value, str) and value in arguments:
            return value
        shown = (
            {True: "true", False: "false"}.get(value, value) if isinstance(value, bool) else value
        )
        raise UserError(f"{key}={shown}: choose one of {', '.join(arguments)}")
    if origin in (Union, types.UnionType):
        return _convert_union(arguments, value, key)
    if origin is list:
        if not isinstance(value, list):
            raise UserError(f"{key}={value}: must be a list, as in {key}=[...]")
        return [_convert(arguments[0], item, key) for item in value]
    plain = _convert_plain(hint, value, key)
    if hint is float and not is_finite(plain):
        raise UserError(f"{key}={plain}: must be a finite number")
    return plain


def _convert_union(choices: tuple[Any, ...], value: Any, key: str) -> Any:
    if value is None and type(None) in choices:
        return None
    real = [choice for choice in choices if choice is not type(None)]
    fitting = [choice for choice in real if _may_be(choice, value)]
    return _convert((fitting or real)[0], value, key)


def _may_be(hint: Any, value: Any) -> bool:
    """Whether `value` looks like what `hint` wants, to pick one of several."""
    origin = get_origin(hint)
    if origin is Annotated:
        hint, origin = get_args(hint)[0], None
    if origin is Literal:
        return isinstance(value, str)
    if origin is list:
        return isinstance(value, list)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number if hint is float else isinstance(value, hint) and not isinstance(value, bool)


def _convert_plain(kind: type, value: Any, key: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    wanted = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: f"text (quote it: {key}='\"{value}\"')",
    }[kind]
    raise UserError(f"{key}={value}: must be {wanted}")
