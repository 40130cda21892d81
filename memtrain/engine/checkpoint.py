"""A run on disk: weights, optimizer state and everything else it needs to go on bit for bit.

    checkpoints/step_00000200/
      model.safetensors      weights by the model's own names, a tied head once; what other programs read
      model.json             its dimensions
      optimizer.safetensors  <parameter>/<name>, and <parameter>/master where a weight has an fp32 master
      state.pt               counters, loss scale, data position, random states: `torch.load(..., weights_only=True)`
      config.yaml            what was chosen
      meta.json              step, how many were finite so far and not finite in a row, validation loss: for choosing
                             between checkpoints; and the sizes of the files

A folder has that name only when all of it is on the disk: it is written under another, synced and renamed.
"""

import io
import json
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from memtrain.engine.snapshot import Snapshot, write_tensors
from memtrain.errors import SaveError, UserError
from memtrain.model.language_model import LanguageModel
from memtrain.model.transformer import Dimensions, Transformer
from memtrain.run_folder import (
    CHECKPOINTS,
    CONFIG,
    DIMENSIONS,
    FILES,
    META,
    OPTIMIZER,
    STATE,
    WEIGHTS,
    complete,
    is_good,
    newest,
    read_meta,
    step_name,
    stepped,
    sync_folder,
    went_on,
    write_synced,
    write_text,
)

PER_ENTRY = ("master", "exp_avg", "exp_avg_sq", "momentum_buffer", "momentum")
"""State that has the shape of its parameter: a kernel reads it without asking."""


@dataclass(frozen=True)
class Contents:
    """What one checkpoint holds."""

    step: int
    val_loss: float | None
    """Measured at this very step."""
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]
    dimensions: Dimensions
    config_text: str
    stepped: int = 0
    """Steps that were finite, so far."""
    skipped_in_a_row: int = 0
    """Those since the last finite one; 0: a good state to go on from."""


