"""However a run ends, it goes on from its last whole checkpoint and becomes the run that nothing ever ended."""

import fcntl
import os
import pty
import random
import resource
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from command import (
    ENVIRONMENT,
    ROOT,
    Finished,
    Run,
    Start,
    Started,
    hear_signals,
    processes_with,
)
from same_run import assert_same_run, checkpoints, curve, files, records, summary, the_run

TINY = ["debug=tiny", "device=cpu", "schedule=constant", "model.dropout=0.1", "model.n_layers=2"]
TINY += ["eval_every=3"]
STOP_WITHIN_S = 10


def ok(finished: Finished) -> Finished:
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished


def assert_no_process_of(group: int) -> None:
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


def whole_ones(run: Path) -> list[str]:
    return [name for name in checkpoints(run) if not name.startswith(".")]


# --- kill -9 ------------------------------------------------------------------------------------------------------

STEPS = 16
LONG_SAVES = [
    "debug=tiny",
    "device=cpu",
    "schedule=constant",
    "model.dropout=0.1",
    f"steps={STEPS}",
]
LONG_SAVES += ["model.dim=192", "save_every=1", "offload=optimizer_nvme"]
"""Two million weights, saved after every step: most of the time something is being written."""
LIVES_UP_TO_S = 1.0
N_KILLS = int(os.environ.get("KILLS", "12"))
"""Of the slow test; KILLS=50 takes some minutes."""


def kill_at_random(started: Started, moment: random.Random) -> bool:
    """Some time after its header. Whether it still ran."""
    started.wait_for_line("step ")
    time.sleep(moment.uniform(0, LIVES_UP_TO_S))
    with suppress(ProcessLookupError):
        os.killpg(started.process.pid, signal.SIGKILL)
    return started.finish().returncode == -signal.SIGKILL


def chain(name: str, kills: int, moment: random.Random, start: Start, outputs: Path) -> list[bool]:
    """A run that is killed up to `kills` times and then ends; for each kill, whether a save was cut off."""
    (outputs / name).mkdir()
    overrides = [*LONG_SAVES, f"name={name}", f"offload.nvme_dir={outputs / name}"]
    cut: list[bool] = []
    runs = outputs / "runs" / name

    def go_on() -> Started:
        resume = ["resume=latest"] if list(runs.glob("*/checkpoints/step_*")) else []
        if not resume:
            shutil.rmtree(runs, ignore_errors=True)  # it left nothing to go on with
        return start(*overrides, *resume, outputs=outputs)

    while len(cut) < kills:
        if not kill_at_random(go_on(), moment):
            return cut
        cut.append(bool(list(runs.glob("*/checkpoints/.new"))))
    ok(go_on().finish())
    return cut


@pytest.mark.parametrize(
    ("kills", "in_a_chain"), [(1, 1), pytest.param(N_KILLS, 7, marks=pytest.mark.slow)]
)
def test_killed_runs_become_the_run_that_was_not(
    kills: int, in_a_chain: int, start: Start, run: Run, tmp_path: Path
) -> None:
    """In the midst of saves and of writes to files; every step is there once."""
    (tmp_path / "nvme").mkdir()
    straight = [*LONG_SAVES, "name=straight", f"offload.nvme_dir={tmp_path}/nvme"]
    ok(run(*straight, outputs=tmp_path))
    moment, cut = random.Random(kills), []
    for number in range(10 * kills):
        if len(cut) >= kills:
            break
        name = f"killed_{number}"
        cut += chain(name, min(in_a_chain, kills - len(cut)), moment, start, tmp_path)
        killed = the_run(tmp_path, name)
        assert_same_run(killed, the_run(tmp_path, "straight"))
        assert [step for step, _ in curve(killed, "train/loss")] == [*range(1, STEPS + 1)]
        assert checkpoints(killed) == [f"step_{STEPS:08d}"]
        assert summary(killed)["status"] == "ok"
        shutil.rmtree(killed)
    assert len(cut) == kills
    if kills >= 50:
        assert sum(cut) >= 10, "saves were to be cut off"


# --- no room, no permission ---------------------------------------------------------------------------------------


@pytest.fixture
def begun(run: Run, tmp_path: Path) -> Path:
    """A run of three steps with a checkpoint after each, in tmp_path as outputs."""
    begun = [*TINY, "name=begun", "steps=3", "save_every=1", "keep=-1"]
    ok(run(*begun, outputs=tmp_path))
    return the_run(tmp_path, "begun")


def assert_not_saved(finished: Finished, path: Path, cause: str) -> None:
    assert finished.returncode == 1, finished.stdout + finished.stderr
    (line,) = [text for text in finished.stderr.splitlines() if text.startswith("error: ")]
    assert str(path) in line and cause in line
    assert "Traceback" not in finished.stderr


