"""Going on with a run: which checkpoint, whether it may, and what is said of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from memtrain.config import Config
from memtrain.data.loader import Windows
from memtrain.engine.checkpoint import not_ours, read_config
from memtrain.engine.loop import Progress
from memtrain.engine.resume import ROUNDING, changes, check_changes, last_good, restore
from memtrain.engine.step import TrainStep
from memtrain.errors import NotFiniteError, NothingToDo, UserError
from memtrain.model.language_model import LanguageModel
from memtrain.report import console, tables
from memtrain.run_folder import (
    CONFIG,
    SUMMARY,
    WEIGHTS,
    damaged,
    last_trained,
    named_checkpoint,
    newest,
    read_summary,
    step_of,
)
from memtrain.tasks.run import Place, write_config


def resume(
    config: Config,
    chosen: dict[str, Any],
    place: Place,
    step: TrainStep,
    model: LanguageModel,
    loader: Windows,
) -> Progress:
    """Go on where `resume` says. Raises UserError where there is nothing, or the run is another one."""
    checkpoint = wanted_checkpoint(config, place)
    for path in damaged(checkpoint.parent.parent):
        console.print_warning(f"{path}: incomplete; ignored")
    old = read_config(checkpoint)
    found = changes(old, chosen)
    try:
        check_changes(found, old, chosen)
    except (KeyError, TypeError) as error:
        raise not_ours(checkpoint / CONFIG) from error
    check_steps_are_left(config, chosen["epochs"], place, checkpoint)
    try:
        progress = restore(checkpoint, step, model, loader)
    except (KeyError, TypeError, SafetensorError) as error:
        raise not_ours(checkpoint) from error
    if progress.steps != step_of(checkpoint):
        raise not_ours(checkpoint)
    console.print_header([f"resumed    {checkpoint}, step {progress.steps} of {config.steps}"])
    say_what_is_different(checkpoint, progress, found)
    if place.held:
        place.held.release()
    write_config(chosen, place.folder)
    (place.folder / SUMMARY).unlink(missing_ok=True)  # of the run as it was
    return progress


def wanted_checkpoint(config: Config, place: Place) -> Path:
    assert config.resume
    latest = config.resume == "latest"  # the folder is that run's, if there is one
    checkpoint = newest(place.folder) if latest else named_checkpoint(config.resume, place.base)
    if checkpoint is None:
        where = unsaved_run(place.folder) if latest else config.resume
        raise UserError(
            f"resume={config.resume}: no complete checkpoint in {where}; drop resume, or name another run"
        )
    return checkpoint


def check_steps_are_left(
    config: Config, epochs: float | None, place: Place, checkpoint: Path
) -> None:
    """Raises UserError for a checkpoint beyond the last step, NothingToDo for a run that is done."""
    assert config.steps is not None
    length, asked = ("steps", config.steps) if epochs is None else ("epochs", f"{epochs:g}")
    if step_of(checkpoint) > config.steps:
        raise UserError(
            f"{length}={asked}: {config.steps} steps, and {checkpoint} is at step {step_of(checkpoint)}; "
            f"raise {length} to go on"
        )
    if place.held and step_of(checkpoint) == config.steps and is_done(place.folder):
        raise NothingToDo(
            f"nothing to do: {place.folder} is at step {config.steps} of {config.steps}; raise {length} to go on"
        )


def say_what_is_different(
    checkpoint: Path, progress: Progress, found: list[tuple[str, Any, Any]]
) -> None:
    if progress.skipped_in_a_row:
        console.print_warning(
            f"{checkpoint}: the last {progress.skipped_in_a_row} steps before it were not finite"
            f"{back(checkpoint.parent.parent, progress)}"
        )
    if found:
        console.print_table(tables.changes_table(found))
    if any(key in ROUNDING for key, _, _ in found):
        console.print_warning("the same window in other micro-batches is rounded differently")


def is_done(folder: Path) -> bool:
    """Whether the run there came to its end, with its weights and its summary."""
    return (folder / WEIGHTS).exists() and (read_summary(folder) or {}).get("status") in (
        "ok",
        "not_finite",
    )


def back(run_folder: Path, progress: Progress) -> str:
    """Where else to go on from, inside a streak of steps that were not finite, or after it."""
    good = last_good(run_folder, progress.steps, progress.stepped)
    return f"; resume={good} goes on from the last good state" if good else ""


@contextmanager
def naming_the_last_good(folder: Path, progress: Progress) -> Iterator[None]:
    try:
        yield
    except NotFiniteError as error:
        raise NotFiniteError(f"{error}{back(folder, progress)}") from error


def unsaved_run(folder: Path) -> Path:
    """Where `latest` looked for a checkpoint: the last run of that name, if that has saved nothing."""
    last = last_trained(folder.parent)
    return last if last and newest(last) is None else folder


def recorded_steps(config: Config, progress: Progress) -> int | None:
    """How far the records go of a run that goes on; one that is pending may be there, and is made again."""
    return progress.steps - bool(progress.pending) if config.resume else None
