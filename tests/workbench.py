"""Windows of known tokens, and steps built as a run builds them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from memtrain.config import Config
from memtrain.data.loader import IGNORE_INDEX, Batch
from memtrain.engine import build
from memtrain.engine.step import TrainStep

CPU = torch.device("cpu")


class Scalar(nn.Module):
    """One weight, in the place of the hidden states of every token."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor, starts: Tensor | None = None) -> Tensor:
        return self.head.weight.expand(*tokens.shape, 1)


class Workbench:
    """Builds the step of a config and feeds it windows of generated tokens."""

    def step(self, config: Config) -> TrainStep:
        build.prepare_torch(config)
        model = build.build_model(config, build.build_dimensions(config, 64), CPU)
        return build.build_step(config, model, CPU)

    def samples(self, n: int = 8, seq_len: int = 16, seed: int = 0, ragged: bool = True) -> Batch:
        """`n` samples; ragged ones differ in how many of their targets count."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 64, (n, seq_len + 1), generator=generator)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if ragged:
            for index in range(n):
                targets[index, 1 + (5 * index) % seq_len :] = IGNORE_INDEX
        return Batch(inputs, targets, int((targets != IGNORE_INDEX).sum()))

    def window(self, batch: Batch, micro_batch: int) -> list[Batch]:
        """The same samples in micro-batches of `micro_batch`."""
        parts = zip(batch.tokens.split(micro_batch), batch.targets.split(micro_batch), strict=True)
        return [Batch(x, y, int((y != IGNORE_INDEX).sum())) for x, y in parts]

    def gradients(self, step: TrainStep, window: Sequence[Batch]) -> dict[str, Tensor]:
        torch.manual_seed(1)  # dropout
        step.accumulate(window)
        named = step.model.named_parameters()
        return {name: p.grad.clone() for name, p in named if p.grad is not None}

    def weights(self, step: TrainStep) -> dict[str, Tensor]:
        step.settle()
        return {name: step.model.weight(p).clone() for name, p in step.model.named_parameters()}
