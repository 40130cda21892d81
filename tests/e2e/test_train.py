"""What a run shows and leaves behind, and how it ends."""

import json
from pathlib import Path

import pytest
import yaml
from command import TINY_TEXT, Finished, Run
from safetensors.numpy import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SUMMARY_KEYS = {
    "status",
    "final_loss",
    "val_loss",
    "steps",
    "skipped_steps",
    "tokens_per_second",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "host_peak_rss_bytes",
    "parameters",
    "device",
    "overrides",
}
STEPS = [1, 2, 3, 4, 5, 6]


def read_summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def read_metrics(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def read_events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder)).Reload()


@pytest.fixture(scope="module")
def typed_in(tmp_path_factory: pytest.TempPathFactory, corpus: str) -> Path:
    """A folder with `corpus.txt` in it."""
    folder = tmp_path_factory.mktemp("typed_in")
    (folder / "corpus.txt").write_text(corpus, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def text_run(run: Run, typed_in: Path) -> Finished:
    """Six steps on the generated text, named by a path relative to the current folder."""
    return run(*TINY_TEXT, "data.path=corpus.txt", "name=words", cwd=typed_in)


def test_a_run_ends_well_and_says_one_line_a_step(text_run: Finished) -> None:
    assert text_run.returncode == 0, text_run.stderr
    assert text_run.stderr == ""
    shown = [line for line in text_run.stdout.splitlines() if line.startswith("step ")]
    progress = [line for line in shown if "loss" in line]
    assert [line.split(" · ")[0] for line in progress] == [f"step {step}/6" for step in STEPS]
    assert "no device memory to measure" in text_run.stdout
    assert str(text_run.folder) in text_run.stdout
    assert "\x1b" not in text_run.stdout and "\r" not in text_run.stdout


def test_the_summary_holds_what_was_measured(text_run: Finished) -> None:
    summary = read_summary(text_run.folder)
    assert summary.keys() >= SUMMARY_KEYS
    assert (summary["status"], summary["steps"], summary["skipped_steps"]) == ("ok", 6, 0)
    assert 4 < summary["final_loss"] < 6.5 and 4 < summary["val_loss"] < 6.5
    assert summary["tokens_per_second"] > 0
    assert summary["host_peak_rss_bytes"] > 2**26
    assert summary["device"].startswith("cpu")
    assert "name=words" in summary["overrides"]
    embedding, blocks = (257 + 64) * 32, 2 * (12 * 32 * 32 + 13 * 32)
    assert summary["parameters"] == embedding + blocks + 2 * 32


def test_what_the_cpu_cannot_measure_is_null(text_run: Finished) -> None:
    summary = read_summary(text_run.folder)
    assert summary["peak_allocated_bytes"] is None
    assert summary["peak_reserved_bytes"] is None


def test_metrics_hold_one_record_a_step(text_run: Finished) -> None:
    records = read_metrics(text_run.folder)
    assert [record["step"] for record in records] == STEPS
    assert [record["tokens"] for record in records] == [32 * step for step in STEPS]
    assert [record["step"] for record in records if "val_loss" in record] == [3, 6]
    assert records[-1]["loss"] == read_summary(text_run.folder)["final_loss"]


def test_the_config_kept_is_resolved_and_the_log_is_there(text_run: Finished) -> None:
    config = yaml.safe_load((text_run.folder / "config.yaml").read_text(encoding="utf-8"))
    assert config["data"]["path"] == "corpus.txt"
    assert config["tokenizer"]["kind"] == "bytes"
    assert "${" not in json.dumps(config)
    log = (text_run.folder / "train.log").read_text(encoding="utf-8")
    for said in ("switches   precision=fp32", "step 6/6 · loss", "peak memory"):
        assert said in log


def test_tensorboard_reads_each_step_once(text_run: Finished) -> None:
    events = read_events(text_run.folder)
    tags = set(events.Tags()["scalars"])
    for tag in ("train/loss", "train/lr", "train/grad_norm", "speed/tokens_per_second"):
        assert [point.step for point in events.Scalars(tag)] == STEPS, tag
    assert [point.step for point in events.Scalars("val/loss")] == [3, 6]
    assert {tag for tag in tags if tag.startswith("memory/")} == {
        "memory/host_rss_gib",
        "memory/host_peak_rss_gib",
    }
    assert not {tag for tag in tags if "allocated" in tag or "reserved" in tag}
    assert {"_hparams_/experiment", "_hparams_/session_start_info"} <= set(
        events.PluginTagToContent("hparams")
    )


def test_the_weights_load(text_run: Finished) -> None:
    weights = load_file(text_run.folder / "model.safetensors")
    summary = read_summary(text_run.folder)
    assert sum(weight.size for weight in weights.values()) == summary["parameters"]
    assert not [name for name in weights if name.startswith(("module.", "_orig_mod."))]


def test_generate_finds_the_newest_run_of_its_name(run: Run, tmp_path: Path, corpus: str) -> None:
    """Wherever it writes itself."""
    (tmp_path / "corpus.txt").write_text(corpus, encoding="utf-8")
    text = [*TINY_TEXT, f"data.path={tmp_path}/corpus.txt", "name=mine", "steps=1"]
    assert run(*text, outputs=tmp_path).returncode == 0
    sampling = ["task=generate", "name=mine", "generate.tokens=4"]
    swept = run("-m", *sampling, "generate.temperature=0.1,1e-300", outputs=tmp_path)
    assert swept.returncode == 0, swept.stderr
    elsewhere = run(*sampling, f"hydra.run.dir={tmp_path}/elsewhere", outputs=tmp_path)
    assert elsewhere.returncode == 0, elsewhere.stderr
    other = run("task=generate", "name=other", outputs=tmp_path)
    assert other.returncode == 2
    assert "no finished run in" in other.stderr


def test_defaults_of_ones_own(run: Run, tmp_path: Path) -> None:
    """conf/local/default.yaml, here beside conf/."""
    (tmp_path / "local").mkdir()
    (tmp_path / "local/default.yaml").write_text(
        "steps: 2\noptimizer:\n  lr: 0.5\n", encoding="utf-8"
    )
    finished = run("--config-dir", str(tmp_path), "debug=tiny", "device=cpu")
    assert finished.returncode == 0, finished.stderr
    assert read_summary(finished.folder)["steps"] == 2


def test_generate_continues_with_that_run(text_run: Finished, run: Run) -> None:
    """From a relative path, and with the text that the run itself showed at its end."""
    sampling = ["generate.tokens=8", f"generate.run={text_run.folder.name}"]
    generated = run("task=generate", *sampling, cwd=text_run.folder.parent)
    assert generated.returncode == 0, generated.stderr
    summary = read_summary(generated.folder)
    assert summary["sample"] == read_summary(text_run.folder)["sample"]
    assert summary["sample"].startswith("def ")
    assert "def " in generated.stdout


def test_numerics_leaves_a_picture(run: Run) -> None:
    finished = run("task=numerics", "debug=tiny", "numerics.steps=2")
    assert finished.returncode == 0, finished.stderr
    assert (finished.folder / "numerics.png").read_bytes().startswith(b"\x89PNG")
    assert read_events(finished.folder).Tags()["images"] == ["numerics/gradients"]
    assert read_summary(finished.folder)["status"] == "ok"


@pytest.mark.parametrize(
    "overrides",
    [["hydra.job.chdir=true"], pytest.param(["-m"], marks=pytest.mark.slow)],
    ids=["chdir", "multirun"],
)
def test_a_path_is_relative_to_where_the_command_was_typed(
    overrides: list[str], run: Run, text_run: Finished, typed_in: Path
) -> None:
    finished = run(*overrides, *TINY_TEXT, "data.path=./corpus.txt", cwd=typed_in)
    assert finished.returncode == 0, finished.stderr
    assert list(typed_in.iterdir()) == [typed_in / "corpus.txt"]
    folder = finished.folder / "0" if overrides == ["-m"] else finished.folder
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1
    assert (folder / "model.safetensors").is_file()
    assert read_summary(folder)["final_loss"] == read_summary(text_run.folder)["final_loss"]
