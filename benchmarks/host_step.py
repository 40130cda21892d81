"""How fast the optimizer steps on the host: against a plain copy of as many bytes, and against torch's fused AdamW.

    python benchmarks/host_step.py
    python benchmarks/host_step.py --pairs 15 --tensors 16 --elements 4194304

The whole way of `offload=optimizer`: gradient to fp32, times the clip factor, AdamW on masters and moments, new weights
to a bf16 buffer. To reach: 80 % of the bytes per second of a copy, and to be no slower than the loop that one would
write around one `AdamW(fused=True)` over the same tensors. That optimizer's step alone, which converts and scales no
gradient and writes no weight, is shown beside it.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measure import DEVICE, alternate, print_rows, save_result, spread
from torch import nn

from memtrain.engine.optimizers import make_optimizer
from memtrain.memory.host_optimizer import HostOptimizer, MemoryGradients, MemoryState
from memtrain.memory.param_offload import MemoryWeights

GOALS = {"copy": 0.8, "fused_loop": 1.0, "fused_step_alone": None}
STATE_BYTES = 3 * 4 + 3 * 4
"""Master and two moments, read and written."""
WEIGHT_BYTES = 2


class Weights(MemoryWeights):
    """bf16 on the host; nobody waits for them."""

    def written(self, weight: nn.Parameter) -> None:
        """It is there."""


class Case:
    """A host optimizer over `n_tensors` bf16 weights, its gradients, and what it is held against."""

    def __init__(self, n_tensors: int, n_elements: int, dtype: torch.dtype, clips: bool) -> None:
        self.make = partial(
            make_optimizer, "adamw", lr=1e-3, betas=(0.9, 0.95), eps=1e-8, momentum=0.0
        )
        self.weights = [
            nn.Parameter(torch.randn(n_elements, dtype=torch.bfloat16)) for _ in range(n_tensors)
        ]
        for weight in self.weights:
            weight.grad_dtype = dtype
        self.gradient = torch.randn(n_elements).to(dtype)
        self.factor = torch.tensor(0.5) if clips else None
        self.n_parameters = n_tensors * n_elements
        self.bytes_per_parameter = dtype.itemsize + STATE_BYTES + WEIGHT_BYTES
        self.update = self._host_optimizer()

    def _host_optimizer(self) -> HostOptimizer:
        home = Weights(pinned=False)
        for weight in self.weights:
            home.put(weight)
        update = HostOptimizer(
            [{"params": self.weights, "lr": 1e-3, "weight_decay": 0.1}],
            device=DEVICE,
            accumulate=False,
            weights=home,
            states=MemoryState(self.make),
            gradients=MemoryGradients(pinned=False),
        )
        update.start(self.weights)
        return update

    def step_s(self) -> float:
        """Seconds of the step alone: gradients have arrived before it."""
        for weight in self.weights:
            weight.grad = self.gradient
        self.update.norms()
        start_s = time.perf_counter()
        self.update.step(self.factor, torch.zeros(()), lambda: None)
        self.update.settle()
        return time.perf_counter() - start_s

    def copy_s(self) -> Callable[[], float]:
        """A copy that reads half of the step's bytes and writes the other half."""
        source = torch.ones(self.n_parameters * self.bytes_per_parameter // 2 // 4)
        target = torch.empty_like(source)
        return lambda: seconds(lambda: target.copy_(source))

    def fused_s(self, step_alone: bool) -> Callable[[], float]:
        """One fused AdamW over fp32 masters; not alone: with the same work around it."""
        masters = [weight.detach().float() for weight in self.weights]
        buffers = [torch.empty_like(weight) for weight in self.weights]
        gradients = [self.gradient.clone() for _ in masters]
        optimizer = torch.optim.AdamW(
            masters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

        def give() -> None:
            for master, gradient in zip(masters, gradients, strict=True):
                master.grad = gradient.float()
                if self.factor is not None and not step_alone:
                    master.grad.mul_(self.factor)

        def loop() -> None:
            give()
            optimizer.step()
            for buffer, master in zip(buffers, masters, strict=True):
                buffer.copy_(master.detach())

        give()
        return lambda: seconds(optimizer.step if step_alone else loop)


def seconds(call: Callable[[], Any]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def compare(case: Case, pairs: int) -> dict[str, Any]:
    others = {
        "copy": case.copy_s(),
        "fused_loop": case.fused_s(step_alone=False),
        "fused_step_alone": case.fused_s(step_alone=True),
    }
    found, steps = {}, []
    for name, other in others.items():
        timed = alternate(case.step_s, other, pairs)
        steps += [step_s for step_s, _ in timed]
        share, goal = spread([other_s / step_s for step_s, other_s in timed]), GOALS[name]
        found[name] = {"share_of_its_speed": share, "goal": goal}
        found[name]["reached"] = None if goal is None else share["median"] >= goal
    rate = spread([case.n_parameters / step_s for step_s in steps])
    return {
        "parameters_per_second": rate,
        "bytes_per_parameter": case.bytes_per_parameter,
        "share_of": found,
    }


def row(name: str, found: dict[str, Any]) -> list[str]:
    cells = [name, f"{found['parameters_per_second']['median'] / 1e6:.0f} M"]
    for other in found["share_of"].values():
        share = other["share_of_its_speed"]
        goal = "" if other["goal"] is None else f"; {other['goal']}: {other['reached']}"
        cells.append(
            f"{share['median']:.2f} ({share['low_quartile']:.2f} to {share['high_quartile']:.2f}{goal})"
        )
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--tensors", type=int, default=8)
    parser.add_argument("--elements", type=int, default=2**22, help="of each tensor")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        for clips in (False, True):
            name = f"{str(dtype).removeprefix('torch.')} gradients{', clipped' if clips else ''}"
            case = Case(arguments.tensors, arguments.elements, dtype, clips)
            found[name] = compare(case, arguments.pairs)
    print_rows(
        f"host step, median of {arguments.pairs} pairs",
        (
            "",
            "parameters/s",
            "share of a copy's speed",
            "of a fused loop's",
            "of the fused step alone",
        ),
        [row(*item) for item in found.items()],
    )
    setup = {"tensors": arguments.tensors, "elements": arguments.elements}
    print(save_result("host_step", ("torch", "memtrain"), {"setup": setup, **found}))


if __name__ == "__main__":
    main()
