"""A plan in words: the verdict, the screen of `task=plan`, and what to change after running out of memory."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from memtrain.cards import PROGRAM
from memtrain.report.tables import category_table
from memtrain.units import format_bytes, format_count, format_flops, format_seconds

Plan = Mapping[str, Any]


def verdict(plan: Plan) -> str:
    """`fits an A100 80GB: 3.27 GiB allocated, 3.85 GiB in all of 80.00 GiB, 76.15 GiB to spare`."""
    spare_bytes = plan["device_memory_bytes"] - plan["device_total_bytes"]
    room = f"{format_bytes(abs(spare_bytes))} {'to spare' if plan['fits'] else 'too much'}"
    return (
        f"{'fits' if plan['fits'] else 'DOES NOT FIT'} {plan['gpu']}: "
        f"{format_bytes(plan['peak_allocated_bytes'])} allocated at the peak ({plan['peak_phase']}), "
        f"{format_bytes(plan['device_total_bytes'])} in all of {format_bytes(plan['device_memory_bytes'])}, {room}"
    )


def plan_lines(plan: Plan) -> list[str]:
    """What stands below the table: device, host, transfers, files if there are any, speed."""
    parts = plan["step_seconds_by_limit"].items()
    limits = ", ".join(f"{name} {format_seconds(s)}" for name, s in parts if s > 0)
    rate = format_count(plan["tokens_per_second"])
    padded = " with padding" if plan["counts_padding"] else ""
    return [
        f"device     {format_bytes(plan['peak_allocated_bytes'])} allocated · "
        f"{format_bytes(plan['peak_active_bytes'])} active · {format_bytes(plan['peak_reserved_bytes'])} reserved · "
        f"{format_bytes(plan['device_total_bytes'])} with the CUDA context",
        f"host       {format_bytes(plan['host_bytes'])}, of it {format_bytes(plan['host_pinned_bytes'])} pinned",
        f"transfers  {format_bytes(plan['h2d_bytes_per_step'])} to the device and "
        f"{format_bytes(plan['d2h_bytes_per_step'])} from it per step",
        *nvme_lines(plan),
        f"speed      {rate} tok/s{padded} · {format_seconds(plan['step_seconds'])} a step · "
        f"{format_flops(plan['flops_per_step'])} a step · limited by {plan['limited_by']} ({limits})",
        f"planned    {format_count(plan['parameters'])} parameters in {format_seconds(plan['plan_seconds'])}",
    ]


def nvme_lines(plan: Plan) -> list[str]:
    read_bytes, written_bytes = (plan[f"nvme_{way}_bytes_per_step"] for way in ("read", "written"))
    if not read_bytes + written_bytes:
        return []
    return [
        f"nvme       {format_bytes(plan['nvme_bytes'])} of files · {format_bytes(read_bytes)} read and "
        f"{format_bytes(written_bytes)} written per step"
    ]


def plan_table(plan: Plan) -> Table:
    """Bytes by category at the peak of each phase."""
    order = ("forward", "backward", "optimizer", "other")
    phases = {name: plan["phases"][name]["categories"] for name in order if name in plan["phases"]}
    return category_table(
        phases, title=f"who holds the memory at each phase's peak ({plan['gpu']})"
    )


def choice_lines(choice: Mapping[str, Any]) -> list[str]:
    """What a byte budget chose per block, and what was given up for it."""
    if set(choice["per_block"]) == {"keep"}:
        return [
            f"budget     {format_bytes(choice['limit_bytes'])}: everything is kept: it fits "
            f"({format_bytes(choice['peak_bytes'])} reserved)"
        ]
    slower = choice["step_seconds"] / choice["keep_step_seconds"] - 1
    saved = choice["keep_peak_bytes"] - choice["peak_bytes"]
    return [
        f"budget     {format_bytes(choice['limit_bytes'])}: {format_bytes(choice['peak_bytes'])} reserved with "
        f"{', '.join(runs(choice['per_block']))}",
        f"given up   {slower:+.1%} predicted step time for {format_bytes(saved)} less than keeping everything "
        f"({format_bytes(choice['keep_peak_bytes'])})",
    ]


def runs(per_block: Sequence[str]) -> list[str]:
    """`["keep", "keep", "recompute"] -> ["keep 0-1", "recompute 2"]`."""
    found: list[tuple[str, int, int]] = []
    for index, policy in enumerate(per_block):
        if found and found[-1][0] == policy:
            found[-1] = (policy, found[-1][1], index)
        else:
            found.append((policy, index, index))
    return [
        f"{policy} {low}-{high}" if high > low else f"{policy} {low}" for policy, low, high in found
    ]


def suggestion_lines(
    suggestions: Sequence[Mapping[str, Any]], commands: Sequence[Sequence[str]]
) -> list[str]:
    """The changes that fit, fastest first, each with its peak and its command's words, to be pasted."""
    lines = []
    for number, (found, words) in enumerate(zip(suggestions, commands, strict=True), 1):
        lines.append(
            f"{number}. {' '.join(found['overrides'])}: {format_bytes(found['peak_allocated_bytes'])} at the peak, "
            f"{format_bytes(found['host_bytes'])} on the host, {format_count(found['tokens_per_second'])} tok/s"
        )
        lines.append(f"   {PROGRAM} {' '.join(words)}")
    return lines or [
        "nothing near this config fits: a smaller model or seq_len, or a larger card, would"
    ]
