"""Which card a run is planned for, and what that card lacks."""

from dataclasses import replace

import torch

from memtrain.cards import Card, match_card, missing_type
from memtrain.config import Config
from memtrain.report import console
from memtrain.tasks.run import Place
from memtrain.units import MIB


def machine_card(device: torch.device) -> Card | None:
    """The data sheet of the card in the machine, if it is one we have."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return match_card(properties.name, properties.total_memory)


def chosen_card(config: Config, device: torch.device) -> Card:
    """`gpu=auto` is the card in the machine, else the one the config states."""
    stated = Card(**{name: getattr(config.gpu, name) for name in Card.__dataclass_fields__})
    if not config.gpu.auto or device.type != "cuda":
        return stated
    properties = torch.cuda.get_device_properties(device)
    known = machine_card(device)
    if known is None:
        console.print_warning(
            f"no data sheet of {properties.name}: its speed is predicted as that of {stated.name}"
        )
        known = stated
    return replace(known, name=properties.name, memory_mib=properties.total_memory // MIB)


def card_of_run(config: Config, place: Place, device: torch.device) -> Card | None:
    """What the run computes on; without a GPU, what it is planned for. None if not known."""
    if device.type == "cuda":
        return machine_card(device)
    return None if place.planner is None else chosen_card(config, device)


def warn_of_missing_type(config: Config, card: Card | None) -> None:
    precision = config.precision
    if card is not None and (line := missing_type(card, precision.name, precision.tf32)):
        console.print_warning(line)


def peak_flops(config: Config, device: torch.device) -> float:
    """The device's dense peak for what the run computes in, in FLOP/s; 0 if not known."""
    card = machine_card(device)
    if card is None:
        return 0.0
    kind = {"bf16_true": "bf16"}.get(config.precision.name, config.precision.name)
    return card.peak_tflops("tf32" if config.precision.tf32 and kind == "fp32" else kind) * 1e12