class Checkpoints:
    """The checkpoints of one run: written behind the training, the newest, the last `keep` good ones and the best kept.

    A finite loss at step n is that of the weights before it: whether those that step n made are any good is known from
    step n + 1. Until then (`followed`) what a new checkpoint replaces stays.

    `keep` -1 keeps all. Raises SaveError, from `save` or `wait`, if one could not be written; those before it are
    still there.
    """

    def __init__(self, run_folder: Path, keep: int) -> None:
        self.run_folder, self.folder = run_folder, run_folder / CHECKPOINTS
        self._keep = keep
        self._thread: threading.Thread | None = None
        self._snapshot: Snapshot | None = None
        self._error: Exception | None = None
        self._judged = threading.Event()
        self._proven = True

    def save(self, contents: Contents) -> None:
        """Returns before it is written: call `before_change` before any of its tensors changes."""
        self.followed(False)  # by no step: the windows since then had nothing to learn
        self.wait()
        tensors = {f"w/{name}": t for name, t in contents.weights.items()}
        tensors |= {f"o/{name}": t for name, t in contents.optimizer.items()}
        buffer = io.BytesIO()
        torch.save(contents.state, buffer)
        self._snapshot = Snapshot(tensors)
        self._proven = not contents.skipped_in_a_row
        self._judged.clear()
        arguments = (contents, self._snapshot, buffer.getvalue())
        self._thread = threading.Thread(target=self._run, args=arguments, name="checkpoint")
        self._thread.start()

    def before_change(self) -> None:
        if self._error is not None:
            self.wait()
        if self._snapshot is not None:
            self._snapshot.freeze()

    def followed(self, finite: bool) -> None:
        """How the first step from what was saved last has ended."""
        if not self._judged.is_set():
            self._proven = finite
            self._judged.set()

    def wait(self) -> None:
        """Until what was saved is on the disk and what it replaces is gone; without a step after it, it is the last."""
        self._judged.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = self._snapshot = None
        if self._error is not None:
            error, self._error = self._error, None
            last = newest(self.run_folder)
            raise SaveError(
                f"{getattr(error, 'filename', None) or self.folder}: the checkpoint could not be written "
                f"({getattr(error, 'strerror', None) or error}); "
                f"{f'{last.name} is the last complete one' if last else 'there is no complete one'}; "
                "make room there and go on with resume=latest"
            ) from error

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.wait()
        elif self._thread is not None:  # what was saved shall be there; the error is what is told
            self.followed(False)
            self._thread.join()

    def _run(self, contents: Contents, snapshot: Snapshot, state: bytes) -> None:
        temporary = self.folder / ".new"  # what a kill left of it is gone with the next one
        try:
            snapshot.copy()
            self._write(temporary, contents, snapshot, state)
            final = self.folder / step_name(contents.step)
            before = set_aside(final)
            if final.exists():  # a damaged one, or the same step, saved again
                final.rename(before)
            temporary.rename(final)
            sync_folder(self.folder)
            shutil.rmtree(before, ignore_errors=True)
            self._judged.wait()
            self._remove_old()
        except Exception as error:  # `wait` tells it
            self._error = error
            shutil.rmtree(temporary, ignore_errors=True)
        finally:
            snapshot.finish()

    def _write(self, folder: Path, contents: Contents, snapshot: Snapshot, state: bytes) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        if not self.folder.exists():
            self.folder.mkdir(parents=True)
            sync_folder(self.run_folder)
        folder.mkdir()
        write_tensors(folder / WEIGHTS, contents.weights, snapshot, "w/")
        write_tensors(folder / OPTIMIZER, contents.optimizer, snapshot, "o/")
        snapshot.finish()
        write_synced(folder / STATE, [state])
        write_synced(folder / CONFIG, [contents.config_text.encode()])
        write_synced(folder / DIMENSIONS, [dimensions_text(contents.dimensions).encode()])
        sizes_bytes = {name: (folder / name).stat().st_size for name in FILES}
        meta: dict[str, Any] = {"step": contents.step, "val_loss": contents.val_loss}
        meta |= {"stepped": contents.stepped, "skipped_in_a_row": contents.skipped_in_a_row}
        meta["sizes_bytes"] = sizes_bytes
        write_synced(folder / META, [json.dumps(meta).encode()])
        sync_folder(folder)

    def _remove_old(self) -> None:
        """All but the newest, the last `keep` good ones and the one with the least validation loss.

        As long as the last good one has made no finite step, the one before it stays, too, and one of other weights.
        """
        if self._keep < 0:
            return
        found = complete(self.run_folder)
        good = [path for path in found if is_good(path)]
        doubted = good and not (self._proven or went_on(good[-1], stepped(found[-1])))
        losses = {path: read_meta(path)["val_loss"] for path in found}
        measured = {p: loss for p, loss in losses.items() if loss is not None and isfinite(loss)}
        kept = {*found[-1:], *good[-self._keep - bool(doubted) :]}
        if doubted:
            last = stepped(good[-1]) or 0
            kept.update([path for path in good if (stepped(path) or 0) < last][-1:])
        if measured:
            kept.add(min(measured, key=lambda path: measured[path]))
        for path in found:
            if path not in kept:
                remove(path)


def remove(checkpoint: Path) -> None:
    """Takes its name away first, so that half of it is never taken for all of it."""
    doomed = checkpoint.rename(set_aside(checkpoint))
    shutil.rmtree(doomed, ignore_errors=True)


