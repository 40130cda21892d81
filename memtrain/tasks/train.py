"""`task=train`: prepare, train, save, say what was learned."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

import torch
import yaml

from memtrain.config import Config
from memtrain.config.derived import optimizer_home, with_steps
from memtrain.config.effects import warmup_warnings
from memtrain.data.loader import Windows
from memtrain.data.prepare import Data
from memtrain.device import host_peak_bytes, host_peak_watched, select_device
from memtrain.engine import build
from memtrain.engine.build import adapts
from memtrain.engine.checkpoint import Checkpoints, save_weights
from memtrain.engine.loaded import Loaded
from memtrain.engine.loop import Callbacks, Pace, Progress, mean_loss
from memtrain.engine.loop import train as train_loop
from memtrain.engine.pretrained import Published, find_published
from memtrain.engine.resume import capture
from memtrain.engine.step import TrainStep
from memtrain.model.language_model import LanguageModel
from memtrain.model.loss import Terms
from memtrain.model.transformer import count_parameters, step_flops
from memtrain.report import console
from memtrain.report.recorder import Recorder
from memtrain.run_folder import PLAN, write_json
from memtrain.stop import StopRequest
from memtrain.tasks.card import card_of_run, peak_flops, warn_of_missing_type
from memtrain.tasks.export import leave
from memtrain.tasks.header import data_lines, header, published_line
from memtrain.tasks.nvme import check_room_for_files, own_nvme_folder
from memtrain.tasks.predicted import (
    explain_out_of_memory,
    plan_run,
    predicted_figures,
    resolve_budget,
    without_timeline,
)
from memtrain.tasks.resume import naming_the_last_good, recorded_steps, resume
from memtrain.tasks.run import Place
from memtrain.tasks.summary import how_it_ended, hyperparameters, metrics, size_of, what_was_learned


@dataclass
class Run:
    """The parts of a training run."""

    config: Config
    """With `steps`, whatever said how many."""
    chosen: dict[str, Any]
    """The config that checkpoints keep."""
    place: Place
    data: Data
    loader: Windows
    model: LanguageModel
    step: TrainStep
    checkpoints: Checkpoints
    progress: Progress
    plan: dict[str, Any] | None
    published: Published | None

    @property
    def steps(self) -> int:
        assert self.config.steps is not None
        return self.config.steps


def train(config: Config, place: Place) -> dict[str, Any]:
    device = select_device(config.device)
    if config.precision.tf32 and device.type == "cpu":
        console.print_warning("precision.tf32=true has no effect on the CPU")
    warn_of_missing_type(config, card_of_run(config, place, device))
    build.prepare_torch(config)
    data = build.build_data(config, place.base, console.task_progress)
    dimensions = build.build_dimensions(config, data.vocab_size)
    config = resolve_budget(config, place, dimensions.vocab_size, device)
    plan = plan_run(config, place, dimensions.vocab_size, device)
    try:
        chosen = asdict(config)
        with own_nvme_folder(config, place) as config, host_peak_watched():
            run = make_run(config, chosen, place, data, device, plan)
            with closing(run.loader):
                announce(run)
                summary = train_to_the_end(run) | {"host_peak_rss_bytes": host_peak_bytes()}
    except torch.OutOfMemoryError as error:
        explain_out_of_memory(config, place, dimensions.vocab_size, device, plan, error)
        raise
    console.print_summary(summary | {"run_dir": place.folder})
    return summary


def make_run(
    config: Config,
    chosen: dict[str, Any],
    place: Place,
    data: Data,
    device: torch.device,
    plan: dict[str, Any] | None,
) -> Run:
    """Build the parts, and put them where an earlier process left off."""
    loader = build.build_loader(config, data, device)
    config = with_steps(config, loader.windows_per_epoch)
    model = build.build_model(config, build.build_dimensions(config, data.vocab_size), device)
    step = build.build_step(config, model, device)
    if optimizer_home(config) == "nvme":
        check_room_for_files(config)
    checkpoints = Checkpoints(place.folder, config.keep)
    step.before_change = checkpoints.before_change
    progress = Progress()
    if config.resume:
        progress = resume(config, chosen, place, step, model, loader)
    parts = (data, loader, model, step, checkpoints, progress, plan)
    return Run(config, chosen, place, *parts, find_published(config))


def announce(run: Run) -> None:
    """Write what is known before the first step into the run's folder, and say it."""
    config, folder, windows = run.config, run.place.folder, run.loader.windows_per_epoch
    if run.plan and run.place.held:  # else it is there
        write_json(folder / PLAN, without_timeline(run.plan))
    if run.data.tokenizer:
        run.data.tokenizer.save(folder / "tokenizer.json")
    if run.published is not None:
        console.print_header([published_line(run.published)])
    console.print_header(header(config, run.model, run.step.device, windows))
    console.print_header(data_lines(run.data))
    if (epochs := run.chosen["epochs"]) is not None:
        console.print_header([f"epochs     {epochs:g} x {windows} = {config.steps} steps"])
        for warning in warmup_warnings(config):
            console.print_warning(warning)


