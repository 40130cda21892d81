"""Which module is running, whose parameters there are, and whether an optimizer steps.

All of it by torch's global hooks, which `remove` takes away again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

Mark = Callable[[torch.Tensor, str, str | None], None]
"""(tensor, category, module path or None to leave it): what a storage is."""


class ModuleWatch:
    """The stack of running modules, and marks for the tensors that belong to them."""

    def __init__(self, on_root: Callable[[], None]) -> None:
        self.mark: Mark = lambda tensor, category, module: None
        self.on_root = on_root
        self.on_new_root: Callable[[], None] = lambda: None
        self.stack: list[tuple[nn.Module, str]] = []
        self.optimizers = 0
        self._paths: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._roots: list[weakref.ref[nn.Module]] = []
        self._grad_hooks: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}
        self._grad_paths: dict[int, str] = {}
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._hooks: list[Any] = []

    @property
    def path(self) -> str:
        return self.stack[-1][1] if self.stack else ""

    @property
    def where(self) -> str:
        """For a message: which module was running."""
        return f" in module {self.path}" if self.stack else ""

    def install(self) -> None:
        self._hooks = [
            register_module_parameter_registration_hook(self._on_parameter),
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._exit, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for _, hook in self._grad_hooks.values():
            hook.remove()
        self._hooks.clear()
        self._grad_hooks.clear()

    def mark_all(self) -> None:
        """Mark what every module and optimizer seen so far holds now."""
        for root in self._roots:
            module = root()
            if module is not None:
                self._mark_module(module)
        for optimizer in self._optimizers:
            self._mark_optimizer(optimizer)

    def _enter(self, module: nn.Module, args: Any) -> None:
        known = self._paths.get(id(module))
        is_root = not self.stack and torch._C._current_graph_task_id() == -1
        if known is None or known[0]() is not module:
            self._learn(module)
        if is_root:
            self._mark_module(module)
            self.on_root()
            for value in args:
                if isinstance(value, torch.Tensor):
                    self.mark(value, "inputs", None)
        self.stack.append((module, self._paths[id(module)][1]))

    def _on_parameter(self, module: nn.Module, name: str, parameter: Any) -> None:
        if parameter is not None:
            self.mark(parameter, "weights", None)
            # Now: a hook of the program's own that takes the gradient away shall find it marked.
            self._watch_gradient(parameter)

    def _exit(self, module: nn.Module, args: Any, out: Any) -> None:
        while self.stack:
            last, _ = self.stack.pop()
            if last is module:
                break

    def _learn(self, root: nn.Module) -> None:
        """Names as `named_modules` gives them; the root itself goes by its class."""
        for name, module in root.named_modules():
            self._paths[id(module)] = (weakref.ref(module), name or type(root).__name__)
        self._roots.append(weakref.ref(root))
        self.on_new_root()

    def _mark_module(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            path = name.rpartition(".")[0] or type(module).__name__
            self.mark(parameter, "weights", path)
            if parameter.grad is not None:
                self.mark(parameter.grad, "gradients", path)
            self._grad_paths[id(parameter)] = path
            self._watch_gradient(parameter)
        for name, buffer in module.named_buffers():
            self.mark(buffer, "buffers", name.rpartition(".")[0] or type(module).__name__)

    def _watch_gradient(self, parameter: torch.Tensor) -> None:
        known = self._grad_hooks.get(id(parameter))
        if not parameter.requires_grad or not parameter.is_leaf:
            return
        if known is not None and known[0]() is parameter:
            return

        def on_gradient(p: torch.Tensor) -> None:
            if p.grad is not None:
                self.mark(p.grad, "gradients", self._grad_paths.get(id(p)))

        hook = parameter.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]
        self._grad_hooks[id(parameter)] = (weakref.ref(parameter), hook)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.optimizers += 1
        self._optimizers.add(optimizer)
        for parameter in _parameters(optimizer):
            self.mark(parameter, "weights", None)
            if parameter.grad is not None:
                self.mark(parameter.grad, "gradients", None)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.optimizers = max(0, self.optimizers - 1)
        self._mark_optimizer(optimizer)

    def _mark_optimizer(self, optimizer: Optimizer) -> None:
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    self.mark(value, "optimizer_state", None)


def _parameters(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
