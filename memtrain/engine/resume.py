"""What a run is at the end of a window, taken from its parts and put back into them."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memtrain.config.read import completed
from memtrain.data.loader import Windows
from memtrain.device import random_states, set_random_states
from memtrain.engine.checkpoint import Contents, not_ours, read_state, restore_tensors
from memtrain.engine.loop import Progress
from memtrain.engine.step import TrainStep
from memtrain.engine.update import parameters_of
from memtrain.errors import UserError
from memtrain.model.language_model import LanguageModel
from memtrain.run_folder import STATE, complete, step_of

FIXED = (
    "seed",
    "seq_len",
    "model.",
    "data.source",
    "data.val_fraction",
    "data.shuffle",
    "data.vocab_size",
    "data.document_mask",
    "tokenizer.",
    "adapter.",
    "optimizer.name",
)
"""Keys that make another run: another model, other data, another state."""
FREE_IN_FIXED = (
    "model.path",
    "model.mlp_chunks",
    "model.mlp_chunk_blocks",
    "model.dropout",
    "tokenizer.path",
)
"""Data, tokenizer and the base of an adapter are known by their content."""
ROUNDING = ("micro_batch", "accum")
"""Keys whose product is fixed: the same window in other pieces gives the same sums, rounded differently."""


def capture(
    step: TrainStep,
    model: LanguageModel,
    loader: Windows,
    progress: Progress,
    val_loss: float | None,
    config_text: str,
) -> Contents:
    step.settle()
    names = {parameter: name for name, parameter in model.saved_parameters().items()}
    optimizer = {
        f"{names[parameter]}/{own}": value if isinstance(value, Tensor) else torch.tensor(value)
        for update in step.updates
        for parameter in parameters_of(update)
        for own, value in update.state(parameter).items()
    }
    return Contents(
        step=progress.steps,
        val_loss=val_loss,
        weights={name: model.weight(parameter) for parameter, name in names.items()},
        optimizer=optimizer,
        state={
            "progress": asdict(progress),
            "scaler": step.scaler.state_dict(),
            "data": loader.state_dict(),
            "random": random_states(step.device),
            "base": model.base,
        },
        dimensions=model.dimensions,
        config_text=config_text,
        stepped=progress.stepped,
        skipped_in_a_row=progress.skipped_in_a_row,
    )


def restore(checkpoint: Path, step: TrainStep, model: LanguageModel, loader: Windows) -> Progress:
    """Raises UserError if the model or the trained parameters are not those of the checkpoint."""
    state = read_state(checkpoint)
    if state.get("base", "") != model.base:
        raise UserError(
            f"{checkpoint}: its adapter was trained on another base than model.path; bring that back"
        )
    loader.load_state_dict(state["data"])
    parameters = model.saved_parameters()
    owner = {p: update for update in step.updates for p in parameters_of(update)}

    def load(name: str, saved: dict[str, Tensor], weight: Tensor) -> None:
        parameter = parameters[name]
        if saved and parameter not in owner:
            raise UserError(f"{checkpoint}: {name} was trained there and is frozen here")
        if parameter in owner:  # without a state, too: a master is what the next step writes back
            owner[parameter].load_state(parameter, {**saved, "master": weight.float()})

    restore_tensors(checkpoint, model, load)
    if step.scaler.is_enabled() and state["scaler"]:
        growth_interval = step.scaler.get_growth_interval()  # is a setting
        step.scaler.load_state_dict({**state["scaler"], "growth_interval": growth_interval})
    try:
        set_random_states(step.device, state["random"])
    except RuntimeError as error:  # not as long as this generator's
        raise not_ours(checkpoint / STATE) from error
    return Progress(**state["progress"])


def last_good(run_folder: Path, before: int, so_far: int) -> Path | None:
    """The newest checkpoint of a step `before` that was not saved in a streak of steps that were not finite, and from
    whose weights a run that has made `so_far` finite steps made one."""
    for path in reversed(complete(run_folder)):
        with suppress(UserError):  # another content: not that one
            then = read_state(path)["progress"]
            good = not then.get("skipped_in_a_row") and then.get("stepped", so_far) < so_far
            if good and step_of(path) < before:
                return path
    return None


# --- what has changed in the config -------------------------------------------------------------------------------


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, then, now) of every key that differs.

    What `old` does not know, being of an older version, had the default of today; what `new` does not know is None.
    """
    after, known = flat(new), flat(completed(old))
    before = flat(old) | {key: known[key] for key in after if key in known}
    keys = [*before, *(key for key in after if key not in before)]
    pairs = ((key, before.get(key), after.get(key)) for key in keys)
    return [(key, then, now) for key, then, now in pairs if then != now and key != "resume"]


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def check_changes(
    found: list[tuple[str, Any, Any]], old: Mapping[str, Any], new: Mapping[str, Any]
) -> None:
    """Raises UserError for a change that would make it another run."""
    for key, then, now in found:
        if key.startswith(FIXED) and key not in FREE_IN_FIXED:
            raise UserError(
                f"{key}={now}: the run that is resumed has {then}; keep it, or start a new run"
            )
    sizes = [tree["micro_batch"] * tree["accum"] for tree in (old, new)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"micro_batch={new['micro_batch']} accum={new['accum']}: a window of {sizes[1]} samples, the run that is "
            f"resumed has {sizes[0]}; keep micro_batch x accum"
        )
