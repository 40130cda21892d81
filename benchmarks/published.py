"""Predicted against peaks that others measured on real cards and published.

    pip install -e '.[hf]'
    python benchmarks/published.py --rows published_peaks.csv
    pip install --target old transformers==4.48.1 && pip install --target old --no-deps peft==0.13.2   # as measured
    python benchmarks/published.py --rows published_peaks.csv --packages old

A row is a transformers causal language model (`hf_config`, relative to the CSV) in one training step: loss inside the
model from full logits, gradient checkpointing, AdamW, clipping; with `lora_rank`, peft adapters under autocast; with
`quantization` nf4, bitsandbytes' 4-bit layers (double quantization), and fp32 norms where the id says baseline. Two
steps on the phantom say what it takes. Other versions of transformers keep other tensors alive: see the note column.
"""

import argparse
import csv
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import nf4_modules
import torch
from measure import print_rows, save_result
from torch import nn

from memtrain.cards import load_card
from memtrain.model.pretrained.wrapped import dtype_argument
from memtrain.phantom import PhantomGPU, Report
from memtrain.planner.speed import estimate_speed
from memtrain.units import MIB, gib

N_STEPS = 2
Row = dict[str, str]
COLUMNS = (
    *(
        "id",
        "gpu",
        "hf_config",
        "quantization",
        "micro_batch",
        "seq_len",
        "param_dtype",
        "autocast",
    ),
    *("gradient_checkpointing", "optimizer", "clip", "peak_allocated_bytes"),
    *("lora_rank", "lora_alpha", "lora_dropout", "lora_targets"),
)
"""What a row needs; what it was measured with, nvidia-smi's figure and the speed may be left out."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, required=True, help="CSV of published measurements")
    parser.add_argument("--packages", help="folder with another transformers and peft")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    arguments = parser.parse_args()
    if arguments.packages:
        sys.path.insert(0, arguments.packages)
    found = [compare(row, arguments.rows.parent) for row in read_rows(arguments.rows)]
    columns = ("row", "predicted GiB", "measured GiB", "error", "in all MiB", "nvidia-smi MiB", "error",
               "tok/s", "measured", "error", "note")  # fmt: skip
    print_rows("peak allocated, device total, speed", columns, [cells(result) for result in found])
    if arguments.save:
        name = f"published_transformers_{installed('transformers')}"
        print(save_result(name, ("torch", "transformers", "peft"), {"rows": found}))


def read_rows(path: Path) -> list[Row]:
    """Ends the script with one line for a file or columns that are not there."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows, names = list(reader), reader.fieldnames or ()
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"--rows {path}: cannot be read: {error}")
    if missing := [name for name in COLUMNS if name not in names]:
        sys.exit(f"--rows {path}: has no column {', '.join(missing)}; add it")
    return rows


def compare(row: Row, folder: Path) -> dict[str, Any]:
    """Predicted beside measured; a row that cannot be built here says why."""
    result: dict[str, Any] = {"id": row["id"], "note": note(row)}
    if row["quantization"] not in ("", "nf4"):
        return result | {"note": f"{row['quantization']} weights: only nf4 is predicted"}
    name = row["optimizer"].partition(" ")[0]
    if name.lower() != "adamw":
        return result | {"note": f"optimizer {name or 'not named'}: only adamw is predicted"}
    card = load_card(row["gpu"].replace("-", "_"))
    report = run(row, folder)
    speed = estimate_speed(report, card, tf32=False)
    tokens = int(row["micro_batch"]) * int(row["seq_len"])
    return result | {
        "predicted_bytes": report.peak_allocated_bytes,
        "measured_bytes": int(row["peak_allocated_bytes"]),
        "predicted_total_mib": (report.peak_reserved_bytes + card.context_bytes) / MIB,
        "measured_total_mib": figure(row, "nvidia_smi_mib"),
        "predicted_tokens_per_s": tokens / speed.step_seconds,
        "measured_tokens_per_s": figure(row, "tokens_per_s"),
    }


def figure(row: Row, column: str) -> float | None:
    """None for what was not measured."""
    text = row.get(column) or ""
    return float(text) if text.strip() else None


