"""Two runs that start in the same second have a folder each."""

import json
from pathlib import Path

from command import Start


def read_summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def read_metrics(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_two_runs_of_the_same_second_have_a_folder_each(start: Start, tmp_path: Path) -> None:
    """They also have the same seed, so the same losses."""
    both = [start("debug=tiny", "name=twin", outputs=tmp_path) for _ in range(2)]
    finished = [one.finish() for one in both]
    assert [one.returncode for one in finished] == [0, 0], finished[0].stderr
    folders = sorted((tmp_path / "runs/twin").iterdir())
    assert {int(folder.name.split("_")[-1]) for folder in folders} == {
        one.process.pid for one in both
    }
    first, second = (read_metrics(folder) for folder in folders)
    assert [record["step"] for record in first] == list(range(1, 11))
    assert [record["loss"] for record in first] == [record["loss"] for record in second]
    for folder in folders:
        assert len(list(folder.glob("events.out.tfevents.*"))) == 1
        assert read_summary(folder)["parameters"] == 53440
