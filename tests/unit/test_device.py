"""What the host has, and what a run says when it is not enough."""

import os
import subprocess
import sys
from contextlib import closing
from dataclasses import asdict

import pytest
import torch

from memtrain.cards import load_card
from memtrain.device import (
    allocator_statistics,
    free_host_bytes,
    host_memory_bytes,
    reset_host_peak,
    select_device,
)
from memtrain.errors import UserError
from memtrain.planner.child import PlannerProcess, PlanningFailed
from memtrain.tasks import check_host_memory

TINY_OFFLOAD = ("offload=optimizer", "model.dim=256", "model.vocab_size=4096")


def test_the_hosts_peak_counts_from_the_reset_on():
    ballast = bytearray(2**28)
    for page in range(0, len(ballast), 4096):
        ballast[page] = 1
    high_bytes = host_memory_bytes("VmHWM")
    del ballast
    reset_host_peak()
    assert host_memory_bytes("VmHWM") < high_bytes - 2**27


def test_free_host_memory_is_at_most_what_there_is():
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < free_host_bytes() < installed


@pytest.mark.slow
def test_what_the_host_has_no_room_for_is_refused_with_the_nearest_setting_that_fits(tiny):
    config = tiny(*TINY_OFFLOAD)
    card = load_card("a100_40gb")
    plan = make_plan_apart(config, card)
    question = {"tree": asdict(config), "vocab_size": 64, "card": asdict(card)}
    with closing(PlannerProcess()) as planner:
        check_host_memory(plan, plan["host_bytes"], planner, question)
        with pytest.raises(UserError, match="are free; what fits: ") as refusal:
            check_host_memory(plan, plan["host_bytes"] // 2, planner, question)
    message = str(refusal.value)
    assert message.startswith("offload=optimizer: needs ")
    remedy = message.rpartition("what fits: ")[2].split()
    nearer = make_plan_apart(tiny(*TINY_OFFLOAD, *remedy), card)
    assert nearer["host_bytes"] <= plan["host_bytes"] // 2


class NoAdvice:
    """A planner that finds nothing."""

    def ask(self, kind, **question):
        self.kind = kind

    def answer(self):
        raise PlanningFailed("nothing")


def test_activations_that_a_budget_offloads_are_named():
    checkpointing = {"policy": "per_block", "per_block": ["offload", "keep"]}
    tree = {"offload": {"mode": "none"}, "checkpointing": checkpointing}
    plan = {"host_bytes": 2**31, "host_pinned_bytes": 2**30}
    with pytest.raises(UserError, match=r"^checkpointing=per_block: needs 2\.00 GiB"):
        check_host_memory(plan, 2**30, NoAdvice(), {"tree": tree})


def make_plan_apart(config, card):
    """In a process of its own: the phantom stays registered in the one that plans."""
    with closing(PlannerProcess()) as planner:
        planner.ask("plan", tree=asdict(config), vocab_size=64, card=asdict(card))
        return planner.answer()


MEASURE = """
import torch
from memtrain.device import host_memory_bytes
before = host_memory_bytes("VmHWM")
held = torch.ones(2**26)
print(before, host_memory_bytes("VmHWM"), host_memory_bytes("VmRSS"))
"""


def test_peak_of_this_process_and_not_of_its_parent():
    """In a process of its own: what other tests have used and given back would hide the growth."""
    held = torch.ones(2**28)  # 1 GiB, which the child must not be told to have had
    child = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, check=True)
    before, peak, now = (int(word) for word in child.stdout.split())
    assert before < held.nbytes
    assert before + 0.9 * 2**28 < peak < before + 1.5 * 2**28
    assert now <= peak


def test_the_cpu_counts_no_device_memory():
    assert allocator_statistics(select_device("cpu")) == {}