def assert_goes_on(begun: Path, run: Run, outputs: Path) -> None:
    """From what was whole, and it is then the run that had room all the time."""
    ok(
        run(
            *TINY,
            "name=begun",
            "steps=6",
            "save_every=1",
            "keep=-1",
            "resume=latest",
            outputs=outputs,
        )
    )
    ok(run(*TINY, "name=straight", "steps=6", outputs=outputs))
    assert_same_run(begun, the_run(outputs, "straight"))


def test_no_room_for_a_checkpoint(start: Start, run: Run, begun: Path, tmp_path: Path) -> None:
    """No file may be longer than 64 KiB: the checkpoint is named, those before it stay, no half of one does."""
    further = [*TINY, "name=begun", "steps=6", "save_every=1", "keep=-1", "resume=latest"]
    started = start(*further, outputs=tmp_path)
    resource.prlimit(started.process.pid, resource.RLIMIT_FSIZE, (2**16, 2**16))
    finished = started.finish()
    assert_not_saved(finished, begun / "checkpoints/.new", "File too large")
    assert "step_00000003 is the last complete one" in finished.stderr
    assert checkpoints(begun) == ["step_00000001", "step_00000002", "step_00000003"]
    assert summary(begun)["status"] == "not_saved"
    assert_goes_on(begun, run, tmp_path)


def test_no_room_for_the_weights(start: Start, tmp_path: Path) -> None:
    started = start(*TINY, "name=full", "steps=3", "save_every=0", outputs=tmp_path)
    resource.prlimit(started.process.pid, resource.RLIMIT_FSIZE, (2**16, 2**16))
    finished = started.finish()
    folder = the_run(tmp_path, "full")
    assert_not_saved(finished, folder / ".model.safetensors.tmp", "File too large")
    assert not list(folder.glob("*model.safetensors*"))


