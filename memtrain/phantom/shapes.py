"""Fake tensors made from a shape, or from each other, without FakeTensorMode."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

META = torch.device("meta")


class Template:
    """A tensor to make again. `offset` is None for one with a storage of its own, and otherwise
    where a view starts, counted from the start of the operator's first argument."""

    __slots__ = ("device", "dtype", "offset", "shape", "strides")

    def __init__(self, t: FakeTensor, base: FakeTensor | None) -> None:
        self.shape, self.strides, self.dtype = t.shape, t.stride(), t.dtype
        self.device = t.fake_device
        self.offset = None if base is None else t.storage_offset() - base.storage_offset()


def make_tensor(mode: FakeTensorMode, keys_of: Any, template: Template, base: Any) -> FakeTensor:
    """A fake tensor as `template` says, with the dispatch keys of device `keys_of`."""
    guard = torch._C._DisableTorchDispatch()
    try:
        if template.offset is None:
            elem = torch.empty_strided(
                template.shape, template.strides, dtype=template.dtype, device=META
            )
        else:
            elem = torch.empty(0, dtype=template.dtype, device=META)
            offset = base.storage_offset() + template.offset
            elem.set_(base.untyped_storage(), offset, template.shape, template.strides)
        return with_keys(mode, elem, template.device, keys_of)
    finally:
        del guard


def with_keys(mode: FakeTensorMode, elem: Any, device: Any, keys_of: Any) -> FakeTensor:
    """`elem` as a fake tensor on `device` that dispatches like a tensor of device `keys_of`.

    With the keys of one device on all of them `parameter.data = elsewhere` is legal, as it is
    between CPU and CUDA.
    """
    t = FakeTensor(mode, elem, device if keys_of is None else keys_of)
    if t.fake_device != device:
        t.fake_device = device
    return t


def rekey(mode: FakeTensorMode, t: Any, keys_of: torch.device) -> Any:
    """The same fake tensor with the dispatch keys of device `keys_of`."""
    guard = torch._C._DisableTorchDispatch()
    try:
        elem = torch.empty(0, dtype=t.dtype, device=META)
        elem.set_(t.untyped_storage(), t.storage_offset(), t.shape, t.stride())
        new = with_keys(mode, elem, t.fake_device, keys_of)
    finally:
        del guard
    if t.constant is not None:
        new.constant = t.constant
        mode.fake_tensor_converter.add_constant_storage_mapping(new)
    return new
