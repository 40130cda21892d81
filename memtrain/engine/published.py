"""A model of ours written the way others load it."""

from pathlib import Path

import torch

from memtrain.engine.adapt import adapter_options
from memtrain.engine.loaded import Loaded
from memtrain.engine.peft_files import write_peft
from memtrain.model.pretrained.as_family import hf_config_of
from memtrain.model.pretrained.export import Tensors, tensors_as, write_folder
from memtrain.model.pretrained.families import FAMILIES, shapes_of
from memtrain.model.pretrained.folder import generation_config
from memtrain.model.transformer import Transformer


def write_model(
    loaded: Loaded, target: Path, run_folder: Path, dtype: torch.dtype | None = None
) -> None:
    """`dtype` None: as the embedding is stored. Raises UserError where no family has such a model."""
    dtype = dtype or loaded.model.head.weight.dtype
    found = loaded.published
    source = found.path if found and found.path.is_dir() else None
    tokenizer = loaded.tokenizer_folder or run_folder
    if isinstance(loaded.model, Transformer):
        dimensions = loaded.model.dimensions
        hf_config = found.config if found else hf_config_of(dimensions)
        family = FAMILIES[hf_config["model_type"]]
        rows, shapes = family.rows(dimensions), shapes_of(dimensions)
        tensors = tensors_as(rows, shapes, dtype, loaded.weight)
        hf_config = {"architectures": [family.architecture]} | dict(hf_config)
    else:
        assert found is not None
        hf_config, tensors = found.config, wrapped_tensors(loaded, dtype)
    generation = generation_config(source) if source else None
    write_folder(target, hf_config, tensors, tokenizer=tokenizer, generation=generation)


def wrapped_tensors(loaded: Loaded, dtype: torch.dtype) -> Tensors:
    """Under transformers' own names."""
    names = dense_names(loaded)
    return Tensors(
        {name: tuple(loaded.weight(ours).shape) for name, ours in names.items()},
        dtype,
        lambda name: loaded.weight(names[name]),
    )


def dense_names(loaded: Loaded) -> dict[str, str]:
    """Their name to ours, of a model without adapters and packed matrices."""
    found = {}
    for name, _ in loaded.model.named_parameters():
        path, _, own = name.rpartition(".")
        if ".adapter." not in name:
            own = "weight" if own in ("packed", "absmax", "scales") else own
            found[f"{path}.{own}".removeprefix("lm.")] = f"{path}.{own}"
    return found


def write_adapter(loaded: Loaded, target: Path) -> None:
    """In peft's format."""
    found = loaded.published
    assert found is not None, "adapters are trained on published models"
    write_peft(loaded.model, found.family, found.path, adapter_options(loaded.config), target)
