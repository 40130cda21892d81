"""Planning through the real command line: alone, in a sweep, and beside a training run."""

import csv
import json

import pytest
from command import TINY_TEXT, Run

PLAN_KEYS = {
    "gpu", "fits", "peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes", "device_total_bytes",
    "peak_phase", "categories", "phases", "host_bytes", "host_pinned_bytes", "h2d_bytes_per_step",
    "d2h_bytes_per_step", "nvme_read_bytes_per_step", "nvme_written_bytes_per_step", "flops_per_step",
    "step_seconds", "tokens_per_second", "parameters", "plan_seconds",
}  # fmt: skip


def test_a_plan_of_a_large_model(run: Run) -> None:
    done = run(
        "task=plan",
        "model=llama2_7b",
        "gpu=rtx4090",
        "precision=bf16_true",
        "micro_batch=1",
        "seq_len=512",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("DOES NOT FIT RTX 4090: ")
    plan = json.loads((done.folder / "plan.json").read_text())
    assert plan.keys() >= PLAN_KEYS
    assert plan["parameters"] == 6738415616
    assert not plan["fits"]
    # bf16 weights and gradients, fp32 master weights and two moments.
    assert plan["peak_allocated_bytes"] == pytest.approx(16 * plan["parameters"], rel=0.05)
    assert sum(plan["categories"].values()) == plan["peak_allocated_bytes"]
    assert plan["device_total_bytes"] >= plan["peak_reserved_bytes"] >= plan["peak_active_bytes"]
    assert (done.folder / "timeline.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_sweep_of_plans_is_a_table(run: Run) -> None:
    done = run("-m", "task=plan", "debug=tiny", "precision=fp32,bf16_true", "gpu=t4")
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((done.folder / "sweep.csv").open(encoding="utf-8")))
    assert [row["strategy"] for row in rows] == ["precision=fp32", "precision=bf16_true"]
    assert {row["gpu"] for row in rows} == {"T4"}
    assert {row["fits"] for row in rows} == {"True"}
    assert "predicted" in done.stdout


def test_a_run_plans_itself(run: Run, tmp_path, corpus: str) -> None:
    text = tmp_path / "corpus.txt"
    text.write_text(corpus, encoding="utf-8")
    done = run(*TINY_TEXT, f"data.path={text}", "plan=on")
    assert done.returncode == 0, done.stderr
    assert done.stdout.index("fits A100 80GB: ") < done.stdout.index("step 1/6")
    summary = json.loads((done.folder / "summary.json").read_text())
    plan = json.loads((done.folder / "plan.json").read_text())
    assert summary["predicted_peak_allocated_bytes"] == plan["peak_allocated_bytes"] > 0
    assert "prediction_error_pct" not in summary  # nothing was measured here
    assert plan["parameters"] == summary["parameters"]


def test_a_run_that_will_not_fit_is_warned_and_goes_on(run: Run) -> None:
    done = run(
        *("debug=tiny", "steps=2", "plan=on", "precision=bf16"),
        *("gpu=t4", "gpu.memory_mib=101", "gpu.context_mib=100"),
    )
    assert done.returncode == 0, done.stderr
    assert "DOES NOT FIT T4" in done.stdout
    assert done.stderr.count("warning: precision=bf16: the T4 has no bf16") == 1
    assert "warning: this run is predicted to end out of memory" in done.stderr


def test_a_plan_says_what_the_card_lacks(run: Run) -> None:
    done = run("task=plan", "debug=tiny", "gpu=v100_16gb", "precision.tf32=true")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "warning: precision.tf32=true has no effect: the V100 16GB has no TF32\n"


def test_hf_needs_its_config_and_only_plans(run: Run) -> None:
    done = run("model=hf", "task=plan")
    assert done.returncode == 2
    assert "model.path: model=hf needs it" in done.stderr
    assert "Traceback" not in done.stderr
