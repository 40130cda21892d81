from rich.console import Console

from memtrain.report import tables
from memtrain.units import GIB, MIB

BASE = {
    "status": "ok",
    "error": None,
    "task": "train",
    "steps": 10,
    "overrides": ["steps=10", "experiment=baseline"],
    "final_loss": 4.0,
    "val_loss": 4.25,
    "tokens_per_second": 8000.0,
    "peak_allocated_bytes": 4 * GIB,
    "predicted_peak_allocated_bytes": 3 * GIB,
    "host_peak_rss_bytes": GIB,
    "job": 0,
}
BF16 = {
    **BASE,
    "overrides": ["steps=10", "experiment=bf16"],
    "tokens_per_second": 12000.0,
    "peak_allocated_bytes": 3 * GIB,
    "job": 1,
}
FAILED = {
    "status": "failed",
    "error": "heads|width: 3 does not divide 32\nsecond line",
    "overrides": ["steps=10", "experiment=odd"],
    "job": 2,
    "task": "train",
}


def text_of(table) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_markdown():
    rows = tables.sweep_rows([BASE, BF16, FAILED])
    assert tables.sweep_markdown(rows).splitlines() == [
        "| strategy | status | peak memory (device) | predicted (device) | relative peak "
        "| tokens/s | relative speed | final loss | val loss | error |",
        "| :--- | :--- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | :--- |",
        "| baseline | ok | 4.00 GiB | 3.00 GiB | 1.00x | 8.0k | 1.00x | 4.0000 | 4.2500 |  |",
        "| bf16 | ok | 3.00 GiB | 3.00 GiB | 0.75x | 12.0k | 1.50x | 4.0000 | 4.2500 |  |",
        "| odd | failed |  |  |  |  |  |  |  | heads\\|width: 3 does not divide 32 |",
    ]


def test_csv_is_unrounded():
    rows = tables.sweep_rows([BASE, BF16, FAILED])
    assert tables.sweep_csv(rows).splitlines() == [
        "strategy,status,peak_device_bytes,predicted_bytes,relative_peak,tokens_per_second,"
        "relative_speed,final_loss,val_loss,error",
        f"baseline,ok,{4 * GIB},{3 * GIB},1.0,8000.0,1.0,4.0,4.25,",
        f"bf16,ok,{3 * GIB},{3 * GIB},0.75,12000.0,1.5,4.0,4.25,",
        "odd,failed,,,,,,,,heads|width: 3 does not divide 32",
    ]


def test_files(tmp_path):
    rows = tables.sweep_rows([BASE, BF16])
    tables.write_sweep(rows, tmp_path)
    assert (tmp_path / "sweep.md").read_text(encoding="utf-8") == tables.sweep_markdown(rows)
    assert (tmp_path / "sweep.csv").read_text(encoding="utf-8") == tables.sweep_csv(rows)


def test_console_shows_text_as_it_is():
    failed = {**FAILED, "overrides": ["steps=10", "data.files=[a]"]}
    text = text_of(tables.sweep_table(tables.sweep_rows([BASE, failed])))
    assert "peak memory (device)" in text
    assert "data.files=[a]" in text
    assert "3 does not divide 32" in text
    assert "second line" not in text


def test_a_cpu_sweep_shows_host_memory_and_no_empty_column():
    cpu = [
        {
            **summary,
            "peak_allocated_bytes": None,
            "predicted_peak_allocated_bytes": None,
            "val_loss": None,
        }
        for summary in (BASE, BF16)
    ]
    rows = tables.sweep_rows(cpu)
    assert tables.sweep_markdown(rows).splitlines()[0] == (
        "| strategy | status | peak memory (host RSS) | relative peak | tokens/s "
        "| relative speed | final loss |"
    )
    assert tables.sweep_csv(rows).startswith("strategy,status,peak_host_rss_bytes,")


def test_host_and_device_memory_never_share_a_column():
    on_cpu = {**BF16, "peak_allocated_bytes": None}
    rows = tables.sweep_rows([BASE, on_cpu])
    assert [row["peak_bytes"] for row in rows] == [4 * GIB, None]


def test_relative_to_the_first_job_that_is_ok():
    rows = tables.sweep_rows([FAILED, BF16, BASE])
    assert [row["relative_peak"] for row in rows] == [None, 1.0, 4 / 3]


def test_strategies_are_the_overrides_that_vary():
    overrides = [["a=1", "lr=1", "b=1"], ["a=1", "lr=2", "b=1"], ["a=1", "lr=2", "b=2"]]
    rows = tables.sweep_rows([{"status": "ok", "overrides": items} for items in overrides])
    assert [row["strategy"] for row in rows] == ["lr=1 b=1", "lr=2 b=1", "lr=2 b=2"]


def test_a_single_job_is_named_by_all_its_overrides():
    (row,) = tables.sweep_rows([BASE])
    assert row["strategy"] == "steps=10 experiment=baseline"
    (row,) = tables.sweep_rows([{"status": "ok", "overrides": []}])
    assert row["strategy"] == "base"


def test_a_planned_peak_is_labelled_as_predicted():
    plans = [
        {
            "task": "plan",
            "status": "ok",
            "overrides": [f"gpu={gpu}"],
            "gpu": gpu,
            "fits": fits,
            "peak_allocated_bytes": 30 * GIB,
            "device_total_bytes": total_gib * GIB,
            "step_seconds": 1.25,
        }
        for gpu, fits, total_gib in (("rtx4090", False, 24), ("a100", True, 80))
    ]
    assert tables.sweep_markdown(tables.sweep_rows(plans)).splitlines() == [
        "| strategy | status | GPU | fits | peak memory (predicted) | relative peak | device total "
        "| step |",
        "| :--- | :--- | :--- | :--- | ---: | ---: | ---: | ---: |",
        "| gpu=rtx4090 | ok | rtx4090 | no | 30.00 GiB | 1.00x | 24.00 GiB | 1.2 s |",
        "| gpu=a100 | ok | a100 | yes | 30.00 GiB | 1.00x | 80.00 GiB | 1.2 s |",
    ]
    mixed = tables.sweep_rows([BASE, plans[0]])
    assert (mixed[1]["peak_bytes"], mixed[1]["predicted_bytes"]) == (None, 30 * GIB)


def test_no_jobs():
    assert tables.sweep_rows([]) == []
    assert tables.sweep_csv([]) == "\n"
    text_of(tables.sweep_table([]))


def test_category_table():
    phases = {
        "forward": {"weights": GIB, "activations": 512 * MIB, "other": 0},
        "backward": {"weights": GIB, "gradients": GIB},
    }
    text = text_of(tables.category_table(phases, "Peak"))
    cells = [line.replace("│", " ").split() for line in text.splitlines() if "│" in line]
    assert cells == [
        ["weights", "1.00", "GiB", "1.00", "GiB"],
        ["activations", "512.00", "MiB", "-"],
        ["gradients", "-", "1.00", "GiB"],
        ["total", "1.50", "GiB", "2.00", "GiB"],
    ]
