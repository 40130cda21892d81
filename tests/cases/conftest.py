"""Runs that several cases look at: one straight through, and what went on from its middle in another process."""

from pathlib import Path

import numpy as np
import pytest
from command import Finished, Run
from straight_run import TRAINING

from memtrain.data.store import write_tokens


@pytest.fixture(scope="session")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs write, and where their data lies."""
    folder = tmp_path_factory.mktemp("straight")
    tokens = np.random.default_rng(0).integers(64, size=22 * 16 + 40)
    write_tokens(folder / "t", [tokens], 64, "", "")
    return folder


def where(outputs: Path, finished: Finished) -> Finished:
    """With the folder that its last line of figures names."""
    (line,) = [line for line in finished.stdout.splitlines() if line.startswith("run folder")]
    folder = Path(line.removeprefix("run folder").strip())
    assert folder.is_relative_to(outputs)
    return Finished(finished.returncode, finished.stdout, finished.stderr, folder)


@pytest.fixture(scope="session")
def straight(run: Run, outputs: Path) -> Finished:
    """Ten steps, checkpoints at 5 and 10."""
    finished = run(*TRAINING, "steps=10", cwd=outputs, outputs=outputs)
    assert finished.returncode == 0, finished.stderr
    return where(outputs, finished)


@pytest.fixture(scope="session")
def resumed(run: Run, outputs: Path, straight: Finished) -> Finished:
    """From the checkpoint at 5 to 10, in a process and a folder of its own."""
    checkpoint = straight.folder / "checkpoints/step_00000005"
    finished = run(*TRAINING, "steps=10", f"resume={checkpoint}", cwd=outputs, outputs=outputs)
    assert finished.returncode == 0, finished.stderr
    return where(outputs, finished)
