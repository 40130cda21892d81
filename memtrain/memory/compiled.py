"""torch.compile in place: fewer kernels, and fewer tensors between them.

A compiled part hands out its parameters' gradients together: while they are added to those of earlier micro-batches,
they exist twice, one block's or, where all is one part, the whole model's."""

import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.errors import UserError
from memtrain.model.language_model import LanguageModel


def compile_blocks(model: LanguageModel) -> None:
    """Each block by itself: all are alike, so the code is made once. Segments and saved-tensor hooks stay outside."""
    for block in model.blocks:
        compile_training(block)


def compile_training(module: nn.Module) -> None:
    """Compile what `module` does in training, for the shape that it meets first; all else runs as it is written.

    So a run compiles once: neither validation, nor a sample of text, nor the smaller micro-batch at the end of an epoch
    starts the compiler again. Parameter names stay as they are. Raises UserError without a C++ compiler.
    """
    if not any(map(shutil.which, ("c++", "g++", "gcc", "clang++"))):
        raise UserError("compile: needs a C++ compiler on PATH; install g++, or use compile=off")
    eager: Callable[..., Tensor] = module.forward
    compiled = torch.compile(eager, dynamic=False)
    shape: torch.Size | None = None

    def forward(x: Tensor, *rest: Any) -> Tensor:
        nonlocal shape
        if not module.training:
            return eager(x, *rest)
        shape = shape or x.shape
        return (compiled if x.shape == shape else eager)(x, *rest)

    module.forward = forward
