"""The tree as a page for people (docs/config.md) and as JSON schemas for editors (docs/schema/). No torch.

python -m memtrain.config.reference        # or `make docs`, after a change to a field, a default or a choice
"""

import ast
import inspect
import json
import re
import sys
import types
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from memtrain.cards import CONF_DIR, load_yaml
from memtrain.config.bounds import Range
from memtrain.config.effects import EFFECTS
from memtrain.config.read import groups
from memtrain.config.tree import Config

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, SCHEMAS = DOCS / "config.md", DOCS / "schema"
INTERPOLATION = {"type": "string", "pattern": r"\$\{"}
HEAD = """# Every key

Made from the fields of `memtrain/config/` by `make docs`; a test fails where this page is stale.

Type a key as `python train.py key=value`, choose a file of a group as `group=choice`. `null` means none.

## Completion in your editor

`docs/schema/` holds JSON schemas of the same keys. Editors with the YAML language server then complete keys and choices
under `conf/`, show the texts below, and flag a misspelt key. VS Code's YAML extension finds the schemas by
`.vscode/settings.json`. For another editor, copy `yaml.schemas` from there into its language server's settings; for
one file elsewhere, write `# yaml-language-server: $schema=<path>/docs/schema/root.json` into its first lines.

In a new `conf/experiment/new.yaml`, yaml-language-server 1.25 offers under `offload:`, after `mode: params`,

    gradients, optimizer_fraction, nvme_dir, nvme_buffer_mib, min_tensor_bytes, activations_fraction, blocks

under `optimizer:`, after `name: a`,

    adamw, adamw_8bit, paged_adamw_8bit, lion, muon, adafactor, sgd

in `defaults:`, after `- override /precision: `,

    bf16, bf16_true, fp16, fp32, fp8, null

and says of a line `acum: 4`

    Property acum is not allowed.
"""


@dataclass(frozen=True)
class Key:
    """One key of the tree."""

    path: str
    hint: Any
    text: str


def keys_of(cls: type, prefix: str = "") -> list[Key]:
    """Every key below `cls`, in the order of its fields."""
    hints, texts = get_type_hints(cls, include_extras=True), texts_of(cls)
    found = []
    for field in fields(cls):
        hint, path = hints[field.name], f"{prefix}{field.name}"
        if is_dataclass(hint):
            found += keys_of(hint, f"{path}.")  # type: ignore[arg-type]
        else:
            found.append(Key(path, hint, texts.get(field.name, "")))
    return found


@cache
def texts_of(cls: type) -> dict[str, str]:
    """The text under each field, those of the classes below included."""
    found: dict[str, str] = {}
    for owner in reversed(cls.__mro__[:-1]):
        (tree,) = ast.parse(inspect.getsource(owner)).body
        assert isinstance(tree, ast.ClassDef)
        for field, after in zip(tree.body, tree.body[1:], strict=False):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
                found[field.target.id] = " ".join(str(after.value.value).split())  # type: ignore[attr-defined]
    return found


