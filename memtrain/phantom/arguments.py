"""What the arguments of one call of an operator are: which tensors, and which of them it writes to."""

from __future__ import annotations

from typing import Any

import torch


def flat_tensors(args: Any, kwargs: Any = None) -> list[torch.Tensor]:
    """All tensors among the arguments, one level of lists deep."""
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(item for item in value if isinstance(item, torch.Tensor))
    return found


def result_tensors(out: Any) -> list[torch.Tensor]:
    return flat_tensors(out if isinstance(out, list | tuple) else (out,))


def written_arguments(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that `func` writes to, by its schema."""
    if not func._schema.is_mutable:
        return []
    written: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written += flat_tensors((value,))
    return written


def only_views(func: Any) -> bool:
    """Whether `func` only looks at its argument's storage, without reading it."""
    returns = func._schema.returns
    return bool(returns) and all(
        value.alias_info is not None and not value.alias_info.is_write for value in returns
    )


def asks_for_pinned(args: Any, kwargs: Any) -> bool:
    """`pin_memory=True`; `to("cpu", non_blocking=True)` from the device pins as well
    (native/TensorConversions.cpp, `_to_copy`)."""
    if kwargs.get("pin_memory"):
        return True
    to = kwargs.get("device")
    return bool(
        kwargs.get("non_blocking")
        and to is not None
        and to.type == "cpu"
        and args
        and args[0].device.type != "cpu"
    )
