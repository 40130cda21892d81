"""One optimizer step over one window of micro-batches. Nothing here waits for the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from memtrain.data.loader import Batch
from memtrain.device import autocast
from memtrain.model.hf import LanguageModel
from memtrain.model.loss import LossFunction


@dataclass
class TrainStep:
    """Calling it makes the step and returns `(loss, gradient norm before clipping, stepped)`, fp32, on the device.

    The gradient is that of the mean loss over all target tokens of the window, however they fall into micro-batches.
    `stepped` is 0 where loss or gradient was not finite, or nothing was to be learned: then nothing has changed.
    """

    model: LanguageModel
    loss_function: LossFunction
    optimizer: Optimizer
    scaler: GradScaler
    device: torch.device
    compute_dtype: torch.dtype | None
    """What autocast computes in; None: the weights' own type."""
    clip: float
    """Largest gradient norm; 0: no clipping."""

    def __call__(self, window: Sequence[Batch]) -> Tensor:
        loss = self.accumulate(window)
        self.scaler.unscale_(self.optimizer)
        norm = self._clip()
        learns = any(batch.n_targets for batch in window)
        finite = torch.isfinite(norm) & torch.isfinite(loss)
        stepped = finite if learns else torch.zeros_like(finite)
        self.optimizer.found_inf = (~stepped).float()  # type: ignore[attr-defined]
        self.optimizer.step()
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack((loss, norm, stepped.float()))

    def accumulate(self, window: Sequence[Batch]) -> Tensor:
        """Leave the (scaled) gradient of the window in the parameters and return its loss."""
        n_targets = max(1, sum(batch.n_targets for batch in window))
        return torch.stack([self._micro_step(batch, n_targets) for batch in window]).sum()

    def _micro_step(self, batch: Batch, n_targets: int) -> Tensor:
        """Add one micro-batch's share of the gradient; its share of the window's loss comes back."""
        batch = batch.to(self.device)
        with autocast(self.device, self.compute_dtype):
            hidden = self.model(batch.tokens, batch.starts)
            scale = self.scaler.scale(torch.ones((), device=self.device))
            head = self.model.head.weight
            loss = self.loss_function(hidden, head, batch.targets, scale / n_targets)
        del hidden, head
        torch.autograd.backward(loss)
        return loss.detach() / scale

    def _clip(self) -> Tensor:
        """Clip to `clip` and return the norm before it, over all gradients, in fp32."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        if self.clip:
            torch._foreach_mul_(gradients, torch.clamp(self.clip / (norm + 1e-6), max=1.0))
        return norm
