"""What planning says of a training run: before it, of its budget, and after it ran out of memory."""

from dataclasses import asdict
from typing import Any

import torch

from memtrain.config import Config
from memtrain.device import describe_device, free_host_bytes
from memtrain.errors import UserError
from memtrain.planner import budget, fit
from memtrain.planner.child import PlannerProcess, PlanningFailed
from memtrain.report import console, planned
from memtrain.run_folder import PLAN, write_json
from memtrain.tasks.card import chosen_card
from memtrain.tasks.run import Place
from memtrain.units import format_bytes


def plan_run(
    config: Config, place: Place, vocab_size: int, device: torch.device
) -> dict[str, Any] | None:
    """The verdict before anything is allocated. What fails here is a warning, never the end of a run."""
    if place.planner is None:
        return None
    card = asdict(chosen_card(config, device))
    place.planner.ask("plan", tree=asdict(config), vocab_size=vocab_size, card=card)
    try:
        found: dict[str, Any] = place.planner.answer()
    except PlanningFailed as error:
        console.print_warning(f"this run could not be planned: {error}")
        return None
    if not place.held:
        write_json(place.folder / PLAN, without_timeline(found))
    console.print_verdict(planned.verdict(found), found["fits"])
    if not found["fits"]:
        console.print_warning("this run is predicted to end out of memory on that card")
    if device.type != "cpu":
        question = {"tree": asdict(config), "vocab_size": vocab_size, "card": card}
        check_host_memory(found, free_host_bytes(), place.planner, question)
    return found


def check_host_memory(
    plan: dict[str, Any], free_bytes: int, planner: PlannerProcess, question: dict[str, Any]
) -> None:
    """What is offloaded has to fit the host. Raises UserError with the figures and the nearest setting that fits."""
    if plan["host_bytes"] <= free_bytes:
        return
    planner.ask("suggest", **question, host_bytes=free_bytes)
    console.print_header(["planning what the host has room for ..."])
    try:
        found = planner.answer()
    except PlanningFailed:
        found = []
    nearest = " ".join(found[0]["overrides"]) if found else "a smaller model; nothing nearby does"
    offload, checkpointing = (question["tree"][key] for key in ("offload", "checkpointing"))
    asked = f"offload={offload['mode']}"
    if checkpointing["policy"] == "per_block" and "offload" in checkpointing["per_block"]:
        asked = "checkpointing=per_block" + (f" {asked}" if offload["mode"] != "none" else "")
    raise UserError(
        f"{asked}: needs {format_bytes(plan['host_bytes'])} of host memory "
        f"({format_bytes(plan['host_pinned_bytes'])} of it pinned), {format_bytes(free_bytes)} are free; "
        f"what fits: {nearest}"
    )


def resolve_budget(config: Config, place: Place, vocab_size: int, device: torch.device) -> Config:
    """A byte budget becomes one choice for every block. Raises UserError if nothing fits or it cannot be planned."""
    if config.checkpointing.policy != "budget":
        return config
    if place.planner is None:
        raise UserError("checkpointing=budget: is chosen by planning; drop plan=off")
    question = {"tree": asdict(config), "vocab_size": vocab_size}
    question |= {"card": asdict(chosen_card(config, device))}
    free_bytes = None if device.type == "cpu" else free_host_bytes()
    place.planner.ask("budget", **question, host_bytes=free_bytes)
    try:
        choice = place.planner.answer()
    except PlanningFailed as error:
        raise UserError(str(error)) from error
    console.print_header(planned.choice_lines(choice))
    return budget.with_choice(config, tuple(choice["per_block"]))


def without_timeline(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key != "timeline"}


def predicted_figures(found: dict[str, Any] | None) -> dict[str, Any]:
    if found is None:
        return {}
    return {
        "planned_gpu": found["gpu"],
        "predicted_peak_allocated_bytes": found["peak_allocated_bytes"],
        "predicted_peak_reserved_bytes": found["peak_reserved_bytes"],
    }


def explain_out_of_memory(
    config: Config,
    place: Place,
    vocab_size: int,
    device: torch.device,
    found: dict[str, Any] | None,
    error: BaseException,
) -> None:
    """One screen: what was asked, who held the memory, and the cheapest changes that fit."""
    if device.type == "cuda":
        torch.cuda.memory._dump_snapshot(str(place.folder / "memory_snapshot.pickle"))  # type: ignore[no-untyped-call]
    console.print_header(["", f"OUT OF MEMORY on {describe_device(device)}", f"asked      {error}"])
    if found is None or place.planner is None:
        console.print_header(["plan=on would say here what to change"])
        return
    console.print_header([f"predicted  {planned.verdict(found)}"])
    console.print_table(planned.plan_table(found))
    card = asdict(chosen_card(config, device))
    place.planner.ask("suggest", tree=asdict(config), vocab_size=vocab_size, card=card)
    console.print_header(["planning what would fit ..."])
    try:
        found_to_fit = place.planner.answer()
        commands = [fit.merged(place.overrides, one["overrides"]) for one in found_to_fit]
        console.print_header(planned.suggestion_lines(found_to_fit, commands))
    except PlanningFailed as failure:
        console.print_warning(f"no advice: {failure}")