def run(row: Row, folder: Path) -> Report:
    model = build(row, folder)
    with PhantomGPU(row["gpu"].replace("-", "_"), enforce_capacity=False) as gpu:
        model = model.to_empty(device=gpu.device)
        if row["quantization"]:
            nf4_modules.quantize_all(model, gpu.device, double=True)
        kind = row["optimizer"].partition(" ")[2] or "foreach"
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, **{kind: True})
        for _ in range(N_STEPS):
            train_step(row, model, optimizer, gpu.device)
            gpu.step_boundary()
    return gpu.report()


def train_step(
    row: Row, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> None:
    shape = (int(row["micro_batch"]), int(row["seq_len"]))
    tokens = torch.zeros(shape, dtype=torch.int64, device=device)
    dtype = getattr(torch, row["autocast"]) if row["autocast"] else None
    with torch.autocast(device.type, dtype=dtype) if dtype else nullcontext():
        outputs = model(input_ids=tokens, labels=tokens)
    outputs.loss.backward()  # the logits live until here
    del outputs
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    nn.utils.clip_grad_norm_(trained, float(row["clip"]))
    optimizer.step()
    optimizer.zero_grad()


def build(row: Row, folder: Path) -> nn.Module:
    """The model of a row on meta: adapters attached, checkpointing on, as it was measured."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        sys.exit(f"transformers cannot be imported ({error}): pip install -e '.[hf]'")
    config = AutoConfig.from_pretrained(folder / row["hf_config"])
    config.use_cache = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            attn_implementation="sdpa",
            **dtype_argument(getattr(torch, row["param_dtype"])),
        )
        if row["quantization"]:
            nf4_modules.pack_linears(model)
            model.is_loaded_in_4bit = True
        if row["gradient_checkpointing"]:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if row["lora_rank"]:
            model = with_adapters(row, model)
        if row["quantization"] and "baseline" in row["id"]:
            # peft's prepare_model_for_kbit_training, then trl's casts: norms are fp32, the rest of the base is bf16
            for name, module in model.named_modules():
                if "norm" in name:
                    module.to(torch.float32)
    return model.train()


def with_adapters(row: Row, model: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model.enable_input_require_grads()
    settings = LoraConfig(
        r=int(row["lora_rank"]),
        lora_alpha=int(row["lora_alpha"]),
        lora_dropout=float(row["lora_dropout"]),
        target_modules=row["lora_targets"].split(),
        task_type="CAUSAL_LM",
    )
    adapted: nn.Module = get_peft_model(model, settings)
    return adapted


def note(row: Row) -> str:
    """Where what is installed is not what was measured."""
    measured = dict(
        part.strip().rsplit(" ", 1)
        for part in (row.get("software") or "").split(",")
        if " " in part.strip()
    )
    names = ("transformers", "peft") if row["lora_rank"] else ("transformers",)
    return "; ".join(
        f"{name} {installed(name)}, measured with {measured[name]}"
        for name in names
        if measured.get(name) not in (None, installed(name))
    )


def installed(name: str) -> str:
    """The version that is imported, wherever it lies."""
    try:
        return str(getattr(__import__(name), "__version__", version(name)))
    except (ImportError, PackageNotFoundError):
        return "none"


def cells(result: dict[str, Any]) -> list[str]:
    if "predicted_bytes" not in result:
        return [result["id"], *["-"] * 9, result["note"]]
    return [result["id"], *numbers(result), result["note"]]


def numbers(result: dict[str, Any]) -> Iterator[str]:
    for predicted, measured, show in (
        ("predicted_bytes", "measured_bytes", lambda size: f"{gib(size):.3f}"),
        ("predicted_total_mib", "measured_total_mib", "{:.0f}".format),
        ("predicted_tokens_per_s", "measured_tokens_per_s", "{:.0f}".format),
    ):
        yield show(result[predicted])
        known = result[measured]
        yield show(known) if known else "-"
        yield f"{result[predicted] / known - 1:+.2%}" if known else "-"


if __name__ == "__main__":
    main()
