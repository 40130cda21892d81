"""A finished run or a checkpoint as a model again, whatever it was made of."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from memtrain.config import Config, parse
from memtrain.config.published import is_published
from memtrain.config.read import completed
from memtrain.engine.build import adapts, build_dimensions, build_model
from memtrain.engine.checkpoint import check_shapes, load_weights, read_config
from memtrain.engine.pretrained import Published, end_of_text, find_published, tokenizer_folder
from memtrain.errors import UserError
from memtrain.model.adapters.lora import Lora, merged
from memtrain.model.adapters.nf4 import NF4Linear
from memtrain.model.language_model import LanguageModel
from memtrain.run_folder import WEIGHTS


@dataclass(frozen=True)
class Loaded:
    config: Config
    """The run's own."""
    published: Published | None
    model: LanguageModel

    @property
    def end_of_text(self) -> str | None:
        """The token that the run's tokenizer ends a text with; None: one of the usual ones."""
        folder = self.tokenizer_folder
        return self.config.tokenizer.end_of_text or (end_of_text(folder) if folder else None)

    @property
    def tokenizer_folder(self) -> Path | None:
        """Of the model that others trained, if its tokenizer was used and is still there."""
        path = Path(self.config.model.path or "")
        if self.config.tokenizer.kind != "model" or not path.exists():
            return None
        return tokenizer_folder(path, Path(self.config.data.cache_dir))

    def weight(self, name: str) -> Tensor:
        """A weight of the dense model, what adapters add to it included."""
        path, _, own = name.rpartition(".")
        layer = self.model.get_submodule(path)
        if own == "weight" and isinstance(getattr(layer, "adapter", None), Lora):
            return merged(layer)
        if own == "weight" and isinstance(layer, NF4Linear):
            return layer.dequantized(torch.float32)
        return self.model.weight(self.model.get_parameter(name))


def load_run(folder: Path, device: torch.device) -> Loaded:
    """In evaluation mode. Raises UserError where files do not fit."""
    config = parse(completed(read_config(folder)))
    if not is_published(config) and not adapts(config):
        return Loaded(config, None, load_weights(folder, device))
    plain = replace(
        config,
        offload=replace(config.offload, mode="none"),
        checkpointing=replace(config.checkpointing, policy="segments"),
        checkpoint_every=0,
        compile="off",
    )
    vocab_size = config.model.vocab_size or 1
    model = build_model(plain, build_dimensions(plain, vocab_size), device)
    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            check_shapes(folder / WEIGHTS, shapes, model)
            for name, parameter in model.saved_parameters().items():
                model.set_weight(parameter, file.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{folder}: no loadable weights there ({error}); is it a finished run?"
        ) from error
    model.eval()
    return Loaded(config, find_published(config), model)
