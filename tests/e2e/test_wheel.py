"""What is installed works without the checkout: it trains, plans and sweeps, in the folder where it was typed."""

import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from command import ENVIRONMENT, ROOT

PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
IN_CHECKOUT = ("memtrain", "conf", "pyproject.toml", "setup.py", "README.md")
MINE = """# @package _global_
defaults:
  - override /data: random
model: {n_layers: 1, dim: 32, n_heads: 2}
micro_batch: 2
seq_len: 16
eval_sequences: 2
"""
PLANS = "from memtrain.phantom import PhantomGPU; PhantomGPU('a100_80gb'); import memtrain; print(memtrain.__file__)"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the package alone."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed, and nothing is fetched for a test")
    source = tmp_path_factory.mktemp("source")  # a build leaves folders behind
    for name in IN_CHECKOUT:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    (source / "conf/local").mkdir(exist_ok=True)
    (source / "conf/local/default.yaml").write_text("# @package _global_\nseed: 5\n")
    folder = tmp_path_factory.mktemp("installed")
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(source / "dist")]
    subprocess.run([*build, str(source)], check=True, cwd=source)
    (wheel,) = (source / "dist").glob("memtrain-*.whl")
    names = {
        name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("memtrain/conf/")
    }
    ours = (path for path in (ROOT / "conf").rglob("*.yaml") if path.parent.name != "local")
    assert names == {f"memtrain/conf/{path.relative_to(ROOT / 'conf')}" for path in ours}
    subprocess.run([*PIP, "install", "--no-deps", "--target", str(folder), str(wheel)], check=True)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the commands are typed."""
    (tmp_path / "conf/experiment").mkdir(parents=True)
    (tmp_path / "conf/experiment/mine.yaml").write_text(MINE)
    return tmp_path


def finished(installed: Path, folder: Path, *command: str) -> str:
    """stdout of a command that ends with exit code 0."""
    ended = subprocess.run(
        command,
        cwd=folder,
        env=ENVIRONMENT | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_an_installed_package_trains_plans_and_sweeps(installed: Path, folder: Path) -> None:
    python = [sys.executable, "-m", "memtrain"]
    script = [sys.executable, str(installed / "bin/memtrain")]  # as an installer has written it
    found = finished(installed, folder, sys.executable, "-c", PLANS)
    assert found.strip() == str(installed / "memtrain/__init__.py")
    finished(installed, folder, *script, "experiment=mine", "steps=2", "save_every=0", "name=one")
    finished(installed, folder, *python, "task=plan", "experiment=mine", "gpu=t4", "name=plan")
    words = ["experiment=mine", "steps=1", "plan=off", "accum=1,2", "name=both"]
    finished(installed, folder, *script, "-m", *words)
    runs = {
        path.parts[-3]: json.loads(path.read_text())
        for path in folder.glob("outputs/runs/*/*/summary.json")
    }
    assert {name: run["status"] for name, run in runs.items()} == {"one": "ok", "plan": "ok"}
    assert runs["one"]["predicted_peak_allocated_bytes"] and runs["plan"]["gpu"] == "T4"
    jobs = sorted(folder.glob("outputs/sweeps/both/*/*/summary.json"))
    assert [json.loads(path.read_text())["status"] for path in jobs] == ["ok", "ok"]
    composed = finished(installed, folder, *python, "--cfg", "job", "--resolve", "experiment=mine")
    assert f"cache_dir: {folder}/.cache" in composed and "n_layers: 1" in composed
    assert "seed: 0" in composed  # not what the builder had in conf/local
    helped = finished(installed, folder, *script, "--help")
    assert "  memtrain task=numerics" in helped and "mine" in helped
    assert not {path.name for path in installed.iterdir()} & {"outputs", ".cache", "conf"}