def train_to_the_end(run: Run) -> dict[str, Any]:
    """Train, save, sample; the summary's figures come back."""
    config, folder, model = run.config, run.place.folder, run.model
    flops = step_flops(model.dimensions, count_parameters(model), config.seq_len)
    predicted = predicted_figures(run.plan)
    with (
        naming_the_last_good(folder, run.progress),
        console.Progress(run.steps, first_step=run.progress.steps) as bar,
        Recorder(
            folder,
            bar.update,
            peak_flops(config, run.step.device),
            flops,
            recorded_steps(config, run.progress),
            predicted.get("predicted_peak_allocated_bytes"),
        ) as recorder,
    ):
        with StopRequest("stopping after this window, then saving") as request:
            train_and_save(run, recorder, request)
        request.raise_if_requested(f"stopped after the last step; the weights are in {folder}")
        summary = predicted | recorder.summary
        summary |= how_it_ended(config, folder, run.progress, summary.get("val_loss"))
        summary |= what_was_learned(config, model, run.data) | size_of(run.step, config)
        for line in data_lines(run.data):
            recorder.board.text("data", line)
        if "sample" in summary:
            recorder.board.text("sample", f"```\n{summary['sample']}\n```")
        recorder.board.hparams(hyperparameters(config, run.place.overrides), metrics(summary))
    return summary


def train_and_save(run: Run, recorder: Recorder, request: StopRequest) -> None:
    """Up to the last step and the final weights. Raises Stopped at a signal, when what was trained is saved."""
    config, progress, checkpoints = run.config, run.progress, run.checkpoints
    config_text = yaml.safe_dump(run.chosen, sort_keys=False)

    def stop() -> bool:
        return bool(request.requested)

    def save(progress: Progress, val_loss: float | None) -> None:
        recorder.flush()
        contents = capture(run.step, run.model, run.loader, progress, val_loss, config_text)
        checkpoints.save(contents)

    evaluate = evaluation(config, run.step, run.data, stop)
    pace = Pace(
        run.steps,
        config.log_every,
        config.eval_every,
        config.save_every,
        config.optimizer.max_skipped,
    )
    calls = Callbacks(recorder, evaluate, save, checkpoints.followed, stop)
    with checkpoints:
        train_loop(run.step, run.loader, build.build_schedule(config), pace, calls, progress)
        stopped = bool(progress.pending) or progress.steps < run.steps
        if stopped:
            checkpoints.followed(False)  # who goes on sees whether the last one is any good
        checkpoints.wait()
        if stopped:
            request.raise_if_requested(
                f"stopped, saved at step {progress.steps}; go on with resume=latest"
            )
        run.step.settle()
        save_weights(run.model, run.place.folder)
        if run.published is not None:
            loaded = Loaded(config, run.published, run.model)
            leave(loaded, run.place.folder, adapts(config))


def evaluation(
    config: Config, step: TrainStep, data: Data, stop: Callable[[], bool]
) -> Callable[[], float] | None:
    """Mean loss over the held-out text, up to `stop`, without smoothing and the like; None without such text."""
    if data.val is None:
        return None
    plain_loss = build.build_loss(config, Terms())

    def evaluate() -> float:
        batches = build.validation_batches(config, data)
        return mean_loss(step, plain_loss, takewhile(lambda _: not stop(), batches))

    return evaluate
