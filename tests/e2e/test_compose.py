"""Every file under conf/ can be chosen, says how, and means what it says."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
import yaml
from command import ROOT

from memtrain.config import Config
from memtrain.engine.build import build_dimensions
from memtrain.errors import UserError
from memtrain.model.transformer import Transformer, count_parameters

Compose = Callable[..., Config]

CONF = ROOT / "conf"
FILES = sorted(
    path
    for path in CONF.glob("*/*.yaml")
    if path.parent.name != "local"  # the user's own
)
CHOICES = [f"{path.parent.name}={path.stem}" for path in FILES]

NEEDS = {
    "data=text": ["data.path=corpus.txt"],
    "data=jsonl": ["data.path=chats.jsonl"],
    "checkpointing=per_block": ["checkpointing.per_block=[keep,keep,keep,recompute]"],
    "data=tokens": ["data.path=corpus.bin"],
    "offload=optimizer_nvme": ["offload.nvme_dir=/mnt/nvme"],
    "offload=params_nvme": ["offload.nvme_dir=/mnt/nvme"],
    "offload=all_nvme": ["offload.nvme_dir=/mnt/nvme"],
    "model=hf": ["task=plan", "model.config=FOLDER"],
    "tokenizer=model": ["model=hf", "model.path=FOLDER"],
    "adapter=lora": ["task=plan"],
    "adapter=qlora": ["task=plan"],
    "tokenizer=file": ["tokenizer.path=tokenizer.json"],
}
NOT_AVAILABLE = {"precision=fp8"}
PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "tinyllama": 1_100_048_384,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "qwen2_7b": 7_615_616_512,
    "mistral_7b": 7_241_732_096,
    "small": 110_418_432,
}
"""Tied weights once. Of the published checkpoints; `small` is counted by hand."""


def test_all_files_are_found() -> None:
    assert len(CHOICES) == 90


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_composes(choice: str, config: Compose, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    needed = (text.replace("FOLDER", str(tmp_path)) for text in NEEDS.get(choice, []))
    overrides = [choice, *needed]
    if choice not in NOT_AVAILABLE:
        assert isinstance(config(*overrides), Config)
        return
    with pytest.raises(UserError, match=f"{choice}: not available"):
        config(*overrides)


def test_every_file_says_how_it_is_run() -> None:
    assert [
        choice for choice, path in zip(CHOICES, FILES, strict=True) if not says(path, choice)
    ] == []


def says(path: Path, choice: str) -> bool:
    """Whether one of the first two lines is a comment with a command that has the choice in it."""
    lines = path.read_text(encoding="utf-8").splitlines()[:2]
    return any(line.startswith("# python train.py ") and choice in line.split() for line in lines)


def keys_of(tree: dict[str, Any], path: str = "") -> set[str]:
    """`{"a": 1, "b": {"c": 2}}` -> {"a", "b.c"}"""
    return set().union(
        *(
            keys_of(value, f"{path}{key}.") if isinstance(value, dict) else {path + key}
            for key, value in tree.items()
        )
    )


def fields_of(cls: type, path: str = "") -> set[str]:
    hints = get_type_hints(cls)
    return set().union(
        *(
            fields_of(hints[field.name], f"{path}{field.name}.")
            if is_dataclass(hints[field.name])
            else {path + field.name}
            for field in fields(cls)
        )
    )


def test_the_config_file_has_every_field_and_no_other() -> None:
    """The data sheet of the card is the one part that only its group files hold."""
    tree = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))
    found = keys_of({key: tree[key] for key in tree if key not in ("defaults", "hydra")})
    known = fields_of(Config)
    assert len(known) > 80
    card = {name for name in known if name.startswith("gpu.") and name != "gpu.auto"}
    assert found == known - card
    assert keys_of(yaml.safe_load((CONF / "gpu/a100_80gb.yaml").read_text(encoding="utf-8"))) == {
        name.removeprefix("gpu.") for name in card
    }


def test_every_model_has_a_published_size() -> None:
    assert {path.stem for path in (CONF / "model").glob("*.yaml")} == {*PARAMETERS, "nano", "hf"}


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items(), ids=PARAMETERS.keys())
def test_a_model_has_its_published_size(name: str, parameters: int, config: Compose) -> None:
    dimensions = build_dimensions(config(f"model={name}"), vocab_size=1)
    with torch.device("meta"):
        model = Transformer(dimensions)
    assert count_parameters(model) == parameters


def test_the_experiments_are_what_their_names_say(config: Compose) -> None:
    """And all of them take the same tokens in one step."""
    names = sorted(choice for choice in CHOICES if choice.startswith("experiment="))
    switches = []
    for name in names:
        c = config(name)
        assert c.micro_batch * c.accum * c.seq_len == 16 * 128
        switches.append((c.precision.name, c.accum, c.checkpoint_every, c.offload.mode))
    assert switches == [
        ("fp32", 1, 0, "none"),
        ("bf16", 1, 0, "none"),
        ("bf16", 4, 0, "none"),
        ("bf16", 4, 1, "none"),
        ("bf16", 4, 1, "optimizer"),
        ("fp16", 4, 0, "none"),
    ]
