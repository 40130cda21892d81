"""Predictions for transformers' models against peaks that others measured on an A100 and published."""

import csv
import importlib

import pytest
from command import ROOT

pytest.importorskip("transformers", reason="needs pip install -e '.[hf]'")
pytest.importorskip("peft", reason="needs pip install -e '.[hf]'")
TRUTH = ROOT.parent / "shared" / "truth"
ROWS = ["mistral-7b_full_plain_b4_g1", "mistral-7b_lora_plain_b4_g1"]


@pytest.mark.slow
@pytest.mark.skipif(not TRUTH.exists(), reason=f"no published figures in {TRUTH}")
@pytest.mark.parametrize("name", ROWS)
def test_prediction_is_close(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    published = importlib.import_module("published")
    with (TRUTH / "published_peaks.csv").open(encoding="utf-8", newline="") as file:
        (row,) = (row for row in csv.DictReader(file) if row["id"] == name)
    found = published.compare(row, TRUTH)
    assert found["predicted_bytes"] == pytest.approx(found["measured_bytes"], rel=0.01)
    assert found["predicted_total_mib"] == pytest.approx(found["measured_total_mib"], rel=0.06)
    speeds = found["predicted_tokens_per_s"], found["measured_tokens_per_s"]
    assert speeds[0] == pytest.approx(speeds[1], rel=0.25)
