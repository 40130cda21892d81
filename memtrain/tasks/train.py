"""`task=train`: prepare, train, save, say what was learned."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import takewhile
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import yaml

from memtrain.config import Config
from memtrain.config.derived import optimizer_home, resolve_path, segment_blocks, with_steps
from memtrain.config.effects import warmup_warnings
from memtrain.data.loader import Windows
from memtrain.data.packing import Packed
from memtrain.data.store import unigram_entropy
from memtrain.device import describe_device, host_peak_bytes, host_peak_watched, select_device
from memtrain.engine import build
from memtrain.engine.checkpoint import Checkpoints, save_weights
from memtrain.engine.loop import Progress, mean_loss
from memtrain.engine.loop import train as train_loop
from memtrain.engine.optimizers import state_bytes_per_parameter
from memtrain.engine.resume import capture
from memtrain.engine.step import TrainStep
from memtrain.engine.update import parameters_of
from memtrain.errors import NotFiniteError
from memtrain.memory import file_store
from memtrain.model.loss import Terms
from memtrain.model.transformer import Dimensions, Transformer, count_parameters, step_flops
from memtrain.report import console
from memtrain.report.recorder import Recorder
from memtrain.run_folder import PLAN, write_json
from memtrain.stop import StopRequest
from memtrain.tasks.card import card_of_run, peak_flops, warn_of_missing_type
from memtrain.tasks.generate import sample
from memtrain.tasks.header import data_lines, document_figures, header
from memtrain.tasks.predicted import (
    explain_out_of_memory,
    plan_run,
    predicted_figures,
    resolve_budget,
    without_timeline,
)
from memtrain.tasks.resume import back, naming_the_last_good, recorded_steps, resume
from memtrain.tasks.run import Place
from memtrain.units import format_bytes


def train(config: Config, place: Place) -> dict[str, Any]:
    device = select_device(config.device)
    if config.precision.tf32 and device.type == "cpu":
        console.print_warning("precision.tf32=true has no effect on the CPU")
    warn_of_missing_type(config, card_of_run(config, place, device))
    build.prepare_torch(config)
    data = build.build_data(config, place.base, console.task_progress)
    dimensions = build.build_dimensions(config, data.vocab_size)
    loader = build.build_loader(config, data, device)
    config = resolve_budget(config, place, dimensions.vocab_size, device)
    found = plan_run(config, place, dimensions.vocab_size, device)
    try:
        chosen = asdict(config)
        with own_nvme_folder(config, place) as config, host_peak_watched():
            summary = train_model(config, chosen, place, device, data, dimensions, loader, found)
    except torch.OutOfMemoryError as error:
        explain_out_of_memory(config, place, dimensions.vocab_size, device, found, error)
        raise
    finally:
        loader.close()
    console.print_summary(summary | {"run_dir": place.folder})
    return summary


def train_model(
    config: Config,
    chosen: dict[str, Any],
    place: Place,
    device: torch.device,
    data: build.Data,
    dimensions: Dimensions,
    loader: Windows,
    found: dict[str, Any] | None,
) -> dict[str, Any]:
    """Build, train, save, sample; the summary's figures come back.

    `chosen` is the config that checkpoints keep, `found` the run's plan.
    """
    config, epochs = with_steps(config, loader.windows_per_epoch), config.epochs
    assert config.steps is not None
    model = build.build_model(config, dimensions, device)
    step = build.build_step(config, model, device)
    if optimizer_home(config) == "nvme":
        check_room_for_files(config)
    progress, checkpoints = Progress(), Checkpoints(place.folder, config.keep)
    step.before_change = checkpoints.before_change
    if config.resume:
        progress = resume(config, chosen, place, step, model, loader)
    if found and place.held:  # else it is there
        write_json(place.folder / PLAN, without_timeline(found))
    if data.tokenizer:
        data.tokenizer.save(place.folder / "tokenizer.json")
    n_parameters = count_parameters(model)
    console.print_header(header(config, model, device, loader.windows_per_epoch))
    console.print_header(data_lines(data))
    if epochs is not None:
        windows = loader.windows_per_epoch
        console.print_header([f"epochs     {epochs:g} x {windows} = {config.steps} steps"])
        for warning in warmup_warnings(config):
            console.print_warning(warning)
    flops = (peak_flops(config, device), step_flops(dimensions, n_parameters, config.seq_len))
    predicted = predicted_figures(found)
    predicted_bytes = predicted.get("predicted_peak_allocated_bytes")
    config_text = yaml.safe_dump(chosen, sort_keys=False)

    def save(progress: Progress, val_loss: float | None) -> None:
        recorder.flush()
        checkpoints.save(capture(step, model, loader, progress, val_loss, config_text))

    with (
        naming_the_last_good(place.folder, progress),
        console.Progress(config.steps, first_step=progress.steps) as bar,
        Recorder(
            place.folder, bar.update, *flops, recorded_steps(config, progress), predicted_bytes
        ) as recorder,
    ):
        with checkpoints, StopRequest("stopping after this window, then saving") as request:

            def stop() -> bool:
                return bool(request.requested)

            train_loop(
                step,
                loader,
                build.build_schedule(config),
                config.steps,
                progress=progress,
                save=save,
                save_every=config.save_every,
                judge=checkpoints.followed,
                stop=stop,
                evaluate=evaluation(config, step, data, stop),
                observe=recorder,
                log_every=config.log_every,
                eval_every=config.eval_every,
                max_skipped=config.optimizer.max_skipped,
            )
            stopped = bool(progress.pending) or progress.steps < config.steps
            if stopped:
                checkpoints.followed(False)  # who goes on sees whether the last one is any good
            checkpoints.wait()
            if stopped:
                request.raise_if_requested(
                    f"stopped, saved at step {progress.steps}; go on with resume=latest"
                )
            step.settle()
            save_weights(model, place.folder)
        request.raise_if_requested(
            f"stopped after the last step; the weights are in {place.folder}"
        )
        summary = predicted | recorder.summary
        summary |= {"parameters": n_parameters, "device": describe_device(device)}
        summary |= optimizer_size(config, step)
        summary |= how_it_ended(config, place.folder, progress, summary.get("val_loss"))
        summary |= what_was_learned(config, model, data, place)
        if "sample" in summary:
            recorder.board.text("sample", f"```\n{summary['sample']}\n```")
        for line in data_lines(data):
            recorder.board.text("data", line)
        recorder.board.hparams(hyperparameters(config, place.overrides), metrics(summary))
    return summary | {"host_peak_rss_bytes": host_peak_bytes()}


def how_it_ended(
    config: Config, folder: Path, progress: Progress, val_loss: float | None
) -> dict[str, Any]:
    """Whether in steps that were not finite. A single one in fp16 is how the loss scale finds its height."""
    count = progress.skipped_in_a_row
    found: dict[str, Any] = {"skipped_in_a_row": count}
    text = (
        f"not finite: the last {count} of {progress.steps} steps; the weights are those before; "
        "lower optimizer.lr, or use precision=bf16 or fp32"
    )
    if count > (config.precision.name == "fp16"):
        found |= {"status": "not_finite", "error": text + back(folder, progress)}
    elif count:
        console.print_warning(text)
    elif val_loss is not None and not isfinite(val_loss):
        console.print_warning("the last validation loss is not finite; were there targets in it?")
    return found


def optimizer_size(config: Config, step: TrainStep) -> dict[str, float | None]:
    """Bytes of optimizer state per trained parameter, as it really is; files are not read again for it."""
    if optimizer_home(config) == "nvme":
        return {}
    states = [(p, update.state(p)) for update in step.updates for p in parameters_of(update)]
    size = state_bytes_per_parameter(states)
    return {
        "optimizer_bytes_per_parameter": size.bytes_per_parameter,
        "optimizer_share_32_bit": size.share_32_bit,
    }


def evaluation(
    config: Config, step: TrainStep, data: build.Data, stop: Callable[[], bool]
) -> Callable[[], float] | None:
    """Mean loss over the held-out text, up to `stop`, without smoothing and the like; None without such text."""
    if data.val is None:
        return None
    plain_loss = build.build_loss(config, Terms())

    def evaluate() -> float:
        batches = build.validation_batches(config, data)
        return mean_loss(step, plain_loss, takewhile(lambda _: not stop(), batches))

    return evaluate


def what_was_learned(
    config: Config, model: Transformer, data: build.Data, place: Place
) -> dict[str, Any]:
    """What the loss is to be held against, and a sample of text."""
    found: dict[str, Any] = {"vocab_size": model.dimensions.vocab_size}
    if isinstance(data.train, Packed):
        found |= document_figures(data.train)
        found["unigram_entropy"] = data.train.target_entropy(data.vocab_size)
    elif data.train is not None:
        found["unigram_entropy"] = unigram_entropy(data.train, data.vocab_size)
    if data.tokenizer and config.generate.tokens:
        try:
            found["sample"] = sample(config, model, data.tokenizer)
        except NotFiniteError as error:
            console.print_warning(f"no sample: {error}")
    return found


def hyperparameters(config: Config, overrides: list[str]) -> dict[str, Any]:
    """The four switches and what was typed, numbers as numbers, for TensorBoard's HPARAMS tab."""
    pairs = (text.lstrip("+").split("=", 1) for text in overrides if "=" in text)
    typed = {key: number_or_text(value) for key, value in pairs}
    return typed | {
        "precision": config.precision.name,
        "accum": config.accum,
        "checkpoint_every": segment_blocks(config),
        "offload": config.offload.mode,
    }


