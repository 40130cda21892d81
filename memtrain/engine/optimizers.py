"""Optimizers by name, each of which makes no step where its `found_inf` tensor is 1."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer


def decay_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> list[dict[str, Any]]:
    """Weight decay on matrices only; every trained parameter in exactly one group, tied ones once."""
    trained = [p for _, p in named_parameters if p.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2]
    vectors = [p for p in trained if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class Adafactor(torch.optim.Adafactor):
    """torch's Adafactor reads norms on the host as it goes, so it may ask there whether to step, too."""

    found_inf: Tensor | None = None

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        found_inf, self.found_inf = self.found_inf, None
        if found_inf is None or not found_inf.item():
            super().step()  # type: ignore[no-untyped-call]


def make_sgd(groups: list[dict[str, Any]], lr: float, momentum: float) -> Optimizer:
    optimizer = SGD(groups, lr=lr, momentum=momentum, fused=True)
    if momentum:
        # A first step that found_inf skips would leave torch's fused kernel with buffers it never wrote.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def make_optimizer(
    name: str,
    groups: list[dict[str, Any]],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    momentum: float,
) -> Optimizer:
    """`adamw` (Loshchilov and Hutter 2019, fused), `sgd` (fused) or `adafactor` (Shazeer and Stern 2018)."""
    if name == "adamw":
        return AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
    if name == "sgd":
        return make_sgd(groups, lr, momentum)
    return Adafactor(groups, lr=lr)
