"""Runs an operator for the first time: real tensors become fake ones, and so does what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from memtrain.errors import UserError
from memtrain.phantom.arguments import flat_tensors, written_arguments
from memtrain.phantom.failures import UnsupportedOperator
from memtrain.phantom.kernels import RESULTS
from memtrain.phantom.modules import ModuleWatch
from memtrain.phantom.shapes import rekey
from memtrain.phantom.storages import Storages

UNSUPPORTED = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    NotImplementedError,
)


class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Builds `torch.tensor(data, device=...)` on the CPU first: no kernel of the phantom is real."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)

    @property
    def avoid_device_init(self) -> bool:
        return True


@dataclass(eq=False)
class Fakes:
    """Turns tensors into those of `mode`, with the dispatch keys of device `keys_of` if it is given."""

    mode: FakeTensorMode
    keys_of: torch.device | None
    storages: Storages
    watch: ModuleWatch

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What `func` returns, as tensors of this run."""
        special = None if self.keys_of is None else RESULTS.get(func)
        if special is not None and args[0].device.type == self.storages.device_type:
            return self.rekeyed(special(*args, **kwargs), args)
        try:
            return self.rekeyed(func(*args, **kwargs), args)
        except UNSUPPORTED as error:
            if func._schema.is_mutable and not func._schema.returns:
                return None  # it writes where it was told to (torch._fused_sgd_): no shape to find
            reason = str(error).strip().partition("\n")[0]
            raise UnsupportedOperator(
                f"{func}{self.watch.where} cannot run without data: its result has no shape that "
                f"follows from its inputs' shapes ({type(error).__name__}: {reason[:120]})"
            ) from None

    def faked(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Real tensors (a batch made outside) become fake ones; writing to them is refused."""
        real = []
        for t in flat_tensors(args, kwargs):
            if type(t) is not FakeTensor:
                real.append(t)
            elif t.fake_mode is not self.mode:
                self.storages.adopt(t)
        if not real:
            return args, kwargs
        fakes = {id(t): self._fake_of(t) for t in real}
        for t in written_arguments(func, args, kwargs):
            if id(t) in fakes:
                raise UserError(
                    f"{func}{self.watch.where} writes to a tensor of shape {list(t.shape)} that "
                    "holds real data: make it inside the phantom's `with` block"
                )

        def swap(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return type(value)(swap(item) for item in value)
            return fakes.get(id(value), value)

        return tuple(swap(a) for a in args), {name: swap(v) for name, v in kwargs.items()}

    def _fake_of(self, t: torch.Tensor) -> Any:
        if t.device.type not in ("cpu", "meta"):
            raise UserError(
                f"a real tensor on {t.device} cannot be used on the phantom: move it to the CPU"
            )
        fake = self.mode.from_tensor(t)
        self.storages.see_if_new(fake, "real tensor", t.device.type == "cpu" and t.is_pinned())
        return fake if self.keys_of is None else rekey(self.mode, fake, self.keys_of)

    def rekeyed(self, out: Any, args: Any) -> Any:
        if self.keys_of is None:
            return out
        if isinstance(out, list | tuple):
            return type(out)(self.rekeyed(item, args) for item in out)
        if type(out) is not FakeTensor or out.fake_device == self.keys_of:
            return out
        if any(out is value for value in args):
            return out
        return rekey(self.mode, out, self.keys_of)