def number_or_text(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def metrics(summary: dict[str, Any]) -> dict[str, float | None]:
    keys = ("final_loss", "val_loss", "tokens_per_second", "peak_allocated_bytes")
    return {key: summary.get(key) for key in (*keys, "peak_reserved_bytes", "host_peak_rss_bytes")}


def check_room_for_files(config: Config) -> None:
    """Some are written, others are still to grow. Raises UserError if there is no room for that."""
    assert config.offload.nvme_dir
    folder = Path(config.offload.nvme_dir)
    still_bytes = file_store.files_bytes(folder) - file_store.taken_bytes(folder)
    file_store.check_folder(folder, max(0, still_bytes))


@contextmanager
def own_nvme_folder(config: Config, place: Place) -> Iterator[Config]:
    """For the _nvme modes: `offload.nvme_dir` becomes a folder of this run's own, which is gone afterwards."""
    if optimizer_home(config) != "nvme":
        yield config
        return
    assert config.offload.nvme_dir
    nvme_dir = resolve_path(config.offload.nvme_dir, place.base)
    file_store.check_folder(nvme_dir, 0)
    for folder, size_bytes in file_store.leftovers(nvme_dir):
        console.print_warning(
            f"{folder}: {format_bytes(size_bytes)} left behind by a run that ended before it could remove them; "
            "delete it"
        )
    folder = file_store.claim_folder(nvme_dir, config.name)
    try:
        yield replace(config, offload=replace(config.offload, nvme_dir=str(folder)))
    finally:
        file_store.release_folder(folder)
