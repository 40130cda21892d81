import os
import pty
import subprocess
import sys

import pytest

from memtrain.report import console
from memtrain.units import GIB, MIB

RECORD = {
    "step": 20,
    "loss": 5.1234,
    "lr": 3e-4,
    "grad_norm": 1.234,
    "tokens_per_second": 8123.0,
    "host_rss_bytes": int(0.61 * GIB),
}


def test_plain_progress_prints_one_line_per_logged_step(capsys):
    with console.Progress(200, plain=True) as progress:
        progress.update(RECORD)
        progress.update({**RECORD, "step": 40, "loss": 4.0})
    first = "step 20/200 · loss 5.123 · 8.1k tok/s · lr 3.0e-04 · norm 1.23 · host 0.61 GiB\n"
    assert capsys.readouterr().out == first + first.replace("20/", "40/").replace("5.123", "4.000")


def test_device_memory_skips_and_nan_are_shown(capsys):
    extra = {"loss": float("nan"), "peak_allocated_bytes": 2 * GIB, "skipped_steps": 3}
    with console.Progress(200, plain=True) as progress:
        progress.update({**RECORD, **extra})
    line = (
        "step 20/200 · loss nan · 8.1k tok/s · lr 3.0e-04 · norm 1.23"
        " · peak 2.00 GiB · host 0.61 GiB · skipped 3\n"
    )
    assert capsys.readouterr().out == line


@pytest.mark.parametrize("absent", [None, 0])
def test_memory_that_was_not_measured_is_not_shown(absent):
    record = {"loss": 0.0, "lr": 0.0, "peak_allocated_bytes": absent, "skipped_steps": 0}
    assert console.format_record(record) == "loss 0.000 · lr 0.0e+00"


def test_progress_is_plain_when_stdout_is_no_terminal(capsys):
    assert console.Progress(10).plain


def run_on_terminal(code: str) -> str:
    """What `code` writes to a terminal."""
    terminal, end = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    subprocess.run([sys.executable, "-c", code], stdout=end, stderr=end, env=env, check=True)
    os.close(end)
    text = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # Linux: the other end is closed
            break
        if not piece:
            break
        text += piece
    os.close(terminal)
    return text.decode()


def test_live_progress_on_a_terminal():
    code = f"""
from memtrain.report import console
with console.Progress(200, first_step=10) as progress:
    assert not progress.plain
    progress.update({RECORD!r})
    console.print_warning("an [odd] one")
with console.task_progress("tokenize [x]", 100) as callback:
    callback(50, 100)
"""
    text = run_on_terminal(code)
    assert "20/200" in text
    assert "loss 5.123 · 8.1k tok/s · host 0.61 GiB" in text
    assert "warning: an [odd] one" in text
    assert "tokenize [x]" in text


def test_plain_task_progress_prints_start_and_end(capsys):
    with console.task_progress("tokenize", 3 * MIB) as callback:
        callback(MIB, 3 * MIB)
        callback(3 * MIB, 3 * MIB)
    start, end = capsys.readouterr().out.splitlines()
    assert start == "tokenize: 3.00 MiB"
    assert end.startswith("tokenize: done in ")


def test_header_is_printed_as_it_is_and_never_folded(capsys):
    lines = ["model  [bold]x[/bold]", "path " + "long/" * 60]
    console.print_header(lines)
    assert capsys.readouterr().out.splitlines() == lines


def test_errors_and_warnings_are_one_line_on_stderr(capsys):
    console.print_error("seq_len: 17\nis too long")
    console.print_warning("no [effect]")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: seq_len: 17 is too long\nwarning: no [effect]\n"


def test_summary_of_a_gpu_run(capsys):
    console.print_summary(
        {
            "peak_allocated_bytes": 12 * GIB,
            "peak_reserved_bytes": 13 * GIB,
            "predicted_peak_allocated_bytes": int(11.88 * GIB),
            "host_peak_rss_bytes": GIB,
            "first_loss": 9.02,
            "final_loss": 4.5,
            "vocab_size": 8192,
            "unigram_entropy": 6.9,
            "val_loss": 4.6,
            "tokens_per_second": 8123.0,
            "mfu": 0.341,
            "skipped_steps": 2,
            "run_dir": "outputs/runs/x",
            "sample": "a\n\x1b[31mb",
        }
    )
    assert capsys.readouterr().out.splitlines() == [
        "",
        "peak memory   12.00 GiB allocated · 13.00 GiB reserved",
        "predicted     11.88 GiB allocated (-1.0% against measured)",
        "host memory   1.00 GiB peak RSS",
        "loss          9.020 -> 4.500 (ln(8192) = 9.011 · unigram entropy 6.900)",
        "validation    loss 4.600 · perplexity 99.48",
        "speed         8.1k tok/s · MFU 34.1%",
        "skipped       2 steps",
        "run folder    outputs/runs/x",
        "sample        a",
        "              \N{REPLACEMENT CHARACTER}[31mb",
    ]


def test_summary_of_a_cpu_run_shows_no_device_memory(capsys):
    console.print_summary(
        {"peak_allocated_bytes": None, "host_peak_rss_bytes": GIB, "val_loss": 900.0}
    )
    assert capsys.readouterr().out.splitlines() == [
        "",
        "peak memory   1.00 GiB host RSS (no device memory to measure)",
        "validation    loss 900.000 · perplexity inf",
    ]


def test_characters_the_stream_cannot_encode_do_not_stop_a_run():
    code = "from memtrain.report import console; console.say('\\u4e2d \\u00b7')"
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True)
    assert run.stdout == b"? ?\n"
