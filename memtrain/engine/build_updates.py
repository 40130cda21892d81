"""Who steps the parameters that are trained: on the device, on the host, in backward, or from files."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memtrain.config import Config
from memtrain.config.derived import optimizer_home, weights_home
from memtrain.engine.optimizers import decay_groups, make_optimizer
from memtrain.engine.update import PlainUpdate, Update
from memtrain.memory.file_homes import FileGradients, FileState, MakeOptimizer
from memtrain.memory.file_store import FileStore
from memtrain.memory.host_homes import (
    DeviceWeights,
    GradientHome,
    MemoryGradients,
    MemoryState,
    StateHome,
    WeightHome,
)
from memtrain.memory.host_optimizer import HostOptimizer, tell_before_reading
from memtrain.memory.param_offload import ParamOffload
from memtrain.memory.per_parameter import PerParameter
from memtrain.memory.stochastic_rounding import round_stochastically
from memtrain.model.language_model import LanguageModel
from memtrain.model.layers import gradient_dtype
from memtrain.units import MIB


def file_store(config: Config) -> FileStore:
    """In the run's own folder: whoever trains claims one and puts it in the place of `offload.nvme_dir`."""
    assert config.offload.nvme_dir
    return FileStore(Path(config.offload.nvme_dir))


def build_updates(config: Config, model: LanguageModel, device: torch.device) -> list[Update]:
    """What steps the parameters that are trained: on the device, on the host, or some here and some there."""
    make, groups = optimizer_factory(config), parameter_groups(config, model)
    if optimizer_home(config) == "device":
        return [build_device_update(config, model, groups, make)]
    on_host = host_parameters(config, model)
    updates: list[Update] = []
    if host_groups := only(groups, lambda p: p in on_host):
        updates.append(build_host_update(config, model, device, host_groups, make))
    if device_groups := only(groups, lambda p: p not in on_host):
        updates.append(build_device_update(config, model, device_groups, make))
    return updates


def optimizer_factory(config: Config) -> MakeOptimizer:
    """The optimizer that is wanted, for whatever groups it is to step."""
    wanted = config.optimizer
    return partial(
        make_optimizer,
        wanted.name,
        lr=wanted.lr,
        betas=(wanted.betas[0], wanted.betas[1]),
        eps=wanted.eps,
        momentum=wanted.momentum,
        implementation=wanted.implementation,
    )


def parameter_groups(config: Config, model: LanguageModel) -> list[dict[str, Any]]:
    groups = decay_groups(model.named_parameters(), config.optimizer.weight_decay)
    return [{**group, "lr": config.optimizer.lr} for group in groups]


def only(
    groups: list[dict[str, Any]], wanted: Callable[[nn.Parameter], bool]
) -> list[dict[str, Any]]:
    found = [{**group, "params": [p for p in group["params"] if wanted(p)]} for group in groups]
    return [group for group in found if group["params"]]


def host_parameters(config: Config, model: LanguageModel) -> set[nn.Parameter]:
    """Those whose optimizer is on the host: `offload.optimizer_fraction` of all, evenly spread."""
    on_device = weights_home(config) == "device"
    share, seen, chosen = config.offload.optimizer_fraction if on_device else 1.0, 0, 0
    found = set()
    for parameter in (p for p in model.parameters() if p.requires_grad):
        seen += parameter.numel()
        if chosen + parameter.numel() / 2 <= share * seen:
            chosen += parameter.numel()
            found.add(parameter)
    return found


def build_device_update(
    config: Config, model: LanguageModel, groups: list[dict[str, Any]], make: MakeOptimizer
) -> Update:
    weights = [parameter for group in groups for parameter in group["params"]]
    whole = all(weight.dtype == gradient_dtype(weight) == torch.float32 for weight in weights)
    if whole and not config.optimizer.in_backward:
        return PlainUpdate(make(groups))
    return PerParameter(
        groups,
        make,
        round_to=None if config.precision.master_weights else round_stochastically,
        in_backward=config.optimizer.in_backward_clip if config.optimizer.in_backward else None,
        clip=config.clip,
    )


def build_host_update(
    config: Config,
    model: LanguageModel,
    device: torch.device,
    groups: list[dict[str, Any]],
    make: MakeOptimizer,
) -> Update:
    parameters = [parameter for group in groups for parameter in group["params"]]
    offload = model.elsewhere
    weights: WeightHome = DeviceWeights(parameters, device)
    if isinstance(offload, ParamOffload):
        offload.resident = DeviceWeights([p for p in model.parameters() if p.ndim < 2], device)
        weights = offload
    states: StateHome = MemoryState(make)
    gradients: GradientHome = MemoryGradients(device)
    if optimizer_home(config) == "nvme":
        states = FileState(file_store(config), make, config.offload.nvme_buffer_mib * MIB)
    if weights_home(config) == "nvme":
        gradients = FileGradients(file_store(config), device)
    update = HostOptimizer(
        groups,
        device=device,
        accumulate=config.offload.gradients or weights_home(config) != "device",
        weights=weights,
        states=states,
        gradients=gradients,
    )
    update.start(model.parameters())
    if isinstance(offload, ParamOffload):
        offload.before_read, offload.is_due = update.ready, update.is_due
    elif config.compile != "model":
        tell_before_reading(model, update.ready)
    else:
        model.register_forward_pre_hook(lambda *_: update.settle())
    return update
