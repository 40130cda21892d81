"""What the documentation tells people to type composes, and its links lead somewhere."""

import re
import shlex
from pathlib import Path

import pytest
from command import ROOT
from composed import compose_config

PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:sh|console)\n(.*?)```", text, re.S)
    lines = (line.removeprefix("$ ").strip() for block in blocks for line in block.splitlines())
    return [line for line in lines if line.startswith("python train.py ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_compose(page: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    for command in commands(page):
        words = shlex.split(command, comments=True)[2:]
        words = [w for w in words if w not in ("-m", "--help", "acum=4")]
        if any(word.startswith(("hydra", "sweep.resume")) or "," in word for word in words):
            continue  # Hydra's own, and sweeps
        filled = [word.replace("DIR", str(tmp_path)) for word in words]
        compose_config(*filled)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_first_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
