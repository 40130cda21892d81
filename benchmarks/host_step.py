"""How fast the optimizer steps on the host: against a plain copy of as many bytes, and against torch's fused AdamW.

    python benchmarks/host_step.py
    python benchmarks/host_step.py --tensors 16 --elements 4194304

`same_tensors` are fp32 weights that live on the host (`offload=params`), with fp32 gradients that are not clipped: what
the host does is then what `torch.optim.AdamW(fused=True)` does with the same tensors, and must not take longer (3 % are
noise). The other cases are the whole way of `offload=optimizer`: gradient to fp32, times the clip factor, AdamW on
masters and moments, new weights to a bf16 buffer; they are held against a loop with the same work around one fused
AdamW. All are to reach 80 % of the bytes per second of a copy.
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

GOALS = {"copy": 0.8, "fused": 0.97}
STATE_BYTES = 3 * 4 + 3 * 4
"""Master and two moments, read and written."""
WEIGHT_BYTES = {torch.bfloat16: 2, torch.float32: 0}
"""Written beside the master; an fp32 weight is its own master."""


class Weights(MemoryWeights):
    """On the host; nobody waits for them."""

    def written(self, weight: nn.Parameter) -> None:
        """It is there."""


class Case:
    """A host optimizer over `n_tensors` weights, its gradients, and what it is held against."""

    def __init__(
        self,
        n_tensors: int,
        n_elements: int,
        dtype: torch.dtype,
        clips: bool,
        weight_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.make = partial(
            make_optimizer, "adamw", lr=1e-3, betas=(0.9, 0.95), eps=1e-8, momentum=0.0
        )
        self.weights = [
            nn.Parameter(torch.randn(n_elements, dtype=weight_dtype)) for _ in range(n_tensors)
        ]
        for weight in self.weights:
            weight.grad_dtype = dtype
        self.gradient = torch.randn(n_elements).to(dtype)
        self.factor = torch.tensor(0.5) if clips else None
        self.n_parameters = n_tensors * n_elements
        self.bytes_per_parameter = dtype.itemsize + STATE_BYTES + WEIGHT_BYTES[weight_dtype]
        self.writes = weight_dtype != torch.float32
        self.update = self._host_optimizer()

    def _host_optimizer(self) -> HostOptimizer:
        home = Weights(DEVICE)
        for weight in self.weights:
            home.put(weight)
        update = HostOptimizer(
            [{"params": self.weights, "lr": 1e-3, "weight_decay": 0.1}],
            device=DEVICE,
            accumulate=False,
            weights=home,
            states=MemoryState(self.make),
            gradients=MemoryGradients(DEVICE),
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

    def fused_s(self) -> Callable[[], float]:
        """One fused AdamW over fp32 masters, with the same work around it."""
        masters = [weight.detach().float() for weight in self.weights]
        buffers = [torch.empty_like(weight) for weight in self.weights]
        gradients = [self.gradient.clone() for _ in masters]
        optimizer = torch.optim.AdamW(
            masters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

        def give() -> None:
            for master, gradient in zip(masters, gradients, strict=True):
                master.grad = gradient.float()
                if self.factor is not None:
                    master.grad.mul_(self.factor)

        def loop() -> None:
            give()
            optimizer.step()
            for buffer, master in zip(buffers if self.writes else [], masters, strict=self.writes):
                buffer.copy_(master.detach())

        return lambda: seconds(loop)


def seconds(call: Callable[[], Any]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def compare(case: Case, pairs: int) -> dict[str, Any]:
    others = {
        "copy": case.copy_s(),
        "fused": case.fused_s(),
    }
    found, steps = {}, []
    for name, other in others.items():
        timed = alternate(case.step_s, other, pairs)
        steps += [step_s for step_s, _ in timed]
        share, goal = spread([other_s / step_s for step_s, other_s in timed]), GOALS[name]
        reached = share["median"] >= goal
        found[name] = {"share_of_its_speed": share, "goal": goal, "reached": reached}
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
        goal = f"; {other['goal']}: {other['reached']}"
        cells.append(
            f"{share['median']:.2f} ({share['low_quartile']:.2f} to {share['high_quartile']:.2f}{goal})"
        )
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--tensors", type=int, default=4)
    parser.add_argument("--elements", type=int, default=2**24, help="of each: 4096 x 4096")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    same = Case(arguments.tensors, arguments.elements, torch.float32, False, torch.float32)
    found = {"same_tensors": compare(same, arguments.pairs)}
    del same
    for dtype in (torch.bfloat16, torch.float32):
        for clips in (False, True):
            name = f"{str(dtype).removeprefix('torch.')} gradients{', clipped' if clips else ''}"
            case = Case(arguments.tensors, arguments.elements, dtype, clips)
            found[name] = compare(case, arguments.pairs)
    print_rows(
        f"host step, median of {arguments.pairs} pairs",
        ("", "parameters/s", "share of a copy's speed", "of fused AdamW's"),
        [row(*item) for item in found.items()],
    )
    setup = {"tensors": arguments.tensors, "elements": arguments.elements}
    print(save_result("host_step", ("torch", "memtrain"), {"setup": setup, **found}))


if __name__ == "__main__":
    main()
