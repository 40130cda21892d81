"""`task=numerics`: what float formats can hold, and what they would lose of this model's gradients."""

from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from memtrain.config import Config
from memtrain.device import describe_device, select_device
from memtrain.engine import build
from memtrain.engine.loop import Callbacks, Pace
from memtrain.engine.loop import train as train_loop
from memtrain.engine.step import TrainStep
from memtrain.model.transformer import count_parameters
from memtrain.report import console, formats
from memtrain.report.board import Board
from memtrain.tasks.run import Place


def numerics(config: Config, place: Place) -> dict[str, Any]:
    """What each float format can hold, and what it would lose of this model's gradients."""
    from memtrain.report import plots

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
    with closing(Board(place.folder)) as board:
        board.figure("numerics/gradients", figure)
    console.print_header([f"histogram  {place.folder / 'numerics.png'}, also in TensorBoard"])
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
        steps = config.numerics.steps
        short = replace(config, steps=steps, epochs=None)
        with console.Progress(steps) as progress:
            pace = Pace(steps, config.log_every, max_skipped=config.optimizer.max_skipped)
            calls = Callbacks(progress.update)
            train_loop(step, windows, build.build_schedule(short), pace, calls)
    scale = step.scaler.get_scale()
    step.accumulate(next(windows))
    loader.close()
    named = step.model.named_parameters()
    return {name: p.grad.float() / scale for name, p in named if p.grad is not None}
