"""A wrong command costs one line on stderr and exit code 2, and nothing is built for it."""

from pathlib import Path

import pytest
from command import TINY_TEXT, Run

# Wrong by themselves; unit/test_config.py tries the rules of the config one by one.
WRONG_COMMANDS = {
    "an unknown key": (["steeps=3"], ["steeps", "did you mean steps?"]),
    "a group misspelt": (["precsion=bf16"], ["precsion: unknown", "did you mean precision?"]),
    "a key without its group": (
        ["n_layers=2"],
        ["n_layers: unknown", "did you mean model.n_layers?"],
    ),
    "words of other trainers": (
        ["--learning_rate", "1e-4", "batch_size=4", "fp16=true", "debug=tiny", "steeps=3"],
        [
            "--learning_rate 1e-4: use optimizer.lr=1e-4;",
            "batch_size=4: use micro_batch=4;",
            "fp16=true: use precision=fp16;",
            "did you mean steps?",
        ],
    ),
    "another trainer's value": (["precision=bf16-mixed"], ["use precision=bf16"]),
    "a number for a group, beside one that is not": (
        ["accum=3", "offload=4"],
        ["error: offload=4: a group takes"],
    ),
    "a name that is no folder": (["name=a b"], ["error: name=", "it names a folder"]),
    "an unknown choice": (["optimizer=adam"], ["optimizer", "adam"]),
    "a list without -m": (["optimizer.lr=1e-3,1e-4"], ["optimizer.lr", "-m"]),
    "a number for a group": (["accumulation=4"], ["accumulation"]),
    "an unquoted equals sign": (["data.path=a=b.txt"], ["data.path=a=b.txt"]),
    "a wrong type": (["accum=off"], ["accum=off", "whole number"]),
}

# Only seen with torch and the data at hand.
WRONG_MACHINE_OR_DATA = {
    "no card": (["debug=tiny", "device=cuda"], ["device=cuda", "device=cpu"]),
    "no such file": ([*TINY_TEXT, "data.path=absent.txt"], ["absent.txt", "no such file"]),
    "not UTF-8": ([*TINY_TEXT, "data.path=bad.txt"], ["bad.txt", "offset 3", "UTF-8"]),
    "too little text": ([*TINY_TEXT, "data.path=short.txt"], ["5 tokens", "17"]),
    "ids outside the model": (
        [*TINY_TEXT, "data.path=good.txt", "model.vocab_size=256"],
        ["model.vocab_size=256", "256"],
    ),
}
LEFT_BEHIND = {".hydra", ".lock", "config.yaml", "train.log", "summary.json"}


@pytest.fixture
def folder_with_files(tmp_path: Path) -> Path:
    (tmp_path / "bad.txt").write_bytes(b"abc\xff\xfe")
    (tmp_path / "short.txt").write_bytes(b"abcd")
    (tmp_path / "good.txt").write_bytes(b"some text\n" * 500)
    return tmp_path


def check_refusal(run: Run, overrides: list[str], expected: list[str], cwd: Path) -> None:
    before = sorted(path.name for path in cwd.iterdir())
    finished = run(*overrides, cwd=cwd)
    assert finished.returncode == 2, finished.stderr
    assert "Traceback" not in finished.stdout + finished.stderr
    lines = finished.stderr.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    for text in expected:
        assert text in lines[-1]
    assert "parameters" not in finished.stdout
    left = {path.name for path in finished.folder.glob("*")}
    assert left <= LEFT_BEHIND
    assert sorted(path.name for path in cwd.iterdir()) == before


@pytest.mark.parametrize(
    ("overrides", "expected"), WRONG_COMMANDS.values(), ids=WRONG_COMMANDS.keys()
)
def test_a_wrong_command(
    overrides: list[str], expected: list[str], run: Run, tmp_path: Path
) -> None:
    check_refusal(run, overrides, expected, tmp_path)


@pytest.mark.parametrize(
    ("overrides", "expected"), WRONG_MACHINE_OR_DATA.values(), ids=WRONG_MACHINE_OR_DATA.keys()
)
def test_a_wrong_machine_or_text(
    overrides: list[str], expected: list[str], run: Run, folder_with_files: Path
) -> None:
    check_refusal(run, overrides, expected, folder_with_files)
