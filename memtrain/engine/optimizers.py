"""Optimizers by name, each of which makes no step where its `found_inf` tensor is 1, and what their state takes."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from memtrain.errors import UserError

Groups = list[dict[str, Any]]


def decay_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> Groups:
    """Weight decay on matrices only; every trained parameter in exactly one group, tied ones once.

    `hidden` tells the matrices of the numbered layers from embedding and head.
    """
    trained = [(name, p) for name, p in named_parameters if p.requires_grad]
    hidden = [p for name, p in trained if is_hidden_matrix(name, p)]
    matrices = [p for name, p in trained if p.ndim >= 2 and not is_hidden_matrix(name, p)]
    vectors = [p for _, p in trained if p.ndim < 2]
    groups = [
        {"params": hidden, "weight_decay": weight_decay, "hidden": True},
        {"params": matrices, "weight_decay": weight_decay, "hidden": False},
        {"params": vectors, "weight_decay": 0.0, "hidden": False},
    ]
    return [group for group in groups if group["params"]]


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Whether it is a matrix of a numbered layer, as in `blocks.3.mlp.up.weight`."""
    return parameter.ndim == 2 and any(part.isdigit() for part in name.split("."))


class HostGuard:
    """Asks on the host whether to step, as torch's GradScaler does, for what cannot take `found_inf` as a tensor."""

    found_inf: Tensor | None = None

    def step(self, closure: None = None) -> None:
        found_inf, self.found_inf = self.found_inf, None
        if found_inf is None or not found_inf.item():
            super().step()  # type: ignore[misc]


@cache
def guarded(cls: type[Optimizer]) -> type[Any]:
    return type(cls.__name__, (HostGuard, cls), {})


class Lion(Optimizer):
    """The sign of an interpolated momentum as update (Chen et al. 2023, arXiv:2302.06675, algorithm 2)."""

    def __init__(self, groups: Groups, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        # One parameter at a time: foreach would hold one more copy of all gradients.
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, lr, (beta1, beta2) = self.state[parameter], group["lr"], group["betas"]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        direction = state["momentum"].lerp(gradient, 1 - beta1).sign_()
        parameter.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
        state["momentum"].lerp_(gradient, 1 - beta2)


class MuonAndAdamW(Optimizer):
    """Muon (Jordan et al. 2024) for groups that are `hidden`, fused AdamW for the others.

    Muon's update is scaled to the RMS of AdamW's (Liu et al. 2025, arXiv:2502.16982), so that one `lr` serves both.
    """

    def __init__(
        self,
        groups: Groups,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
    ) -> None:
        super().__init__(groups, {"lr": lr})
        hidden, others = self._split()
        self._parts: list[Optimizer] = []
        if hidden:
            muon = torch.optim.Muon(hidden, momentum=momentum, adjust_lr_fn="match_rms_adamw")
            self._parts.append(muon)
        if others:
            self._parts.append(AdamW(others, betas=betas, eps=eps, fused=True))

    def _split(self) -> tuple[Groups, Groups]:
        """The groups themselves, so that what sets an `lr` here sets it there."""
        hidden = [group for group in self.param_groups if group["hidden"]]
        return hidden, [group for group in self.param_groups if not group["hidden"]]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        groups = [part for part in self._split() if part]
        for part, part_groups in zip(self._parts, groups, strict=True):
            # Again every time: load_state_dict puts new ones in the place of both.
            part.param_groups, part.state = part_groups, self.state
            part.step()


def make_adamw(
    groups: Groups, lr: float, betas: tuple[float, float], eps: float, implementation: str
) -> Optimizer:
    cls = AdamW if implementation == "fused" else guarded(AdamW)
    made: Optimizer = cls(groups, lr=lr, betas=betas, eps=eps, **kernels(implementation))
    return made


def make_sgd(groups: Groups, lr: float, momentum: float, implementation: str) -> Optimizer:
    cls = SGD if implementation == "fused" else guarded(SGD)
    optimizer: Optimizer = cls(groups, lr=lr, momentum=momentum, **kernels(implementation))
    if momentum:
        # A first step that found_inf skips would leave torch's fused kernel with buffers it never wrote.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def kernels(implementation: str) -> dict[str, bool]:
    """torch's switches for `fused`, `foreach` or `for_loop`."""
    return {"fused": implementation == "fused", "foreach": implementation == "foreach"}


def make_8bit_adamw(
    name: str, groups: Groups, lr: float, betas: tuple[float, float], eps: float
) -> Optimizer:
    try:
        from memtrain.engine.adamw_8bit import AdamW8bit, PagedAdamW8bit
    except ImportError as error:
        raise UserError(
            f"optimizer={name}: needs bitsandbytes; pip install 'memtrain[quantized]'"
        ) from error
    cls = AdamW8bit if name == "adamw_8bit" else PagedAdamW8bit
    return guarded(cls)(groups, lr=lr, betas=betas, eps=eps)  # type: ignore[no-any-return]


def make_optimizer(
    name: str,
    groups: Groups,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    momentum: float,
    implementation: str = "fused",
) -> Optimizer:
    """`adamw` (Loshchilov and Hutter 2019), `adamw_8bit`, `paged_adamw_8bit`, `lion`, `muon`, `adafactor` or `sgd`.

    `groups` are those of `decay_groups`. Raises UserError where what it needs is not installed.
    """
    if name == "adamw":
        return make_adamw(groups, lr, betas, eps, implementation)
    if name == "sgd":
        return make_sgd(groups, lr, momentum, implementation)
    if name == "lion":
        return guarded(Lion)(groups, lr, betas)  # type: ignore[no-any-return]
    if name == "muon":
        return guarded(MuonAndAdamW)(groups, lr, betas, eps, momentum)  # type: ignore[no-any-return]
    if name == "adafactor":
        return guarded(Adafactor)(groups, lr=lr)  # type: ignore[no-any-return]
    return make_8bit_adamw(name, groups, lr, betas, eps)


class StateSize(NamedTuple):
    bytes_per_parameter: float
    """Optimizer state of all kinds but fp32 masters."""
    share_32_bit: float | None
    """Of an 8-bit optimizer: share of the parameters whose state stayed in 32 bits; None for others."""


def state_bytes_per_parameter(states: Iterable[tuple[Tensor, Mapping[str, Any]]]) -> StateSize:
    """What state really takes, from parameters with theirs: `optimizer.state.items()`, after the first step.

    A tensor that several parameters share counts once.
    """
    states = list(states)
    named = ((name, value) for _, state in states for name, value in state.items())
    tensors = {id(v): v for name, v in named if isinstance(v, Tensor) and name != "master"}
    n_parameters = sum(p.numel() for p, _ in states)
    # `state1` is what bitsandbytes calls a first moment.
    quantized = [(p.numel(), state["state1"].dtype) for p, state in states if "state1" in state]
    n_32_bit = sum(n for n, dtype in quantized if dtype == torch.float32)
    return StateSize(
        sum(tensor.nbytes for tensor in tensors.values()) / max(1, n_parameters),
        n_32_bit / sum(n for n, _ in quantized) if quantized else None,
    )
