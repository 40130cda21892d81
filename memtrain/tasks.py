"""What `task=` selects. The only module that sees everything: config, engine, report."""

import logging
import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from memtrain import config as config_module
from memtrain.cards import Card, match_card
from memtrain.config import Config
from memtrain.data.store import unigram_entropy
from memtrain.data.tokenizer import Tokenizer, load_tokenizer
from memtrain.device import describe_device, host_memory_bytes, select_device
from memtrain.engine import build
from memtrain.engine.checkpoint import WEIGHTS, load_weights, save_weights
from memtrain.engine.generate import generate as generate_tokens
from memtrain.engine.loop import mean_loss
from memtrain.engine.loop import train as train_loop
from memtrain.engine.step import TrainStep
from memtrain.errors import (
    EXIT_FAILED,
    EXIT_NOT_FINITE,
    EXIT_OUT_OF_MEMORY,
    EXIT_REFUSED,
    NotFiniteError,
    UserError,
)
from memtrain.model.transformer import Transformer, count_parameters, step_flops
from memtrain.report import console, formats, plots
from memtrain.report.board import Board
from memtrain.report.recorder import Recorder, write_json
from memtrain.units import format_count

log = logging.getLogger("memtrain")


@dataclass(frozen=True)
class Place:
    """Where a run writes, and the folder that the user's relative paths start from."""

    folder: Path
    base: Path


def run(tree: dict[str, Any], place: Place, overrides: list[str]) -> float | None:
    """Run the task that the composed config names and leave summary.json, however it ends.

    Returns the sweep's metric. Ends the process with the exit code of `memtrain.errors` if the task fails.
    """
    place.folder.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {"status": "ok", "error": None, "task": tree.get("task")}
    summary |= {"overrides": overrides, "run_dir": str(place.folder)}
    try:
        config = config_module.parse(tree)
        for warning in config_module.no_effect_warnings(config):
            console.print_warning(warning)
            log.warning(warning)
        summary |= TASKS[config.task](config, place)
        summary["metric"] = summary.get(config.sweep.metric)
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        status, code = outcome(error)
        summary |= {"status": status, "error": " ".join(str(error).split()) or status}
        log.exception("%s", status)
        if code is None:
            raise
        console.print_error(summary["error"])
        if code == EXIT_FAILED:
            traceback.print_exc()
        sys.exit(code)
    finally:
        write_json(place.folder / "summary.json", summary)
    metric: float | None = summary["metric"]
    return metric


def outcome(error: BaseException) -> tuple[str, int | None]:
    """Status and exit code of an error; no code: it ends the process by itself."""
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return "interrupted", None
    if isinstance(error, UserError):
        return "refused", EXIT_REFUSED
    if isinstance(error, torch.OutOfMemoryError):
        return "out_of_memory", EXIT_OUT_OF_MEMORY
    if isinstance(error, NotFiniteError):
        return "not_finite", EXIT_NOT_FINITE
    return "failed", EXIT_FAILED


# --- train --------------------------------------------------------------------------------------------------------


def train(config: Config, place: Place) -> dict[str, Any]:
    device = select_device(config.device)
    build.prepare_torch(config)
    data = build.build_data(config, place.base, console.task_progress)
    dimensions = build.build_dimensions(config, data.vocab_size)
    loader = build.build_loader(config, data, device)
    if data.tokenizer:
        data.tokenizer.save(place.folder / "tokenizer.json")
    model = build.build_model(config, dimensions, device)
    step = build.build_step(config, model, device)
    n_parameters = count_parameters(model)
    console.print_header(header(config, model, device, loader.windows_per_epoch))
    token_flops = step_flops(dimensions, n_parameters, config.seq_len)
    with (
        console.Progress(config.steps) as progress,
        Recorder(
            place.folder, progress.update, peak_flops(config, device), token_flops
        ) as recorder,
    ):
        train_loop(
            step,
            loader,
            build.build_schedule(config),
            config.steps,
            evaluate=lambda: mean_loss(step, build.validation_batches(config, data)),
            observe=recorder,
            log_every=config.log_every,
            eval_every=config.eval_every,
            max_skipped=config.optimizer.max_skipped,
        )
        loader.close()
        save_weights(model, place.folder)
        summary = recorder.summary | {"parameters": n_parameters, "device": describe_device(device)}
        summary["vocab_size"] = dimensions.vocab_size
        if data.train is not None:
            summary["unigram_entropy"] = unigram_entropy(data.train, data.vocab_size)
        if data.tokenizer and config.generate.tokens:
            summary["sample"] = sample(config, model, data.tokenizer)
            recorder.board.text("sample", f"```\n{summary['sample']}\n```")
        recorder.board.hparams(hyperparameters(config), metrics(summary))
    summary["host_peak_rss_bytes"] = host_memory_bytes("VmHWM")
    console.print_summary(summary | {"run_dir": place.folder})
    return summary


def header(config: Config, model: Transformer, device: torch.device, windows: int) -> list[str]:
    """What is about to run, in the words of the four switches."""
    d = model.dimensions
    tokens = config.micro_batch * config.seq_len * config.accum
    precision = config.precision.name
    lines = [
        f"model      {format_count(count_parameters(model))} parameters · {d.n_layers} layers x {d.dim} wide · "
        f"vocabulary {d.vocab_size} · on {describe_device(device)}",
        f"step       {config.accum} x {config.micro_batch} x {config.seq_len} = {format_count(tokens)} tokens · "
        f"{windows} steps an epoch · {config.optimizer.name} lr {config.optimizer.lr:g}",
        f"switches   precision={precision} accum={config.accum} "
        f"checkpoint_every={config_module.segment_blocks(config)} offload={config.offload.mode}",
    ]
    if precision in ("bf16", "fp16"):
        lines.append(
            f"           {precision} is what is computed in: weights, gradients and moments stay fp32"
        )
    return lines


