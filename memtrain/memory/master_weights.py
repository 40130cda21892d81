"""fp32 master weights and optimizer state, on the device or on the host, behind low-precision or far-away weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]


class MasterWeights(Optimizer):
    """Steps fp32 copies of the weights on `master_device`, one parameter at a time, and copies the result back.

    One parameter at a time: only one fp32 gradient exists beside the weights. `found_inf`, a tensor on the
    parameters' device, makes the step change nothing where it is 1, as in torch's fused optimizers.
    """

    def __init__(
        self, groups: list[dict[str, Any]], make: MakeOptimizer, master_device: torch.device
    ) -> None:
        super().__init__(groups, {})
        self.found_inf: Tensor | None = None
        self._inner: list[tuple[dict[str, Any], Tensor, Tensor, Optimizer]] = []
        for group in self.param_groups:
            settings = {key: value for key, value in group.items() if key != "params"}
            for weight in group["params"]:
                master = weight.detach().to(master_device, torch.float32, copy=True)
                optimizer = make([{**settings, "params": [master]}])
                group.setdefault("lr", optimizer.param_groups[0]["lr"])
                self._inner.append((group, weight, master, optimizer))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        found_inf = self.found_inf
        for group, weight, master, optimizer in self._inner:
            if weight.grad is None:
                continue
            if found_inf is not None and found_inf.device != master.device:
                found_inf = found_inf.to(master.device)
            master.grad = weight.grad.to(master.device, torch.float32)
            optimizer.param_groups[0]["lr"] = group["lr"]
            optimizer.found_inf = found_inf  # type: ignore[attr-defined]
            optimizer.step()
            master.grad = None
            weight.copy_(master)
