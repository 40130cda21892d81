"""Optimizer steps one parameter at a time, for weights, moments or gradients that are not all fp32 and all there.

What a step needs in fp32 (a gradient, a weight without a master) then exists for one parameter, not for the model.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memtrain.device import placed, random_states, set_random_states

MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]
Round = Callable[[Tensor, Tensor], None]
"""Writes an fp32 tensor into a bf16 one."""
Clipping = Literal["two_pass", "per_parameter"]


class _Stepper(Protocol):
    """One weight and what its optimizer knows of it."""

    def step(self, gradient: Tensor, lr: float, skip: Tensor) -> None:
        """Step with an fp32 gradient, or change nothing where `skip` is 1."""

    state: dict[str, Tensor]


class _Kept:
    """The optimizer updates the weight itself, if that is fp32, else an fp32 master of it."""

    def __init__(self, weight: nn.Parameter, settings: dict[str, Any], make: MakeOptimizer) -> None:
        self._weight = weight.detach()
        self._target = weight.detach().float()
        self._optimizer = make([{**settings, "params": [self._target]}])

    def step(self, gradient: Tensor, lr: float, skip: Tensor) -> None:
        self._target.grad = gradient
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.found_inf = skip  # type: ignore[attr-defined]
        self._optimizer.step()
        self._target.grad = None
        if self._has_master:
            self._weight.copy_(self._target)

    @property
    def _has_master(self) -> bool:
        return self._target.dtype != self._weight.dtype

    @property
    def state(self) -> dict[str, Tensor]:
        state = dict(self._optimizer.state.get(self._target, {}))
        return {**state, "master": self._target} if self._has_master else state

    @state.setter
    def state(self, state: dict[str, Tensor]) -> None:
        if self._has_master:
            self._target.copy_(state["master"])
        fused = bool(self._optimizer.param_groups[0].get("fused"))
        self._optimizer.state[self._target] = placed(state, self._target, fused)


class _Rounded:
    """bf16 weight and bf16 moments, fp32 while they are updated, written back by `round_to`."""

    def __init__(
        self, weight: nn.Parameter, settings: dict[str, Any], make: MakeOptimizer, round_to: Round
    ) -> None:
        self._weight, self._settings, self._make = weight.detach(), settings, make
        self._round = round_to
        self._state: dict[str, Any] = {}

    def step(self, gradient: Tensor, lr: float, skip: Tensor) -> None:
        target = self._weight.float()
        optimizer = self._make([{**self._settings, "params": [target], "lr": lr}])
        if self._state:
            optimizer.state[target] = {
                name: value.float() if self._is_moment(value) else value
                for name, value in self._state.items()
            }
        optimizer.found_inf = skip  # type: ignore[attr-defined]
        target.grad = gradient
        optimizer.step()
        self._round(self._weight, target)
        for name, value in optimizer.state[target].items():
            self._keep(name, value)

    def _keep(self, name: str, value: Tensor) -> None:
        if self._is_moment(value):
            if name not in self._state:
                self._state[name] = torch.empty_like(value, dtype=self._weight.dtype)
            self._round(self._state[name], value)
        else:
            self._state[name] = value

    @property
    def state(self) -> dict[str, Any]:
        return self._state

    @state.setter
    def state(self, state: dict[str, Tensor]) -> None:
        self._state = placed(state, self._weight, fused=True)

    def _is_moment(self, value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and value.shape == self._weight.shape
            and value.is_floating_point()
        )


class PerParameter:
    """Steps each parameter by an optimizer of its own.

    With `in_backward` each steps as soon as its gradient is whole, and the gradient is freed: no two of them need
    exist at once. `two_pass` makes the gradients twice, first for their norm, then for the step: exact, at the price
    of a second forward and backward. `per_parameter` makes them once and clips each to `clip` by its own norm; what is
    not finite skips its own parameter alone. A window is then one micro-batch.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        make: MakeOptimizer,
        *,
        round_to: Round | None = None,
        in_backward: Clipping | None = None,
        clip: float = 0.0,
    ) -> None:
        self.param_groups = groups
        self._in_backward = in_backward
        self.steps_in_backward = in_backward is not None
        self._clip = clip
        self._steppers: dict[nn.Parameter, _Stepper] = {}
        self._norms: dict[nn.Parameter, Tensor] = {}
        self._stepping = False
        self._factor: Tensor | None = None
        self._skip: Tensor | None = None
        for group in groups:
            self._add(group, make, round_to)

    def _add(self, group: dict[str, Any], make: MakeOptimizer, round_to: Round | None) -> None:
        settings = {key: value for key, value in group.items() if key != "params"}
        for weight in group["params"]:
            if round_to is not None and weight.dtype != torch.float32:
                self._steppers[weight] = _Rounded(weight, settings, make, round_to)
            else:
                self._steppers[weight] = _Kept(weight, settings, make)
            if self._in_backward:
                weight.register_post_accumulate_grad_hook(partial(self._on_gradient, group))

    # The window

    def begin(self, final: bool, learns: bool) -> None:
        if self._in_backward and not self._stepping:
            assert final, "gradients of several micro-batches would have to be kept"
            self._norms.clear()
            self._learns = learns
            device = next(iter(self._steppers)).device
            self._random_states = random_states(device)

    def norms(self) -> dict[nn.Parameter, Tensor]:
        if self._in_backward:
            return self._norms
        return {p: norm_of(p.grad) for p in self._steppers if p.grad is not None}

    @torch.no_grad()
    def step(self, factor: Tensor | None, skip: Tensor, again: Callable[[], object]) -> None:
        if self._in_backward == "two_pass":
            self._step_in_second_pass(factor, skip, again)
        elif not self._in_backward:
            for group, weight in self._weights():
                if weight.grad is not None:
                    gradient, weight.grad = weight.grad, None
                    self._step_one(weight, group["lr"], gradient, factor, skip)

    def settle(self) -> None:
        """Nothing is put off."""

    def state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return self._steppers[parameter].state

    def load_state(self, parameter: nn.Parameter, state: dict[str, Tensor]) -> None:
        self._steppers[parameter].state = state

    def _weights(self) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
        return ((group, weight) for group in self.param_groups for weight in group["params"])

    def _step_one(
        self, weight: nn.Parameter, lr: float, gradient: Tensor, factor: Tensor | None, skip: Tensor
    ) -> None:
        if factor is None:
            gradient = gradient.float()
        elif gradient.dtype == torch.float32:
            gradient.mul_(factor)
        else:  # with a dimension the factor makes the product fp32, in one pass
            gradient = gradient * factor.reshape([1] * gradient.ndim)
        self._steppers[weight].step(gradient, lr, skip)

    # In backward

    def _step_in_second_pass(
        self, factor: Tensor | None, skip: Tensor, again: Callable[[], object]
    ) -> None:
        """The random state is that of the first pass, so the gradients are the same."""
        set_random_states(next(iter(self._steppers)).device, self._random_states)
        self._stepping, self._factor, self._skip = True, factor, skip
        try:
            with torch.enable_grad():
                again()
        finally:
            self._stepping, self._factor, self._skip = False, None, None

    @torch.no_grad()
    def _on_gradient(self, group: dict[str, Any], weight: nn.Parameter) -> None:
        assert weight.grad is not None
        gradient, weight.grad = weight.grad, None
        if self._stepping:
            assert self._skip is not None
            self._step_one(weight, group["lr"], gradient, self._factor, self._skip)
            return
        norm = self._norms[weight] = norm_of(gradient)
        if self._in_backward == "per_parameter" and self._learns:
            factor = torch.clamp(self._clip / (norm + 1e-6), max=1.0) if self._clip else None
            self._step_one(weight, group["lr"], gradient, factor, (~torch.isfinite(norm)).float())


def norm_of(gradient: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float32)
    return norm
