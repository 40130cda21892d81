"""One operator, run on fake tensors quickly: by key from a table of results seen before.

A fake operator is a function of its arguments' metadata. The first call of a kind goes through
FakeTensorMode; what it returned, and what it costs, is kept as an `Entry` and replayed after.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memtrain.phantom.arguments import flat_tensors, result_tensors
from memtrain.phantom.flops import FLOPS
from memtrain.phantom.kernels import CUBLAS, TEMPORARIES
from memtrain.phantom.shapes import Template

aten = torch.ops.aten
NOT_REPLAYED = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
}
ABSOLUTE_OFFSET = {aten.as_strided.default, aten.as_strided_.default}
PLAIN = (int, float, bool, type(None), str, torch.dtype, torch.device, torch.memory_format)
COPIES = {aten._to_copy.default, aten.copy_.default}
TRANSFERS = ("h2d", "d2h", "nvme_read", "nvme_write")
"""The kinds of operators that move their tensors to another place."""
FILES = {"file_read": "nvme_read", "file_write": "nvme_write"}
"""Operators of any library that move their tensors from or to a file, by name, and the kind they are."""


@dataclass(eq=False, slots=True)
class Entry:
    """What one call of an operator returns and costs."""

    name: str
    container: type | None = None
    results: list[Any] = field(default_factory=list)
    returns_arg: int | None = None
    views: bool = False
    on_device: bool = False
    cublas: bool = False
    temporaries: list[int] = field(default_factory=list)
    kind: str = "other"
    flops: int = 0
    moved_bytes: int = 0
    dtype: str = ""
    calls: list[int] = field(default_factory=lambda: [0, 0, 0, 0])  # by phase


def metadata_key(func: Any, args: Any, kwargs: Any, mode: FakeTensorMode) -> tuple[Any, ...] | None:
    """What the result depends on; None if that is more than metadata (a constant's value).

    None too for a tensor that is not of `mode`: it is to be counted first.
    """
    parts: list[Any] = [func, torch.get_default_dtype()]
    if not _extend(parts, args, mode):
        return None
    if kwargs:
        for name, value in kwargs.items():
            parts.append(name)
            if not _extend(parts, (value,), mode):
                return None
    return tuple(parts)


def _extend(parts: list[Any], values: Any, mode: FakeTensorMode) -> bool:
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if (
                value.constant is not None
                or value.layout is not torch.strided
                or value.fake_mode is not mode
            ):
                return False
            parts += (value.shape, value.stride(), value.dtype, value.fake_device)
        elif kind in PLAIN:
            parts += (kind, value)
        elif kind is list or kind is tuple:
            parts.append(len(value))
            if not _extend(parts, value, mode):
                return False
        elif kind is torch.layout:
            parts.append(value)
        else:
            return False
    return True


def describe(func: Any, args: Any, kwargs: Any, out: Any, device_type: str) -> Entry:
    """The costs of a call that has just been made."""
    entry = Entry(str(func).removesuffix(".default"))
    inputs = flat_tensors(args, kwargs)
    outputs = result_tensors(out)
    storages = {t.untyped_storage()._cdata for t in inputs}
    mutates = func._schema.is_mutable
    entry.views = (
        bool(outputs)
        and not mutates
        and all(t.untyped_storage()._cdata in storages for t in outputs)
    )
    entry.on_device = any(t.device.type == device_type for t in (*inputs, *outputs))
    floating = [t.dtype for t in inputs if t.is_floating_point()]
    dtypes = floating or [t.dtype for t in outputs]
    entry.dtype = str(dtypes[0]).removeprefix("torch.") if dtypes else ""
    if not entry.views:
        entry.moved_bytes = sum(t.numel() * t.element_size() for t in (*inputs, *outputs))
        if func._schema.name == "aten::empty" or func in (aten.empty_strided.default,):
            entry.moved_bytes = 0
    if func in FLOPS:
        entry.kind, count = FLOPS[func]
        entry.flops = count(args, out[0] if isinstance(out, list | tuple) else out)
    if func in COPIES and (transfer := _transfer(func, args, out, device_type)) is not None:
        entry.kind, entry.moved_bytes = transfer
    entry.kind = FILES.get(func._schema.name.partition("::")[2], entry.kind)
    if entry.on_device:
        entry.cublas = func in CUBLAS
        if func in TEMPORARIES:
            entry.temporaries = [size for size in TEMPORARIES[func](args, out) if size]
    return entry


def _transfer(func: Any, args: Any, out: Any, device_type: str) -> tuple[str, int] | None:
    source = args[1] if func is aten.copy_.default else args[0]
    ways = {("cpu", device_type): "h2d", (device_type, "cpu"): "d2h"}
    way = ways.get((source.device.type, out.device.type))
    if way is None or out.device.type == source.device.type:
        return None
    element_bytes = source.element_size() if way == "h2d" else out.element_size()
    return way, out.numel() * element_bytes


def replayable(entry: Entry, func: Any, args: Any, kwargs: Any, out: Any) -> bool:
    """Complete `entry` so that `out` can be made again from it; False if it cannot."""
    if NOT_REPLAYED.intersection(func.tags) or func in ABSOLUTE_OFFSET:
        return False
    if out is None:
        return True
    entry.returns_arg = next((index for index, arg in enumerate(args) if arg is out), None)
    if entry.returns_arg is not None:
        return True
    if func._schema.is_mutable or not isinstance(out, torch.Tensor | tuple | list):
        return False
    entry.container = None if isinstance(out, torch.Tensor) else type(out)
    storages = {t.untyped_storage()._cdata for t in flat_tensors(args, kwargs)}
    base = args[0] if args and type(args[0]) is FakeTensor else None
    own: set[int] = set()
    for item in [out] if entry.container is None else out:
        result = item
        if isinstance(item, torch.Tensor):
            result = _template(item, base, storages, own)
            if result is None:
                return False
        elif not isinstance(item, PLAIN):
            return False
        entry.results.append(result)
    return True


def _template(
    t: torch.Tensor, base: FakeTensor | None, storages: set[int], own: set[int]
) -> Template | None:
    if type(t) is not FakeTensor or t.constant is not None or t.layout is not torch.strided:
        return None
    address = t.untyped_storage()._cdata
    if address in storages:
        aliases_base = base is not None and base.untyped_storage()._cdata == address
        same_dtype = base is not None and base.dtype == t.dtype
        plain = not (t.is_conj() or t.is_neg())
        return Template(t, base) if aliases_base and same_dtype and plain else None
    if address in own or t.storage_offset():
        return None
    own.add(address)
    needed = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    exact_bytes = needed * t.element_size() if t.numel() else 0
    return Template(t, None) if t.untyped_storage().nbytes() == exact_bytes else None