def command(*words: str | Path) -> bool:
    return subprocess.run([str(word) for word in words], capture_output=True).returncode == 0


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    folder.mkdir()
    if os.geteuid() or not command("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder):
        pytest.skip("needs root, to mount a small file system")
    try:
        yield
    finally:
        command("umount", "--lazy", folder)


def test_a_disk_that_fills_up(run: Run, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    overrides = [*TINY, "name=begun", "save_every=1", "keep=-1", "steps=6"]
    with small_disk(disk, "1300k"):
        finished = run(*overrides, outputs=disk)
        begun = the_run(disk, "begun")
        assert_not_saved(finished, begun, "No space left on device")
        names = checkpoints(begun)
        assert names == whole_ones(begun) and 1 <= len(names) < 6
        assert command("mount", "-o", "remount,size=50m", disk)
        assert_goes_on(begun, run, disk)


def test_a_disk_that_fills_up_with_records(run: Run, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, "600k"):
        finished = run(*TINY, "name=logged", "steps=100000", "save_every=0", outputs=disk)
        assert_not_saved(finished, the_run(disk, "logged"), "No space left on device")
        assert not list(disk.rglob("*.tmp"))


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Permissions do not bind root."""
    change = ["chmod", "-w"] if os.geteuid() else ["chattr", "+i"]
    back = {"-w": "+w", "+i": "-i"}[change[1]]
    if not command(*change, folder):
        pytest.skip(f"{change[0]} is not possible here")
    try:
        yield
    finally:
        command(change[0], back, folder)


def test_a_folder_that_cannot_be_written(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with read_only(tmp_path / "run"):
        finished = run(*TINY, folder=tmp_path / "run")
    assert finished.returncode == 2
    (line,) = finished.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path}/run/") and line.endswith("; choose another folder")
    assert "permitted" in line or "denied" in line


def test_a_folder_that_became_read_only(run: Run, begun: Path, tmp_path: Path) -> None:
    further = [*TINY, "name=begun", "steps=6", "save_every=1", "keep=-1", "resume=latest"]
    with read_only(begun / "checkpoints"):
        finished = run(*further, outputs=tmp_path)
    assert_not_saved(finished, begun / "checkpoints", "permitted" if not os.geteuid() else "denied")
    assert checkpoints(begun) == ["step_00000001", "step_00000002", "step_00000003"]
    assert_goes_on(begun, run, tmp_path)


# --- signals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code", "plan"),
    [
        (signal.SIGTERM, 143, "on"),
        pytest.param(signal.SIGINT, 130, "off", marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_a_run_that_goes_on(
    number: signal.Signals, code: int, plan: str, start: Start, run: Run, tmp_path: Path
) -> None:
    """Ctrl-C reaches all processes of the terminal, SIGTERM the one alone."""
    base = [*TINY, "save_every=0", "offload=optimizer_nvme", f"offload.nvme_dir={tmp_path}"]
    started = start(*base, "steps=100000", "name=stopped", f"plan={plan}", outputs=tmp_path)
    started.wait_for_line("step 20/")
    send = os.killpg if number == signal.SIGINT else os.kill
    send(started.process.pid, number)
    finished = started.finish(STOP_WITHIN_S)
    assert finished.returncode == code
    assert "Traceback" not in finished.stderr
    assert_no_process_of(started.process.pid)
    stopped = the_run(tmp_path, "stopped")
    assert not list(tmp_path.glob("memtrain-*"))
    assert whole_ones(stopped) == checkpoints(stopped)
    (step,) = (int(name.removeprefix("step_")) for name in checkpoints(stopped))
    recorded = records(stopped)[-1]["step"]
    assert recorded == step or (recorded == step - 1 and step % 3 == 0)  # its validation is pending
    assert summary(stopped)["status"] == "interrupted" and f"step {step}" in finished.stderr
    assert [point for point, _ in curve(stopped, "train/loss")] == [*range(1, recorded + 1)]
    ok(run(*base, f"steps={step + 3}", "name=stopped", "resume=latest", outputs=tmp_path))
    ok(run(*base, f"steps={step + 3}", "name=straight", outputs=tmp_path))
    assert_same_run(stopped, the_run(tmp_path, "straight"), after=step)
    losses = [
        [record["loss"] for record in records(the_run(tmp_path, name))]
        for name in ("stopped", "straight")
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("sweep", [False, True], ids=["run", "sweep"])
def test_a_lost_terminal_loses_nothing(sweep: bool, tmp_path: Path) -> None:
    """What is written to it fails from then on."""
    ours, theirs = pty.openpty()
    words = [*TINY, "steps=100000", "save_every=0", "plan=off", "name=lost", f"outputs={tmp_path}"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *words, *(["-m", "seed=1,2"] if sweep else [])],
        env=ENVIRONMENT, stdin=theirs, stdout=theirs, stderr=theirs,
        preexec_fn=lambda: (os.setsid(), fcntl.ioctl(0, termios.TIOCSCTTY, 0), hear_signals()),
    )  # fmt: skip
    os.close(theirs)
    while not any(len(path.read_text()) > 5000 for path in tmp_path.rglob("metrics.jsonl")):
        os.read(ours, 2**16)
    os.close(ours)
    assert process.wait(STOP_WITHIN_S) == 129
    (folder,) = (path.parent for path in tmp_path.rglob("metrics.jsonl"))
    assert summary(folder)["status"] == "interrupted"
    assert len(whole_ones(folder)) == 1
    assert not sweep or list(tmp_path.rglob("sweep.csv"))
    assert not processes_with(str(folder))


@pytest.mark.parametrize(
    "redirection",
    [
        "| head -1",
        pytest.param(">&-", marks=pytest.mark.slow),
        pytest.param(">/dev/full 2>&1", marks=pytest.mark.slow),
    ],
)
def test_whoever_reads_what_it_says_may_be_gone(redirection: str, tmp_path: Path) -> None:
    words = [*TINY, "steps=60", "plan=off", "name=unread", f"outputs={tmp_path}"]
    script = f"{sys.executable} {ROOT}/train.py {' '.join(words)}"
    subprocess.run(
        ["bash", "-c", f"{script} {redirection}"],
        env=ENVIRONMENT, stdout=subprocess.DEVNULL, check=True, timeout=60,
    )  # fmt: skip
    found = summary(the_run(tmp_path, "unread"))
    assert (found["status"], found["steps"]) == ("ok", 60)


def test_a_signal_ends_a_validation_that_takes_long(start: Start, run: Run, tmp_path: Path) -> None:
    """It is made again by who goes on: nothing is missing then, and nothing is there twice."""
    few, many = "eval_sequences=4", "eval_sequences=1000000"  # these take minutes
    started = start(*TINY, "name=long", "steps=1000", many, outputs=tmp_path)
    for line, next_one in (("step 2/", many), ("step ", few)):  # then while it is made again
        started.wait_for_line(line)
        time.sleep(1)
        os.kill(started.process.pid, signal.SIGTERM)
        assert started.finish(STOP_WITHIN_S).returncode == 143
        folder = the_run(tmp_path, "long")
        assert records(folder)[-1]["step"] == 2
        assert whole_ones(folder) == ["step_00000003"]
        more = ["steps=7", "resume=latest", next_one]
        started = start(*TINY, "name=long", *more, outputs=tmp_path)
    ok(started.finish())
    ok(run(*TINY, "name=straight", "steps=7", few, outputs=tmp_path))
    straight = the_run(tmp_path, "straight")
    assert_same_run(folder, straight)
    for tag in ("train/loss", "val/loss"):
        assert curve(folder, tag) == curve(straight, tag)
    assert summary(folder)["val_loss"] == summary(straight)["val_loss"]


@pytest.mark.parametrize(
    "after_s",
    [0.5, 1.0, 1.5, *(pytest.param(s / 10, marks=pytest.mark.slow) for s in (6, 8, 13, 18, 24))],
)
def test_a_signal_before_there_is_anything_to_lose(
    after_s: float, start: Start, tmp_path: Path
) -> None:
    """While torch is imported, too: an exception there would be swallowed, or leave half of a module."""
    number = signal.SIGINT if int(10 * after_s) % 2 else signal.SIGTERM
    started = start(*TINY, "steps=100000", "plan=on", folder=tmp_path / "run", fresh=True)
    time.sleep(after_s)
    os.kill(started.process.pid, number)
    finished = started.finish(STOP_WITHIN_S)
    assert finished.returncode in (128 + number, -number)  # the latter: before our first line
    assert "Traceback" not in finished.stdout + finished.stderr


def test_a_signal_after_training(start: Start, tmp_path: Path) -> None:
    """What remains is a sample, which may take long; the weights are there."""
    text = ["data=text", "data.path=corpus.txt", "tokenizer=bytes", "model.dim=32", "name=sampled"]
    text += ["model.n_heads=2", "steps=2", "log_every=1", "generate.tokens=100000"]
    (tmp_path / "corpus.txt").write_text("some words and others\n" * 500)
    started = start(*text, cwd=tmp_path, outputs=tmp_path)
    started.wait_for_line("step 2/")
    folder = the_run(tmp_path, "sampled")
    while not (folder / "model.safetensors").exists():
        time.sleep(0.05)
    os.kill(started.process.pid, signal.SIGTERM)
    finished = started.finish(STOP_WITHIN_S)
    assert finished.returncode == 143 and "Traceback" not in finished.stderr
    assert summary(folder)["status"] == "interrupted"


def test_a_second_signal_does_not_wait_for_the_save(start: Start, run: Run, tmp_path: Path) -> None:
    wide = ["debug=tiny", "device=cpu", "model.dim=512", "model.n_layers=8", "schedule=constant"]
    started = start(*wide, "name=wide", "steps=1000", "save_every=2", outputs=tmp_path)
    started.wait_for_line("step 3/")
    os.killpg(started.process.pid, signal.SIGINT)
    assert started.process.stderr
    assert any("once more: at once" in line for line in started.process.stderr)
    os.killpg(started.process.pid, signal.SIGINT)
    finished = started.finish(STOP_WITHIN_S)
    assert finished.returncode == 130
    assert_no_process_of(started.process.pid)
    wide_run = the_run(tmp_path, "wide")
    assert not (wide_run / "summary.json").exists()
    if not whole_ones(wide_run):
        assert (
            "no complete checkpoint"
            in run(*wide, "name=wide", "resume=latest", outputs=tmp_path).stderr
        )
        return
    last = int(whole_ones(wide_run)[-1].removeprefix("step_")) + 1
    resumed = ok(run(*wide, f"steps={last}", "name=wide", "resume=latest", outputs=tmp_path))
    assert f"step {last - 1} of {last}" in resumed.stdout


def test_a_signal_while_text_is_tokenized(start: Start, tmp_path: Path) -> None:
    """Nothing has been trained: nothing is saved, and the line says so."""
    words = [f"word{i * 7919 % 10007}" for i in range(2_000_000)]
    (tmp_path / "corpus.txt").write_text(
        "\n".join(" ".join(words[i : i + 9]) for i in range(0, len(words), 9))
    )
    text = ["data=text", "data.path=corpus.txt", "name=words", "plan=on"]
    started = start(*text, cwd=tmp_path, outputs=tmp_path)
    assert started.process.stdout
    assert started.process.stdout.readline()
    os.killpg(started.process.pid, signal.SIGINT)
    finished = started.finish(STOP_WITHIN_S)
    assert finished.returncode == 130
    assert "Traceback" not in finished.stderr and "error: interrupted" in finished.stderr
    assert_no_process_of(started.process.pid)
    folder = the_run(tmp_path, "words")
    assert summary(folder)["status"] == "interrupted"
    assert "checkpoints" not in {name.split("/")[0] for name in files(folder)}
