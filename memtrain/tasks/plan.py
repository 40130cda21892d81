"""`task=plan`: what a run would take on a card."""

from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

from memtrain.config import Config
from memtrain.config.derived import resolve_path
from memtrain.device import select_device
from memtrain.engine import build
from memtrain.planner import budget
from memtrain.planner.predict import make_plan
from memtrain.report import console, planned
from memtrain.report.board import Board
from memtrain.run_folder import PLAN, write_json
from memtrain.tasks.card import chosen_card, warn_of_missing_type
from memtrain.tasks.run import Place

PLAN_SUMMARY = (
    "gpu",
    "fits",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "device_total_bytes",
    "host_bytes",
    "step_seconds",
    "tokens_per_second",
    "parameters",
)
"""What summary.json takes over from plan.json."""


def plan(config: Config, place: Place) -> dict[str, Any]:
    """What the run would take on a card: the verdict first, then who holds it, the host, the speed."""
    if config.model.config:
        path = str(resolve_path(config.model.config, place.base))
        config = replace(config, model=replace(config.model, config=path))
    from memtrain.report import plots  # matplotlib takes a third of a second to import

    card = chosen_card(config, select_device(config.device))
    warn_of_missing_type(config, card)
    vocab_size = build.expected_vocab_size(config, place.base)
    dimensions = build.build_dimensions(config, vocab_size)
    choice_lines: list[str] = []
    if config.checkpointing.policy == "budget":
        choice = budget.choose(config, dimensions, card)
        choice_lines = planned.choice_lines(asdict(choice))
        config = budget.with_choice(config, choice.per_block)
    found = make_plan(config, dimensions, card)
    timeline = found.pop("timeline")
    write_json(place.folder / PLAN, found)
    figure = plots.timeline_figure(
        timeline, found["capacity_bytes"], f"{' '.join(place.overrides)} on {card.name}"
    )
    plots.save_png(figure, place.folder / "timeline.png")
    with closing(Board(place.folder)) as board:
        board.figure("plan/timeline", figure)
    console.print_verdict(planned.verdict(found), found["fits"])
    console.print_table(planned.plan_table(found))
    console.print_header([*choice_lines, *planned.plan_lines(found), f"files      {place.folder}"])
    return {key: found[key] for key in PLAN_SUMMARY}
