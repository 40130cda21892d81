"""resume=latest goes on with the newest run of that name, or fails; it never starts from nothing."""

import json
import shutil
from pathlib import Path

from command import Finished, Run
from straight_run import TRAINING


def test_it_goes_on_from_the_last_step(
    run: Run, straight: Finished, outputs: Path, tmp_path: Path
) -> None:
    (tmp_path / "runs/straight").mkdir(parents=True)
    folder = tmp_path / "runs/straight" / straight.folder.name
    shutil.copytree(straight.folder, folder)
    finished = run(*TRAINING, "resume=latest", "steps=12", cwd=outputs, outputs=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert f"{folder}/checkpoints/step_00000010, step 10 of 12" in " ".join(finished.stdout.split())
    assert list((tmp_path / "runs/straight").iterdir()) == [folder]
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 13))


def test_nothing_to_go_on_with(run: Run, tmp_path: Path) -> None:
    finished = run("debug=tiny", "name=other", "resume=latest", outputs=tmp_path)
    assert finished.returncode == 2
    assert "resume=latest: no complete checkpoint" in finished.stderr.splitlines()[-1]
    assert "step 1/" not in finished.stdout
