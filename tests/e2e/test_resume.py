"""A run that was stopped and goes on is the run that was never stopped, bit for bit."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from command import TINY_TEXT, Finished, Run, Start
from optimizer_choices import needs_bitsandbytes
from safetensors.torch import load_file
from same_run import (
    assert_same_run,
    assert_same_tensors,
    checkpoints,
    curve,
    files,
    records,
    summary,
    the_run,
)

from memtrain.config import Config
from memtrain.engine.checkpoint import read_state
from memtrain.errors import UserError

TINY = ["debug=tiny", "device=cpu", "schedule=constant", "model.dropout=0.1", "model.n_layers=2"]
"""`schedule=constant`: the others depend on `steps`."""
STATE = "model.safetensors", "optimizer.safetensors"


def ok(finished: Finished) -> Finished:
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished


def one_error_line(finished: Finished, code: int = 2) -> str:
    assert finished.returncode == code, finished.stdout + finished.stderr
    lines = finished.stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in finished.stderr, finished.stderr
    return errors[0]


# --- bit for bit --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_a_stopped_run_goes_on_bit_for_bit(
    prefetch: int, start: Start, run: Run, tmp_path: Path
) -> None:
    """In a new interpreter: losses, validation, norms, rates, curves, weights, and where it is in the data."""
    (tmp_path / "corpus.txt").write_text("".join(f"{i} is {i * i}\n" for i in range(200)))
    text = [*TINY_TEXT, "data.path=corpus.txt", "schedule=constant", "model.dropout=0.1"]
    text += ["precision=fp16", "accum=3", "save_every=3", f"data.prefetch={prefetch}"]
    where = {"cwd": tmp_path, "outputs": tmp_path}
    ok(run(*text, "name=straight", "steps=12", **where))
    ok(run(*text, "name=stopped", "steps=6", **where))
    resumed = ok(start(*text, "name=stopped", "steps=12", "resume=latest", **where).finish())
    straight, stopped = the_run(tmp_path, "straight"), the_run(tmp_path, "stopped")
    assert_same_run(stopped, straight)
    assert [record["step"] for record in records(stopped)] == list(range(1, 13))
    assert [r["step"] for r in records(stopped) if r["val_loss"] is not None] == [3, 6, 9, 12]
    for tag in ("train/loss", "train/lr", "train/grad_norm", "train/loss_scale", "val/loss"):
        assert curve(stopped, tag) == curve(straight, tag), tag
    last = [path / "checkpoints/step_00000012" for path in (stopped, straight)]
    for name in STATE:
        assert_same_tensors(last[0] / name, last[1] / name)
    states = [read_state(path) for path in last]
    assert torch.equal(*(state.pop("random")["cpu"] for state in states))
    assert states[0] == states[1]
    assert summary(stopped)["status"] == "ok" and summary(stopped)["steps"] == 12
    assert summary(stopped)["sample"] == summary(straight)["sample"]
    for key in ("first_loss", "final_loss", "val_loss"):
        assert summary(stopped)[key] == summary(straight)[key], key
    assert "step_00000006, step 6 of 12" in resumed.stdout
    assert "changed" in resumed.stdout
    (row,) = [line for line in resumed.stdout.splitlines() if " steps " in line and "│" in line]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["steps", "6", "12"]


FACTORS = {
    "precision": [
        "precision=fp32",
        "precision=bf16",
        "precision=fp16",
        "precision=bf16_true",
        "precision=bf16_true precision.master_weights=false",
    ],
    "accum": ["accum=1", "accum=3"],
    "offload": [
        f"offload={mode}"
        for mode in ("none", "optimizer", "params", "all", "optimizer_nvme", "all_nvme")
    ],
    "optimizer": [
        f"optimizer={name}" for name in ("adamw", "lion", "sgd", "muon", "adafactor", "adamw_8bit")
    ],
    "prefetch": ["data.prefetch=0", "data.prefetch=2"],
}
Case = tuple[str, ...]
QUICK = [
    ("precision=bf16", "accum=3", "offload=params", "optimizer=muon", "data.prefetch=0"),
    ("precision=bf16_true", "accum=1", "offload=optimizer_nvme", "optimizer=lion"),
    ("precision=bf16_true precision.master_weights=false", "optimizer=adamw"),
    ("precision=fp16", "accum=3", "offload=all", "optimizer=adafactor"),
    pytest.param(("precision=fp32", "optimizer=adamw_8bit", "accum=3"), marks=needs_bitsandbytes),
]


def words(case: Case, nvme_dir: Path) -> list[str]:
    found = " ".join(case).split()
    return [*found, f"offload.nvme_dir={nvme_dir}"] if "_nvme" in " ".join(case) else found


def assert_goes_on(case: Case, run: Run, outputs: Path) -> None:
    """From its own third of six steps, as a run of its own."""
    (outputs / "nvme").mkdir()
    overrides = [*TINY, *words(case, outputs / "nvme"), "steps=6", "save_every=3", "keep=-1"]
    ok(run(*overrides, "name=straight", outputs=outputs))
    straight = the_run(outputs, "straight")
    third = f"resume={straight}/checkpoints/step_00000003"
    ok(run(*overrides, "name=resumed", third, outputs=outputs))
    resumed = the_run(outputs, "resumed")
    assert len(records(resumed)) == 3 and checkpoints(resumed) == ["step_00000006"]
    assert_same_run(resumed, straight, after=3)
    for name in STATE:
        last = (folder / "checkpoints/step_00000006" / name for folder in (resumed, straight))
        assert_same_tensors(*last)


@pytest.mark.parametrize("case", QUICK, ids=" ".join)
def test_each_way_to_keep_state_goes_on(case: Case, run: Run, tmp_path: Path) -> None:
    assert_goes_on(case, run, tmp_path)


def is_possible(case: Case, config: Callable[..., Config]) -> bool:
    if "8bit" in " ".join(case) and "offload=none" not in case:
        return False  # it is no optimizer of the host
    try:
        config(*TINY, *words(case, Path("/tmp")))
    except UserError:
        return False
    return True


def covering(cases: list[Case]) -> list[Case]:
    """Some of them, in which every pair of choices occurs that occurs in all: greedily, the one with most new pairs."""
    pairs = {case: set(combinations(case, 2)) for case in cases}
    left, chosen = set().union(*pairs.values()), []
    while left:
        best = max(cases, key=lambda case: len(pairs[case] & left))
        left -= pairs[best]
        chosen.append(best)
    return chosen


@pytest.mark.slow
@needs_bitsandbytes
def test_every_pair_of_choices_goes_on(
    config: Callable[..., Config], run: Run, tmp_path: Path
) -> None:
    cases = covering([case for case in product(*FACTORS.values()) if is_possible(case, config)])
    assert 30 <= len(cases) <= 60
    for number, case in enumerate(cases):
        (tmp_path / str(number)).mkdir()
        assert_goes_on(case, run, tmp_path / str(number))


# --- what may change, and what may not ----------------------------------------------------------------------------

MODES = ("none", "optimizer", "params", "all", "optimizer_nvme", "all_nvme")


def assert_moves(before: str, after: str, run: Run, outputs: Path) -> None:
    """State that one mode saved is gone on with by another: the same run, bit for bit."""
    (outputs / "nvme").mkdir(exist_ok=True)
    overrides = [*TINY, "steps=4", "save_every=2", "keep=-1"]
    folders = outputs / "runs" / before
    if not folders.exists():
        ok(
            run(
                *overrides,
                *words((f"offload={before}",), outputs / "nvme"),
                f"name={before}",
                outputs=outputs,
            )
        )
    straight, name = the_run(outputs, before), f"{before}-{after}"
    second = f"resume={straight}/checkpoints/step_00000002"
    moved = words((f"offload={after}",), outputs / "nvme")
    finished = ok(run(*overrides, *moved, f"name={name}", second, outputs=outputs))
    assert "offload.mode" in finished.stdout
    assert_same_run(the_run(outputs, name), straight, after=2)


@pytest.mark.parametrize(("before", "after"), [("none", "optimizer_nvme"), ("all_nvme", "none")])
def test_state_moves_to_another_home(before: str, after: str, run: Run, tmp_path: Path) -> None:
    assert_moves(before, after, run, tmp_path)


@pytest.mark.slow
def test_state_moves_from_every_home_to_every_other(run: Run, tmp_path: Path) -> None:
    for before, after in product(MODES, MODES):
        if before != after:
            assert_moves(before, after, run, tmp_path)


def test_masters_are_taken_over_when_storage_changes(run: Run, tmp_path: Path) -> None:
    """Nothing is rounded twice: going on by no step leaves weights and masters as they were."""

    def go_on(name: str, source: str, *overrides: str) -> Path:
        start = [f"resume={tmp_path / source}"] if source else []
        base = [*TINY, "schedule.warmup=0", "save_every=1"]
        ok(run(*base, *overrides, *start, folder=tmp_path / name))
        return tmp_path / name

    wide = go_on("wide", "", "steps=2") / "model.safetensors"
    cast = go_on("cast", "wide", "steps=2", "precision=bf16_true") / "model.safetensors"
    go_on("narrow", "wide", "steps=3", "precision=bf16_true")
    back = go_on("back", "narrow", "steps=3", "precision=bf16") / "model.safetensors"
    weights, rounded, returned = (load_file(path) for path in (wide, cast, back))
    assert all(torch.equal(rounded[name], weights[name].bfloat16()) for name in weights)
    optimizer = load_file(tmp_path / "narrow/checkpoints/step_00000003/optimizer.safetensors")
    assert {name for name in optimizer if name.endswith("/master")} == {
        f"{n}/master" for n in weights
    }
    assert all(torch.equal(returned[name], optimizer[f"{name}/master"]) for name in weights)


@pytest.mark.slow
def test_the_loss_scale_goes_on(run: Run, tmp_path: Path) -> None:
    """All five numbers, and not those of the config."""
    scaled = [*TINY, "precision=fp16", "save_every=7", "keep=-1", "name=scaled"]
    ok(run(*scaled, "precision.loss_scale=1024", "steps=7", outputs=tmp_path))
    ok(run(*scaled, "steps=8", "resume=latest", outputs=tmp_path))
    folder = the_run(tmp_path, "scaled")
    found = [read_state(folder / f"checkpoints/step_0000000{n}")["scaler"] for n in (7, 8)]
    five = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    assert found == [five | {"_growth_tracker": 7}, five | {"_growth_tracker": 8}]
    assert [record["loss_scale"] for record in records(folder)] == [1024.0] * 8


@pytest.mark.slow
def test_the_position_counts_samples(run: Run, tmp_path: Path) -> None:
    """Three windows of four micro-batches of one: the next sample is the thirteenth, whatever was read ahead."""
    counted = [*TINY, "micro_batch=1", "accum=4", "save_every=1", "keep=-1", "name=counted"]
    ok(run(*counted, "steps=3", outputs=tmp_path))
    resumed = ok(run(*counted, "steps=6", "resume=latest", outputs=tmp_path))
    folder = the_run(tmp_path, "counted")
    positions = [read_state(folder / "checkpoints" / name)["data"] for name in checkpoints(folder)]
    assert positions == [{"epoch": 0, "sample": 4 * step, "content": ""} for step in range(1, 7)]
    assert "step 3 of 6" in resumed.stdout
    assert summary(folder)["steps"] == 6


def test_a_window_may_be_cut_otherwise_and_not_be_another(run: Run, tmp_path: Path) -> None:
    base = [*TINY, "name=cut", "save_every=2", "model.dropout=0"]
    ok(run(*base, "micro_batch=4", "accum=1", "steps=2", outputs=tmp_path))
    before = files(the_run(tmp_path, "cut"))
    line = one_error_line(
        run(*base, "micro_batch=4", "accum=2", "steps=4", "resume=latest", outputs=tmp_path)
    )
    assert "micro_batch=4 accum=2" in line and "keep micro_batch x accum" in line
    assert files(the_run(tmp_path, "cut")) == before
    resumed = ok(
        run(*base, "micro_batch=1", "accum=4", "steps=4", "resume=latest", outputs=tmp_path)
    )
    assert (
        "warning: the same window in other micro-batches is rounded differently" in resumed.stderr
    )
    ok(run(*base, "micro_batch=4", "accum=1", "steps=4", "name=whole", outputs=tmp_path))
    losses = [
        [record["loss"] for record in records(the_run(tmp_path, name))] for name in ("cut", "whole")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("optimizer=lion", "optimizer.name=lion"),
        pytest.param("model.dim=64", "model.dim=64", marks=pytest.mark.slow),
        pytest.param("seed=1", "seed=1", marks=pytest.mark.slow),
        pytest.param("seq_len=8", "seq_len=8", marks=pytest.mark.slow),
        pytest.param("data.val_fraction=0.2", "data.val_fraction=0.2", marks=pytest.mark.slow),
        pytest.param("tokenizer=bytes", "tokenizer.kind=bytes", marks=pytest.mark.slow),
    ],
)
def test_another_run_is_refused_and_the_old_one_stays(
    change: str, key: str, run: Run, short: Path
) -> None:
    before = files(short)
    line = one_error_line(
        run(*TINY, "steps=5", change, f"resume={short}", outputs=short.parents[2])
    )
    assert key in line and "start a new run" in line
    assert files(short) == before


# --- which checkpoint ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with all its checkpoints."""
    outputs = tmp_path_factory.mktemp("short")
    ok(run(*TINY, "name=short", "steps=4", "save_every=1", "keep=-1", outputs=outputs))
    return the_run(outputs, "short")


