"""What the summary of a training run holds beside the recorder's figures."""

from math import isfinite
from pathlib import Path
from typing import Any

from memtrain.config import Config
from memtrain.config.derived import optimizer_home, segment_blocks
from memtrain.data.packing import Packed
from memtrain.data.prepare import Data
from memtrain.data.store import unigram_entropy
from memtrain.device import describe_device
from memtrain.engine.loop import Progress
from memtrain.engine.optimizers import state_bytes_per_parameter
from memtrain.engine.step import TrainStep
from memtrain.engine.update import parameters_of
from memtrain.errors import NotFiniteError
from memtrain.model.language_model import LanguageModel
from memtrain.model.transformer import count_parameters
from memtrain.report import console
from memtrain.tasks.generate import sample
from memtrain.tasks.header import document_figures
from memtrain.tasks.resume import back


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


def size_of(step: TrainStep, config: Config) -> dict[str, Any]:
    """Parameters, and bytes of optimizer state per trained one, as it really is; files are not read again for it."""
    found = {
        "parameters": count_parameters(step.model),
        "device": describe_device(step.device),
    }
    if optimizer_home(config) == "nvme":
        return found
    states = [(p, update.state(p)) for update in step.updates for p in parameters_of(update)]
    size = state_bytes_per_parameter(states)
    return found | {
        "optimizer_bytes_per_parameter": size.bytes_per_parameter,
        "optimizer_share_32_bit": size.share_32_bit,
    }


def what_was_learned(config: Config, model: LanguageModel, data: Data) -> dict[str, Any]:
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
