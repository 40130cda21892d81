import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from hydra import compose, initialize_config_dir

from memtrain.cards import CARDS_DIR, Card, card_names, load_card, match_card, missing_type

NAMES = card_names()
KEYS = list(Card.__dataclass_fields__)
# Compute capability of the first architecture with the type.
FIRST_WITH = {"tf32": 8.0, "bf16": 8.0, "fp8": 8.9}


def test_all_cards_are_found() -> None:
    assert len(list(CARDS_DIR.iterdir())) == 18
    assert len(NAMES) == 17  # `auto` is none
    assert len({load_card(name).name for name in NAMES}) == 17


def test_an_unknown_card_is_refused_with_the_choices() -> None:
    for name in ("auto", "rtx9999", "../gpu/t4"):
        with pytest.raises(ValueError, match=r"unknown GPU .* choose one of a100_40gb, "):
            load_card(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_names_its_source_and_has_the_keys_in_order(name: str) -> None:
    text = (CARDS_DIR / f"{name}.yaml").read_text(encoding="utf-8")
    assert list(yaml.safe_load(text)) == KEYS
    assert text.startswith("# NVIDIA ")
    assert "Source: NVIDIA" in text.splitlines()[0]


@pytest.mark.parametrize("name", NAMES)
def test_memory_and_speed_are_of_the_right_order(name: str) -> None:
    card = load_card(name)
    assert 12_000 <= card.memory_mib <= 200_000
    assert 250 <= card.bandwidth_gb_s <= 8_000
    assert 16 <= card.link_gb_s <= 64
    # Of two to twelve channels, DDR4-2666 (21.3 GB/s) to DDR5-6400 (51.2): half.
    assert 2 * 21.3 / 2 <= card.host_bandwidth_gb_s <= 12 * 51.2 / 2
    assert 7.0 <= card.compute_capability <= 12.0
    assert 300 <= card.context_mib <= 900
    assert 0.6 <= card.efficiency <= 0.7
    assert card.workspace_mib == (32 if card.compute_capability >= 9.0 else 8.125)


@pytest.mark.parametrize("name", NAMES)
def test_peaks_rise_with_shorter_types_and_are_zero_where_there_is_no_hardware(name: str) -> None:
    card = load_card(name)
    assert 8 <= card.fp32_tflops <= 105
    assert 2 * card.fp32_tflops * 0.99 <= card.fp16_tflops <= 2_300
    for precision, first in FIRST_WITH.items():
        assert (card.peak_tflops(precision) > 0) == (card.compute_capability >= first)
    if card.bf16_tflops:
        assert card.bf16_tflops == card.fp16_tflops
        # Half of the 16-bit rate, and fp8 twice of it, up to the data sheets' rounding.
        assert card.tf32_tflops == pytest.approx(card.fp16_tflops / 2, rel=0.03)
    if card.fp8_tflops:
        assert card.fp8_tflops == pytest.approx(2 * card.fp16_tflops, rel=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_card_lacks_is_said_in_one_line(name: str) -> None:
    card = load_card(name)
    old = card.compute_capability < 8.0
    for precision in ("bf16", "bf16_true"):
        line = missing_type(card, precision, tf32=True) or ""
        assert line.startswith(
            f"precision={precision}: the {card.name} has no bf16;" if old else ""
        )
        assert ("precision=fp16" in line, "\n" in line) == (old, False)
    assert (missing_type(card, "fp32", tf32=True) is not None) == old
    assert missing_type(card, "fp32", tf32=False) is missing_type(card, "fp16", tf32=True) is None
    bare = replace(card, fp16_tflops=0.0)
    assert "precision=fp32 is" in (missing_type(bare, "fp16", tf32=False) or "")


def test_a_card_in_bytes() -> None:
    card = load_card("t4")
    assert card.memory_bytes == 14930 * 2**20
    assert card.workspace_bytes == 8_519_680


@pytest.mark.parametrize(
    ("device", "memory_gib"),
    [
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9.5),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 39.5),
        ("NVIDIA H100 PCIe", 79.1),
        ("NVIDIA A100 80GB PCIe", 79.2),
        ("Tesla V100-PCIE-16GB", 15.8),
    ],
)
def test_slices_and_slower_sisters_have_no_data_sheet(device: str, memory_gib: float) -> None:
    assert match_card(device, int(memory_gib * 2**30)) is None


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CARDS_DIR.parents[1] / "benchmarks"))
    return importlib.import_module("published")


def test_published_rows_are_refused_in_one_line(published: ModuleType, tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    with pytest.raises(SystemExit, match=r"rows\.csv: cannot be read"):
        published.read_rows(rows)
    rows.write_text(",".join(set(published.COLUMNS) - {"clip"}) + "\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"rows\.csv: has no column clip; add it"):
        published.read_rows(rows)


def test_a_published_row_may_lack_what_was_not_measured(published: ModuleType) -> None:
    row = dict.fromkeys(published.COLUMNS, "") | {"id": "one", "optimizer": "sgd"}
    assert published.note(row) == ""
    assert "optimizer sgd" in published.compare(row, Path())["note"]
    assert published.figure({"tokens_per_s": ""}, "tokens_per_s") is None
    result = {"id": "one", "note": ""}
    for name in ("bytes", "total_mib", "tokens_per_s"):
        result |= {f"predicted_{name}": 2**30, f"measured_{name}": None}
    assert published.cells(result)[2:4] == ["-", "-"]


def test_gpu_check_needs_a_configuration(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.syspath_prepend(str(CARDS_DIR.parents[1] / "benchmarks"))
    monkeypatch.setattr("sys.argv", ["gpu_check.py", "--phantom", "--most", "0"])
    with pytest.raises(SystemExit):
        importlib.import_module("gpu_check").main()
    assert "--most 0: must be at least 1" in capsys.readouterr().err


def test_auto_is_the_a100_with_a_mark() -> None:
    with initialize_config_dir(str(Path(CARDS_DIR).parent), version_base="1.3"):
        gpu = dict(compose(overrides=["+gpu=auto"]).gpu)
    assert gpu.pop("auto") is True
    assert Card(**gpu) == load_card("a100_80gb")
