"""One optimizer step over one window of micro-batches. Nothing here waits for the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from memtrain.data.loader import Batch
from memtrain.device import autocast
from memtrain.engine.update import Update
from memtrain.model.language_model import LanguageModel
from memtrain.model.loss import LossFunction


@dataclass
class TrainStep:
    """Calling it makes the step and returns `(loss, gradient norm before clipping, stepped)`, fp32, on the device.

    The gradient is that of the mean loss over all target tokens of the window, however they fall into micro-batches.
    `stepped` is 0 where loss or gradient was not finite, or nothing was to be learned: then nothing has changed.
    """

    model: LanguageModel
    loss_function: LossFunction
    updates: list[Update]
    """Between them they have every parameter that is trained."""
    scaler: GradScaler
    device: torch.device
    compute_dtype: torch.dtype | None
    """What autocast computes in; None: the weights' own type."""
    clip: float
    """Largest gradient norm; 0: no clipping."""
    before_change: Callable[[], None] = lambda: None
    """Called when weights and optimizer state are about to change."""

    def __call__(self, window: Sequence[Batch]) -> Tensor:
        if any(update.steps_in_backward for update in self.updates):
            self.before_change()
        loss = self.accumulate(window)
        norm = self._unscaled_norm()
        learns = any(batch.n_targets for batch in window)
        finite = torch.isfinite(norm) & torch.isfinite(loss)
        stepped = finite if learns else torch.zeros_like(finite)
        factor, skip = self._factor(norm), (~stepped).float()
        self.before_change()
        for update in self.updates:
            update.step(factor, skip, partial(self.accumulate, window))
        self.scaler.update()
        return torch.stack((loss, norm, stepped.float()))

    def accumulate(self, window: Sequence[Batch]) -> Tensor:
        """Form the (scaled) gradient of the window and return its loss."""
        n_targets = sum(batch.n_targets for batch in window)
        losses = []
        for number, batch in enumerate(window, start=1):
            for update in self.updates:
                update.begin(final=number == len(window), learns=n_targets > 0)
            losses.append(self._micro_step(batch, max(1, n_targets)))
        return torch.stack(losses).sum()

    def settle(self) -> None:
        """Finish what is put off until the next forward pass: whoever reads the weights elsewhere calls it first."""
        for update in self.updates:
            update.settle()

    def _micro_step(self, batch: Batch, n_targets: int) -> Tensor:
        """Add one micro-batch's share of the gradient; its share of the window's loss comes back."""
        batch = batch.to(self.device)
        with autocast(self.device, self.compute_dtype):
            hidden = self.model(batch.tokens, batch.starts)
            scale = self._loss_scale()
            head = self.model.head.weight
            loss = self.loss_function(hidden, head, batch.targets, scale / n_targets)
        del hidden, head
        torch.autograd.backward(loss)
        return loss.detach() / scale

    def _loss_scale(self) -> Tensor:
        scale: Tensor = self.scaler.scale(torch.ones((), device=self.device))
        return scale

    def _unscaled_norm(self) -> Tensor:
        """The norm over all gradients. It alone is unscaled: if it is finite, all of them are."""
        norms = {
            parameter: norm for update in self.updates for parameter, norm in update.norms().items()
        }
        ordered = [norms[parameter] for parameter in self.model.parameters() if parameter in norms]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(ordered))
        if not self.scaler.is_enabled():
            return norm
        probe = nn.Parameter(torch.zeros((), device=self.device))
        probe.grad = norm
        self.scaler.unscale_(torch.optim.SGD([probe]))
        return probe.grad

    def _factor(self, norm: Tensor) -> Tensor | None:
        """What the gradients are multiplied by: unscaled and clipped at once; None: as they are."""
        factor = 1 / self._loss_scale() if self.scaler.is_enabled() else None
        if self.clip:
            shrink = torch.clamp(self.clip / (norm + 1e-6), max=1.0)
            factor = shrink if factor is None else shrink * factor
        return factor