def type_text(hint: Any) -> str:
    """As in `whole number, at least 1`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return f"{type_text(arguments[0])}, {bounds_text(arguments[1])}"
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(argument) for argument in arguments)
    if origin is list:
        return f"list of {type_text(arguments[0])}"
    names = {int: "whole number", float: "number", bool: "`true`, `false`", str: "text"}
    return "`null`" if hint is type(None) else names[hint]


def bounds_text(bounds: Range) -> str:
    """Without a bound that only catches slips of the finger."""
    return str(bounds) if bounds.high < 10**6 else bounds.low_text


def page() -> str:
    defaults = load_yaml(CONF_DIR / "config.yaml")
    needs = {key: needed for key, needed, _ in EFFECTS}
    parts, section = [HEAD, "\n## At the root\n"], ""
    keys = sorted(keys_of(Config), key=lambda key: "." in key.path)
    for key in keys:
        group = key.path.partition(".")[0] if "." in key.path else ""
        if group != section:
            section = group
            parts.append(f"\n## {group}\n{choices_text(group)}")
        parts.append(entry(key, default_of(defaults, key.path), needs.get(key.path)))
    for group in sorted(groups() - set(get_type_hints(Config))):
        parts.append(f"\n## {group}\n\nSets keys of other sections.\n{choices_text(group)}")
    return "".join(parts)


def choices_text(group: str) -> str:
    """A line for each file, with what its first comments say beside the command."""
    lines = []
    for file in files_in(group):
        comments = re.findall(r"^# (?!@)(.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
        told = [re.sub(r"^python train\.py .*?(   +|$)", "", comment) for comment in comments]
        lines.append(f"- `{group}={file.stem}`: {' '.join(filter(None, told))}\n")
    return "".join(["\n", *lines]) if lines else ""


def entry(key: Key, default: Any, needed: str | None) -> str:
    shown = json.dumps(default, ensure_ascii=False) if default is not ... else "of the card"
    text = f"{key.text} Has an effect only with {needed}." if needed else key.text
    return f"\n**`{key.path}`** · {type_text(key.hint)} · default `{shown}`\\\n{text}\n"


def default_of(defaults: dict[str, Any], path: str) -> Any:
    """... where the groups alone say it."""
    value: Any = defaults
    for name in path.split("."):
        value = value.get(name, ...) if isinstance(value, dict) else ...
    return value


# --- JSON schema --------------------------------------------------------------------------------------------------


def schemas() -> dict[str, dict[str, Any]]:
    """By file name: one for config.yaml and the files that change the root, one for each group."""
    hints = get_type_hints(Config, include_extras=True)
    choosable = sorted(groups())
    found = {"root": root_schema(choosable)}
    for group in choosable:
        if is_dataclass(hints.get(group)) and not all(map(changes_the_root, files_in(group))):
            found[group] = {"$schema": DRAFT, **class_schema(hints[group]), "title": group}
            found[group]["properties"]["defaults"] = {}
    return found


def files_in(group: str) -> list[Path]:
    return sorted((CONF_DIR / group).glob("*.yaml"))


def changes_the_root(file: Path) -> bool:
    return file.read_text(encoding="utf-8").startswith("# @package _global_")


DRAFT = "http://json-schema.org/draft-07/schema#"


def root_schema(choosable: list[str]) -> dict[str, Any]:
    schema = {"$schema": DRAFT, "title": "memtrain", **class_schema(Config)}
    overrides = {
        f"{prefix}{group}": {"enum": [*names_in(group), None]}
        for group in choosable
        for prefix in ("", "override /", "/")
    }
    item = {"anyOf": [{"type": "string"}, {"type": "object", "properties": overrides}]}
    schema["properties"] |= {"defaults": {"type": "array", "items": item}, "hydra": {}}
    return schema


def names_in(group: str) -> list[str]:
    return [path.stem for path in files_in(group)]


def class_schema(cls: type) -> dict[str, Any]:
    hints, texts = get_type_hints(cls, include_extras=True), texts_of(cls)
    properties = {}
    for field in fields(cls):
        schema = schema_of(hints[field.name])
        if text := texts.get(field.name):
            schema["description"] = text
        properties[field.name] = schema
    return {"type": "object", "additionalProperties": False, "properties": properties}


def schema_of(hint: Any) -> dict[str, Any]:
    if is_dataclass(hint):
        return class_schema(hint)  # type: ignore[arg-type]
    return {"anyOf": [*plain_schemas(hint), INTERPOLATION]}


def plain_schemas(hint: Any) -> list[dict[str, Any]]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        (schema,) = plain_schemas(arguments[0])
        return [schema | limits(arguments[1])]
    if origin is Literal:
        return [{"enum": list(arguments)}]
    if origin in (Union, types.UnionType):
        return [schema for argument in arguments for schema in plain_schemas(argument)]
    if origin is list:
        return [{"type": "array", "items": {"anyOf": plain_schemas(arguments[0])}}]
    names = {int: "integer", float: "number", bool: "boolean", str: "string", type(None): "null"}
    return [{"type": names[hint]}]


def limits(bounds: Range) -> dict[str, float]:
    low = "exclusiveMinimum" if bounds.above else "minimum"
    return {low: bounds.low, "maximum": bounds.high}


def rendered() -> dict[Path, str]:
    """Every file that is made here."""
    files = {SCHEMAS / f"{name}.json": schema for name, schema in schemas().items()}
    texts = {path: json.dumps(schema, indent=1) + "\n" for path, schema in files.items()}
    return {PAGE: page(), **texts}


def main() -> None:
    for path, text in rendered().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path, file=sys.stderr)


if __name__ == "__main__":
    main()
