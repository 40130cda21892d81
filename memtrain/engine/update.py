"""From the gradient of a window to new weights: what every way to do it offers the step, and the plain way."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memtrain.device import placed

State = dict[str, Tensor]
"""Optimizer state of one parameter, by torch's names; `master` is its fp32 copy, where there is one."""


class Update(Protocol):
    """Steps some of the model's parameters. One window: `begin` before each micro-batch, `norms` once, `step` once."""

    param_groups: list[dict[str, Any]]
    """As in torch.optim; `lr` is what the schedule sets."""
    steps_in_backward: bool
    """Weights change before `step` is called."""

    def begin(self, final: bool, learns: bool) -> None:
        """A micro-batch is next. `final`: with it the gradient is whole. `learns`: the window has targets."""

    def norms(self) -> dict[nn.Parameter, Tensor]:
        """Norm of each gradient as it stands, fp32, () on the device."""

    def step(self, factor: Tensor | None, skip: Tensor, again: Callable[[], object]) -> None:
        """Step with `factor` x the gradient, and drop it. Where `skip` is 1 nothing else changes; both fp32, ().

        `again` makes the same gradient a second time.
        """

    def settle(self) -> None:
        """What has been put off until the weights are read is done now."""

    def state(self, parameter: nn.Parameter) -> State:
        """A view or copy of what the optimizer knows of `parameter`; before its first step nothing but a master."""

    def load_state(self, parameter: nn.Parameter, state: State) -> None:
        """Go on with a saved state, which always has the fp32 `master`."""


def parameters_of(update: Update) -> list[nn.Parameter]:
    return [parameter for group in update.param_groups for parameter in group["params"]]


class PlainUpdate:
    """One torch optimizer over all parameters, where they are."""

    steps_in_backward = False

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def begin(self, final: bool, learns: bool) -> None:
        """Gradients add up where they are."""

    def norms(self) -> dict[nn.Parameter, Tensor]:
        gradients = self._gradients()
        norms = torch._foreach_norm(list(gradients.values()), 2, dtype=torch.float32)
        return dict(zip(gradients, norms, strict=True))

    def step(self, factor: Tensor | None, skip: Tensor, again: Callable[[], object]) -> None:
        if factor is not None:
            torch._foreach_mul_(list(self._gradients().values()), factor)
        self.optimizer.found_inf = skip  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def settle(self) -> None:
        """Nothing is put off."""

    def state(self, parameter: nn.Parameter) -> State:
        return dict(self.optimizer.state.get(parameter, {}))

    def load_state(self, parameter: nn.Parameter, state: State) -> None:
        (group,) = (g for g in self.param_groups if any(p is parameter for p in g["params"]))
        self.optimizer.state[parameter] = placed(state, parameter, bool(group.get("fused")))

    def _gradients(self) -> dict[nn.Parameter, Tensor]:
        return {p: p.grad for p in parameters_of(self) if p.grad is not None}
