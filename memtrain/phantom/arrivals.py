"""Models and optimizers that arrive on the phantom: their parameters move, and stay the same objects."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from memtrain.phantom import backend

HOOK_DICTS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_tensor_data: Any = torch.Tensor.data


def _set_data(self: Any, value: Any) -> None:
    """`parameter.data = value` moves the parameter to where `value` is."""
    _tensor_data.__set__(self, value)
    if isinstance(value, FakeTensor):
        self.fake_device = value.fake_device


data = property(_tensor_data.__get__, _set_data)


def apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
    """`nn.Module._apply` as between CPU and CUDA: parameters keep their identity.

    Only those on meta are replaced, tied ones by one parameter.
    """
    moved: dict[int, nn.Parameter] = {}
    modules = list(self.modules()) if recurse else [self]
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = _move(parameter, fn, moved)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
    return self


def _move(parameter: Any, fn: Any, moved: dict[int, nn.Parameter]) -> Any:
    if id(parameter) in moved:
        return moved[id(parameter)]
    with torch.no_grad():
        applied = fn(parameter)
        grad = None if parameter.grad is None else fn(parameter.grad)
    if applied is parameter:
        target = parameter
    elif parameter.device.type == "meta":
        target = nn.Parameter(applied, parameter.requires_grad)
    elif isinstance(parameter, FakeTensor):
        parameter.data = applied
        target = parameter
    else:
        target = _become(parameter, nn.Parameter(applied, parameter.requires_grad))
    if grad is not None:
        target.grad = grad
    meter = backend.active()
    if meter is not None:
        meter.mark(target, "weights")
    moved[id(parameter)] = target
    return target


def _become(parameter: Any, fake: Any) -> Any:
    """`parameter`, the same object, as the tensor `fake` is; its hooks and attributes stay.

    `torch.utils.swap_tensors` refuses what something refers to weakly, and leaves the hooks to
    the tensor that goes: a dict of hooks must be set again to reach the new one.
    """
    hooks = {name: getattr(parameter, name) for name in HOOK_DICTS}
    attributes = {**vars(parameter), **vars(fake)}
    parameter.__class__ = type(fake)
    torch._C._swap_tensor_impl(parameter, fake)
    vars(parameter).update(attributes)
    for name, registered in hooks.items():
        if registered is not None:
            setattr(parameter, name, registered)
    return parameter