@pytest.fixture
def short(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    folder = tmp_path / "runs/short" / made.name
    shutil.copytree(made, folder)
    return folder


def test_there_has_to_be_one(run: Run, tmp_path: Path) -> None:
    line = one_error_line(run(*TINY, "resume=latest", outputs=tmp_path))
    assert "resume=latest: no complete checkpoint in" in line
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_latest_is_the_youngest_whole_one_of_that_name(run: Run, short: Path) -> None:
    """Neither another name's, nor a damaged one, which is named, nor half of one."""
    folder = short / "checkpoints"
    os.truncate(folder / "step_00000004/optimizer.safetensors", 1000)
    shutil.copytree(folder / "step_00000003", folder / ".new")
    outputs = short.parents[2]
    shutil.copytree(short, outputs / "runs/other/run")
    resumed = ok(
        run(
            *TINY,
            "name=short",
            "steps=5",
            "save_every=1",
            "keep=-1",
            "resume=latest",
            outputs=outputs,
        )
    )
    assert f"resumed    {folder}/step_00000003, step 3 of 5" in resumed.stdout
    assert f"warning: {folder}/step_00000004: incomplete; ignored" in resumed.stderr
    assert [record["step"] for record in records(short)] == [1, 2, 3, 4, 5]
    assert checkpoints(short) == [f"step_0000000{step}" for step in range(1, 6)]


def test_latest_in_a_folder_of_ones_own_is_the_run_in_it(run: Run, short: Path) -> None:
    """Not one beside it."""
    own = short.with_name("own")
    line = one_error_line(run(*TINY, "steps=9", "resume=latest", folder=own))
    assert f"no complete checkpoint in {own}" in line
    ok(run(*TINY, "steps=9", "resume=latest", folder=short))
    assert summary(short)["steps"] == 9


def test_a_summary_stays_until_there_is_more_to_say(start: Start, short: Path) -> None:
    before = summary(short)
    started = start(*TINY, "steps=100000", f"resume={short}", outputs=short.parents[2])
    while (
        not list(short.glob(".lock"))
        or str(started.process.pid) not in (short / ".lock").read_text()
    ):
        assert started.process.poll() is None
    os.kill(started.process.pid, signal.SIGTERM)
    assert started.finish().returncode == 143
    now = summary(short)
    assert now == before or now["status"] == "interrupted"


@pytest.mark.parametrize("resume", ["", "x" * 5000])
def test_what_names_nothing_is_refused(resume: str, run: Run, tmp_path: Path) -> None:
    for where in ({"folder": tmp_path / "run"}, {"outputs": tmp_path}):
        line = one_error_line(run(*TINY, f"resume={resume}", **where))
        assert "resume=" in line and "name" in line


def test_latest_does_not_pass_over_a_run_that_saved_nothing(run: Run, short: Path) -> None:
    """It trained last; to go on with the one before it would not be what is meant."""
    outputs = short.parents[2]
    unsaved = [*TINY, "name=short", "steps=2", "save_every=0"]
    ok(run(*unsaved, outputs=outputs))
    (last,) = (folder for folder in short.parent.iterdir() if folder != short)
    before = files(short)
    line = one_error_line(run(*TINY, "name=short", "steps=9", "resume=latest", outputs=outputs))
    assert f"no complete checkpoint in {last}; drop resume, or name another run" in line
    assert files(short) == before


@pytest.mark.parametrize(
    "name",
    [
        "state.pt",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("model.safetensors", "config.yaml", "meta.json", "model.json")
        ),
    ],
)
def test_any_damaged_file_is_noticed(name: str, run: Run, short: Path) -> None:
    path = short / "checkpoints/step_00000004" / name
    os.truncate(path, path.stat().st_size // 2)
    with (short / "metrics.jsonl").open("a") as file:
        file.write('7\n{"loss": 1}\n')
    resumed = ok(run(*TINY, "steps=4", f"resume={short}", outputs=short.parents[2]))
    assert "step_00000003, step 3 of 4" in resumed.stdout
    assert "step_00000004: incomplete" in resumed.stderr


def test_an_older_checkpoint_begins_a_run_of_its_own(run: Run, short: Path) -> None:
    before, outputs = files(short), short.parents[2]
    older = f"resume={short}/checkpoints/step_00000002"
    ok(run(*TINY, "name=branch", "steps=4", "save_every=1", "keep=-1", older, outputs=outputs))
    assert files(short) == before
    branch = the_run(outputs, "branch")
    assert checkpoints(branch) == ["step_00000003", "step_00000004"]
    assert_same_run(branch, short, after=2)
    assert [step for step, _ in curve(branch, "train/loss")] == [3, 4]


def test_the_newest_checkpoint_by_its_path_goes_on_in_place(run: Run, short: Path) -> None:
    """In a folder that was moved, by a path relative to where the command is typed, with half a line at the end."""
    moved = short.parents[2] / "elsewhere"
    shutil.move(short, moved)
    with (moved / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    newest = "resume=elsewhere/checkpoints/step_00000004"
    ok(run(*TINY, "steps=6", "name=short", newest, cwd=moved.parent, outputs=moved.parent))
    assert [record["step"] for record in records(moved)] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in curve(moved, "train/loss")] == [1, 2, 3, 4, 5, 6]
    assert not list((moved.parent / "runs/short").iterdir())


def test_a_finished_run_goes_on_by_nothing(run: Run, short: Path) -> None:
    before = files(short)
    ok(
        run(
            *TINY, "steps=4", f"resume={short}", "save_every=1", "keep=-1", outputs=short.parents[2]
        )
    )
    after = files(short)
    assert {name for name in before if "checkpoints" in name} <= after.keys()
    for name in before:
        if "checkpoints" in name or name in ("model.safetensors", "metrics.jsonl"):
            assert after[name] == before[name], name
    assert summary(short)["status"] == "ok" and summary(short)["steps"] == 4
    assert [step for step, _ in curve(short, "train/loss")] == [1, 2, 3, 4]


@pytest.mark.slow
def test_fewer_steps_than_there_are_is_refused(run: Run, short: Path) -> None:
    before = files(short)
    line = one_error_line(run(*TINY, "steps=3", f"resume={short}", outputs=short.parents[2]))
    assert "steps=3" in line and "raise steps" in line
    assert files(short) == before


@pytest.mark.slow
def test_a_folder_of_another_run_is_not_written_into(run: Run, short: Path) -> None:
    other = short.with_name("other")
    shutil.copytree(short, other)
    before = files(other)
    line = one_error_line(run(*TINY, "steps=5", f"resume={short}", folder=other))
    assert str(other) in line and "holds another run" in line
    assert files(other) == before


def test_two_processes_do_not_write_one_run(start: Start, run: Run, tmp_path: Path) -> None:
    endless = [*TINY, "steps=1000000", "save_every=5", "name=twice"]
    first = start(*endless, outputs=tmp_path)
    first.wait_for_line("step 20/")
    line = one_error_line(run(*endless, "resume=latest", outputs=tmp_path))
    assert f"process {first.process.pid} is writing" in line
    first.process.send_signal(signal.SIGTERM)
    assert first.finish().returncode == 143
    folder = the_run(tmp_path, "twice")
    steps = [record["step"] for record in records(folder)]
    assert steps == list(range(1, len(steps) + 1))
    assert summary(folder)["status"] == "interrupted"


@pytest.mark.slow
def test_generate_from_a_checkpoint(run: Run, tmp_path: Path, corpus: str) -> None:
    (tmp_path / "corpus.txt").write_text(corpus)
    text = [*TINY_TEXT, "data.path=corpus.txt", "save_every=3", "keep=-1", "name=words"]
    ok(run(*text, cwd=tmp_path, outputs=tmp_path))
    folder = the_run(tmp_path, "words")
    sampling = ["task=generate", "generate.tokens=8", "generate.temperature=0"]
    for source in (folder, folder / "checkpoints/step_00000006"):
        ok(run(*sampling, f"generate.run={source}", folder=tmp_path / source.name))
    found = [summary(tmp_path / name)["sample"] for name in (folder.name, "step_00000006")]
    assert found[0] == found[1]


def test_epochs_are_counted_by_the_data_and_may_become_more(run: Run, tmp_path: Path) -> None:
    """A line is five tokens, a row sixteen: 35 rows, 9 windows of 4, of which the last is shorter."""
    (tmp_path / "corpus.txt").write_text("word\n" * 113)
    text = [*TINY_TEXT, "data.path=corpus.txt", "schedule=linear", "data.val_fraction=0", "accum=2"]
    text += ["save_every=4", "generate.tokens=0"]
    where = {"cwd": tmp_path, "outputs": tmp_path}
    epochs = [*(word for word in text if not word.startswith("steps=")), "name=epochs"]
    first = ok(run(*epochs, "epochs=1.5", "schedule.warmup=14", **where))
    assert "epochs     1.5 x 9 = 14 steps" in first.stdout
    assert "schedule.warmup=14 never ends in steps=14" in first.stderr
    folder = the_run(tmp_path, "epochs")
    assert len(records(folder)) == 14 and summary(folder)["steps"] == 14
    more = ok(run(*epochs, "epochs=2", "resume=latest", **where))
    assert "step_00000014, step 14 of 18" in more.stdout and "epochs" in more.stdout
    ok(run(*text, "steps=18", "name=steps", **where))
    rates = [
        [record["lr"] for record in records(the_run(tmp_path, name), after=14)]
        for name in ("epochs", "steps")
    ]
    assert rates[0] == rates[1] and rates[0][-1] == pytest.approx(1e-4)
    less = one_error_line(run(*epochs, "epochs=1", "resume=latest", **where))
    assert "epochs=1: " in less and "9 steps" in less and "raise epochs" in less


# --- how many stay ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keep", "left"),
    [(1, [12]), (2, [11, 12]), pytest.param(-1, [*range(1, 13)], marks=pytest.mark.slow)],
)
def test_the_last_ones_by_number_stay(keep: int, left: list[int], run: Run, tmp_path: Path) -> None:
    """Not by name: 9 is older than 12. Nor by what an older run left: that is refused."""
    kept = [
        *TINY,
        "steps=12",
        "save_every=1",
        f"keep={keep}",
        "eval_every=0",
        "data.val_fraction=0",
    ]
    ok(run(*kept, "name=kept", outputs=tmp_path))
    folder = the_run(tmp_path, "kept")
    losses = [
        json.loads((folder / "checkpoints" / name / "meta.json").read_text())["val_loss"]
        for name in checkpoints(folder)
    ]
    assert checkpoints(folder) == [f"step_{step:08d}" for step in left]
    assert all(loss is None for loss in losses[:-1])