def set_aside(checkpoint: Path) -> Path:
    """The name of what is about to be removed; nothing has it."""
    doomed = checkpoint.with_name(".old")
    shutil.rmtree(doomed, ignore_errors=True)
    return doomed


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Counters, scale, position and random states. No code in the file is run. Raises UserError for another content."""
    try:
        state = torch.load(checkpoint / STATE, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has many for what it did not write
        raise not_ours(checkpoint / STATE) from error
    if not isinstance(state, dict) or not is_state(state):
        raise not_ours(checkpoint / STATE)
    return state


def is_state(found: Mapping[str, Any]) -> bool:
    """Whether it has the parts that a run goes on with: mappings, of numbers and random states."""
    parts = [found.get(part) for part in ("progress", "scaler", "data", "random")]
    if not all(isinstance(part, dict) for part in parts):
        return False
    counters = {**found["progress"], **found["scaler"]}
    pending, last_loss = (counters.pop(key, None) for key in ("pending", "last_loss"))
    return (
        all(isinstance(number, (int, float)) and number >= 0 for number in counters.values())
        and (pending is None or isinstance(pending, dict))
        and (last_loss is None or isinstance(last_loss, float))
        and all(isinstance(state, Tensor) for state in found["random"].values())
    )


def read_config(checkpoint: Path) -> dict[str, Any]:
    """What was chosen. Raises UserError for another content."""
    try:
        tree = yaml.safe_load((checkpoint / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise not_ours(checkpoint / CONFIG) from error
    if not isinstance(tree, dict):
        raise not_ours(checkpoint / CONFIG)
    return tree


def not_ours(path: Path) -> UserError:
    return UserError(f"{path}: not a checkpoint's file; resume from another checkpoint")


def restore_tensors(
    checkpoint: Path,
    model: LanguageModel,
    load: Callable[[str, dict[str, Tensor], Tensor], None],
) -> None:
    """Put the weights back, and hand `load` (name, optimizer state, weight) of one parameter after the other.

    The weight is its fp32 master, if it has one. Raises UserError before anything is changed if names or shapes differ.
    """
    with (
        safe_open(checkpoint / WEIGHTS, "pt") as weights,
        safe_open(checkpoint / OPTIMIZER, "pt") as optimizer,
    ):
        parameters = model.saved_parameters()
        names = weights.keys()
        shapes = {name: tuple(weights.get_slice(name).get_shape()) for name in names}
        check_shapes(checkpoint / WEIGHTS, shapes, model)
        kept: dict[str, list[str]] = {name: [] for name in parameters}
        for key in list(optimizer.keys()):
            name, _, own = key.rpartition("/")
            shape = tuple(optimizer.get_slice(key).get_shape())
            if name not in kept or (own in PER_ENTRY and shape != shapes[name]):
                raise not_ours(checkpoint / OPTIMIZER)
            kept[name].append(own)
        for name, parameter in parameters.items():
            state = {own: optimizer.get_tensor(f"{name}/{own}") for own in kept[name]}
            full = state.get("master", weights.get_tensor(name))
            model.set_weight(parameter, full)
            load(name, state, full)


def check_shapes(path: Path, found: Mapping[str, tuple[int, ...]], model: LanguageModel) -> None:
    wanted = {name: tuple(parameter.shape) for name, parameter in model.saved_parameters().items()}
    missing, unknown = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or unknown:
        raise UserError(
            f"{path}: {len(missing)} weights missing, {len(unknown)} unknown, first {(missing or unknown)[0]}"
        )
    for name, shape in wanted.items():
        if found[name] != shape:
            raise UserError(f"{path}: {name} is {found[name]}, the model has {shape}")


def load_weights(folder: Path, device: torch.device) -> Transformer:
    """The model of a finished run or of a checkpoint, in evaluation mode. Raises UserError where files do not fit."""
    try:
        dimensions = Dimensions(**json.loads((folder / DIMENSIONS).read_text(encoding="utf-8")))
        weights = load_file(folder / WEIGHTS)
    except (OSError, TypeError, ValueError, SafetensorError) as error:
        raise UserError(
            f"{folder}: no loadable weights there ({error}); is it a finished run?"
        ) from error
    with torch.device("meta"):
        model = Transformer(dimensions)
    check_shapes(folder / WEIGHTS, {name: tuple(t.shape) for name, t in weights.items()}, model)
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie()
    model = model.to(device)
    model.tie()
    return model.eval()


def save_weights(model: LanguageModel, folder: Path) -> None:
    """The finished model, written under a temporary name and renamed. A tied head is stored once, as the embedding."""
    weights = {name: model.weight(p) for name, p in model.saved_parameters().items()}
    temporary = folder / f".{WEIGHTS}.tmp"
    try:
        write_tensors(temporary, weights, Snapshot(weights), "")
        temporary.replace(folder / WEIGHTS)
    finally:
        temporary.unlink(missing_ok=True)
    write_text(folder / DIMENSIONS, dimensions_text(model.dimensions))


def dimensions_text(dimensions: Dimensions) -> str:
    return json.dumps(asdict(dimensions), indent=2) + "\n"
