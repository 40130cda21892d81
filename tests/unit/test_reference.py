"""docs/config.md and the schemas are what the fields say, and every file under conf/ fits its schema."""

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import jsonschema
import pytest
import yaml

from memtrain.config import Config
from memtrain.config.reference import CONF_DIR, DOCS, PAGE, keys_of, rendered

ROOT = DOCS.parent
MAPPING = json.loads((ROOT / ".vscode/settings.json").read_text(encoding="utf-8"))["yaml.schemas"]


def schema_for(path: Path) -> dict[str, Any]:
    """As an editor finds it."""
    name = path.relative_to(ROOT).as_posix()
    listed = {file: [found] if isinstance(found, str) else found for file, found in MAPPING.items()}
    found = [
        schema
        for schema, patterns in listed.items()
        if any(fnmatch(name, pattern) for pattern in patterns) and f"!{name}" not in patterns
    ]
    assert len(found) == 1, (name, found)
    schema: dict[str, Any] = json.loads((ROOT / found[0]).read_text(encoding="utf-8"))
    return schema


def test_what_is_made_from_the_fields_is_not_stale() -> None:
    stale = [str(p) for p, text in rendered().items() if p.read_text(encoding="utf-8") != text]
    assert stale == [], "run `make docs`"


def test_every_key_has_a_text_and_every_float_a_range() -> None:
    """Without a range nan and inf would pass."""
    keys = keys_of(Config)
    assert [key.path for key in keys if not key.text] == []
    hints = [(key.path, key.hint) for key in keys if get_origin(key.hint) is not Annotated]
    assert [path for path, hint in hints if float in (hint, *get_args(hint))] == []


def test_every_choice_of_every_group_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    files = [
        path for path in CONF_DIR.glob("*/*.yaml") if path.parent.name not in ("hydra", "local")
    ]
    names = [f"`{path.parent.name}={path.stem}`" for path in files]
    assert [name for name in names if name not in page] == []


def test_every_file_fits_the_schema_that_an_editor_reads() -> None:
    files = [*CONF_DIR.glob("*.yaml"), *CONF_DIR.glob("*/*.yaml")]
    assert len(files) > 85
    for path in files:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        jsonschema.validate(tree or {}, schema_for(path))


@pytest.mark.parametrize("wrong", [{"acum": 4}, {"accum": 0}, {"optimizer": {"learning_rate": 1}}])
def test_a_slip_is_flagged(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema_for(CONF_DIR / "experiment/1_fp32.yaml"))