def test_the_best_one_stays(run: Run, tmp_path: Path) -> None:
    """A learning rate that makes it worse: the first validation was the best."""
    worse = ["debug=tiny", "schedule=constant", "schedule.warmup=0", "optimizer=sgd"]
    worse += ["optimizer.lr=3", "clip=0", "steps=4", "save_every=1", "eval_every=1", "keep=1"]
    ok(run(*worse, "name=best", outputs=tmp_path))
    folder = the_run(tmp_path, "best")
    losses = {record["step"]: record["val_loss"] for record in records(folder)}
    best = min(losses, key=lambda step: losses[step])
    assert best < 4
    assert checkpoints(folder) == [f"step_{best:08d}", "step_00000004"]


DIVERGES = ["debug=tiny", "clip=0", "optimizer=sgd", "optimizer.lr=30", "schedule=constant"]
DIVERGES += ["schedule.warmup=100", "data.val_fraction=0", "keep=1", "save_every=5", "name=lost"]
"""Step 15 is the last finite one, and its weights are what the streak comes from."""


def test_a_streak_of_steps_that_are_not_finite_leaves_a_way_back(run: Run, tmp_path: Path) -> None:
    finished = run(*DIVERGES, "steps=22", outputs=tmp_path)
    folder = the_run(tmp_path, "lost")
    good = folder / "checkpoints/step_00000010"
    error = one_error_line(finished, 4)
    assert "error: not finite: the last 7 of 22 steps;" in error and f"resume={good} " in error
    assert checkpoints(folder) == [f"step_{step:08d}" for step in (10, 15, 22)]
    assert "skipped       7 steps, the last 7 of the run" in finished.stdout
    left, lines = summary(folder), records(folder)
    assert (left["status"], left["skipped_steps"], left["skipped_in_a_row"]) == ("not_finite", 7, 7)
    assert left["final_loss"] == lines[14]["loss"] and left["first_loss"] == lines[0]["loss"]

    resumed = run(
        *DIVERGES, "steps=40", "optimizer.max_skipped=9", "resume=latest", outputs=tmp_path
    )
    (warning,) = (line for line in resumed.stderr.splitlines() if "step_00000022: " in line)
    assert warning.startswith("warning: ") and "last 7 steps before it were not" in warning
    assert f"resume={good} " in warning and f"resume={good} " in one_error_line(resumed, 4)
    assert "step 24: loss or gradient not finite 9 times in a row" in resumed.stderr

    back = run(
        *DIVERGES, "steps=12", "optimizer.lr=0.1", f"resume={good}", folder=tmp_path / "back"
    )
    assert summary(ok(back).folder)["skipped_steps"] == 0