def peak_flops(config: Config, device: torch.device) -> float:
    """The device's dense peak for what the run computes in, in FLOP/s; 0 if not known."""
    card = machine_card(device)
    if card is None:
        return 0.0
    kind = {"bf16_true": "bf16"}.get(config.precision.name, config.precision.name)
    return card.peak_tflops("tf32" if config.precision.tf32 and kind == "fp32" else kind) * 1e12


def machine_card(device: torch.device) -> Card | None:
    """The data sheet of the card in the machine, if it is one we have."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return match_card(properties.name, properties.total_memory)


def sample(config: Config, model: Transformer, tokenizer: Tokenizer) -> str:
    """The prompt and what the model makes of it."""
    prompt = tokenizer.encode([config.generate.prompt])[0].tolist() or [tokenizer.end_of_text_id]
    tokens = generate_tokens(
        model,
        prompt,
        config.generate.tokens,
        config.generate.temperature,
        config.generate.top_k,
        torch.Generator().manual_seed(config.seed),
    )
    return tokenizer.decode(tokens)


def hyperparameters(config: Config) -> dict[str, Any]:
    """What a sweep may vary, for TensorBoard's HPARAMS tab."""
    keys = ("steps", "micro_batch", "seq_len", "accum", "checkpoint_every", "clip", "seed")
    chosen: dict[str, Any] = {key: getattr(config, key) for key in keys}
    return chosen | {
        "precision": config.precision.name,
        "checkpointing": config.checkpointing.policy,
        "offload": config.offload.mode,
        "optimizer": config.optimizer.name,
        "lr": config.optimizer.lr,
        "loss": config.loss.name,
        "dim": config.model.dim,
        "n_layers": config.model.n_layers,
    }


def metrics(summary: dict[str, Any]) -> dict[str, float | None]:
    keys = ("final_loss", "val_loss", "tokens_per_second", "peak_allocated_bytes")
    return {key: summary.get(key) for key in (*keys, "peak_reserved_bytes", "host_peak_rss_bytes")}


# --- generate -----------------------------------------------------------------------------------------------------


def generate(config: Config, place: Place) -> dict[str, Any]:
    """Continue `generate.prompt` with a finished run."""
    folder = finished_run(config, place)
    model = load_weights(folder, select_device(config.device))
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    text = sample(config, model, tokenizer)
    console.print_header([f"from {folder}", "", console.printable(text)])
    return {"sample": text, "from": str(folder), "parameters": count_parameters(model)}


def finished_run(config: Config, place: Place) -> Path:
    if config.generate.run:
        return config_module.resolve_path(config.generate.run, place.base)
    found = sorted(place.folder.parent.glob(f"*/{WEIGHTS}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UserError(
            f"generate.run: no finished run in {place.folder.parent}; train one, or name a folder"
        )
    return found[-1].parent


# --- numerics -----------------------------------------------------------------------------------------------------


def numerics(config: Config, place: Place) -> dict[str, Any]:
    """What each float format can hold, and what it would lose of this model's gradients."""
    console.print_table(formats.formats_table(formats.float_formats()))
    device = select_device(config.device)
    build.prepare_torch(config)
    data = build.build_data(config, place.base, console.task_progress)
    model = build.build_model(config, build.build_dimensions(config, data.vocab_size), device)
    step = build.build_step(config, model, device)
    gradients = gradients_after(config, step, build.build_loader(config, data, device))
    histograms = formats.gradient_histograms(gradients)
    shares = formats.underflow_shares(gradients, config.precision.loss_scale)
    console.print_table(formats.histograms_table(histograms))
    console.print_table(formats.shares_table(shares))
    figure = plots.gradient_histogram_figure(histograms, formats.float_formats())
    plots.save_png(figure, place.folder / "numerics.png")
    board = Board(place.folder)
    board.figure("numerics/gradients", figure)
    board.close()
    console.print_header(
        [f"histogram  {place.folder / 'numerics.png'}, and in TensorBoard's IMAGES"]
    )
    return {
        "parameters": count_parameters(model),
        "device": describe_device(device),
        "underflow": {f"{s.format} x {s.loss_scale:g}": s.underflow for s in shares},
        "overflow": {f"{s.format} x {s.loss_scale:g}": s.overflow for s in shares},
    }


def gradients_after(config: Config, step: TrainStep, loader: Any) -> dict[str, torch.Tensor]:
    """Gradients of one window, unscaled and unclipped, after `numerics.steps` training steps."""
    windows = iter(loader)
    if config.numerics.steps:
        short = replace(config, steps=config.numerics.steps)
        with console.Progress(short.steps) as progress:
            train_loop(
                step,
                windows,
                build.build_schedule(short),
                short.steps,
                evaluate=None,
                observe=progress.update,
                log_every=config.log_every,
                eval_every=0,
                max_skipped=config.optimizer.max_skipped,
            )
    scale = step.scaler.get_scale()
    step.accumulate(next(windows))
    loader.close()
    named = step.model.named_parameters()
    return {name: p.grad.float() / scale for name, p in named if p.grad is not None}


TASKS = {"train": train, "generate": generate, "numerics": numerics}