def test_the_text_has_to_be_the_same_wherever_it_lies(run: Run, tmp_path: Path) -> None:
    """Another text of the same length under the same path is refused, the same under another path is not."""
    (tmp_path / "corpus.txt").write_text("".join(f"{i} is {i * i}\n" for i in range(200)))
    text = [*TINY_TEXT, "schedule=constant", "save_every=3", "name=text", "eval_every=0"]
    where = {"cwd": tmp_path, "outputs": tmp_path}
    ok(run(*text, "data.path=corpus.txt", "steps=3", **where))
    (tmp_path / "corpus.txt").rename(tmp_path / "moved.txt")
    (tmp_path / "corpus.txt").write_text("".join(f"{i} is {i * i}\n" for i in reversed(range(200))))
    more = [*text, "steps=6", "resume=latest"]
    line = one_error_line(run(*more, "data.path=corpus.txt", **where))
    assert "the data has changed" in line and "start a new run" in line
    resumed = ok(run(*more, "data.path=moved.txt", **where))
    assert "step 3 of 6" in resumed.stdout and "data.path" in resumed.stdout


@pytest.mark.slow
def test_documents_go_on(run: Run, tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"document {i} " * (1 + i % 7)}) for i in range(80)]
    (tmp_path / "documents.jsonl").write_text("\n".join(lines) + "\n")
    text = [word for word in TINY_TEXT if word != "data=text"]
    text += ["data=jsonl", "data.path=documents.jsonl", "data.document_mask=true", "save_every=2"]
    text += ["schedule=constant", "accum=2", "eval_every=2"]
    where = {"cwd": tmp_path, "outputs": tmp_path}
    ok(run(*text, "name=straight", "steps=8", **where))
    ok(run(*text, "name=stopped", "steps=4", **where))
    ok(run(*text, "name=stopped", "steps=8", "resume=latest", **where))
    assert_same_run(the_run(tmp_path, "stopped"), the_run(tmp_path, "straight"))
