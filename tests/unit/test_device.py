"""What the host has, how it is pinned, and what a run says when it is not enough."""

import ctypes
import mmap
import os
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import asdict

import pytest
import torch

from memtrain import device
from memtrain.cards import load_card
from memtrain.device import (
    allocator_statistics,
    free_host_bytes,
    host_memory_bytes,
    host_peak_bytes,
    host_peak_watched,
    pinned_empty,
    select_device,
)
from memtrain.errors import UserError
from memtrain.planner.child import PlannerProcess, PlanningFailed
from memtrain.tasks.predicted import check_host_memory

TINY_OFFLOAD = ("offload=optimizer", "model.dim=256", "model.vocab_size=4096")


def test_the_hosts_peak_is_seen_and_counts_from_its_beginning_on(monkeypatch):
    """Two looks at the memory that comes and goes, whenever they are; and nothing of what was before."""
    held = torch.ones(2**26)
    with host_peak_watched(interval_s=0.001):
        high_bytes = host_peak_bytes()
        del held
    seen, looks, look = threading.Event(), [], device.host_memory_bytes

    def counted():
        looks.append(look())
        if len(looks) > 2:
            seen.set()
        return looks[-1]

    with host_peak_watched(interval_s=0.001):
        assert host_peak_bytes() < high_bytes - 2**27
        transient = torch.ones(2**25)
        monkeypatch.setattr(device, "host_memory_bytes", counted)
        assert seen.wait(timeout=60)
        monkeypatch.undo()
        del transient
        assert high_bytes - 2**27 - 2**25 < host_peak_bytes() < high_bytes - 2**26
        assert host_memory_bytes() < host_peak_bytes() - 2**26


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
import mmap, pathlib
import torch
from memtrain.device import host_memory_bytes, host_peak_bytes
before = host_peak_bytes()
held = torch.ones(2**26)
alone = host_peak_bytes()
library = (pathlib.Path(torch.__file__).parent / "lib" / "libtorch_cpu.so").open("rb")
pages = mmap.mmap(library.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
mapped = sum(1 for _ in range(0, len(pages), 4096) if pages[_] >= 0) * 4096
print(before, alone, mapped, host_peak_bytes(), host_memory_bytes())
"""


def test_peak_of_this_process_and_not_of_its_parent_or_of_its_files():
    """In a process of its own: what other tests have used and given back would hide the growth."""
    held = torch.ones(2**28)  # 1 GiB, which the child must not be told to have had
    child = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, check=True)
    before, alone, mapped, peak, now = (int(word) for word in child.stdout.split())
    assert before < held.nbytes
    assert before + 0.9 * 2**28 < alone < before + 1.5 * 2**28
    assert mapped > 2**27
    assert alone <= peak < alone + 2**24
    assert now <= peak


def test_the_cpu_counts_no_device_memory():
    assert allocator_statistics(select_device("cpu")) == {}


# --- pinned memory ------------------------------------------------------------------------------------------------


class Cudart:
    """Stands in for torch.cuda.cudart(): keeps what it was called with, and answers `code`."""

    def __init__(self, code=0):
        self.code = code
        self.calls = []

    def cudaHostRegister(self, address, size_bytes, flags):
        self.calls.append(("register", address, size_bytes, flags))
        return self.code

    def cudaHostUnregister(self, address):
        self.calls.append(("unregister", address, ctypes.c_float.from_address(address).value))
        return 0


@pytest.fixture
def cudart(monkeypatch):
    stand_in = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: stand_in)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: stand_in.calls.append("synchronize"))
    return stand_in


def test_a_pinned_buffer_is_registered_until_nothing_uses_it(cudart):
    """Its exact bytes, once; released after the copies under way, while the memory is still there."""
    n = 3 * mmap.PAGESIZE // 4 + 5  # not whole pages, and no power of two
    buffer = pinned_empty(n, torch.float32, torch.device("cuda"))
    address = buffer.data_ptr()
    assert buffer.shape == (n,) and address % mmap.PAGESIZE == 0
    assert cudart.calls == [("register", address, 4 * n, 1)]
    buffer.fill_(7)
    last = buffer[-1:].view(1, 1)
    del buffer
    assert len(cudart.calls) == 1 and last.item() == 7
    del last
    assert cudart.calls[1:] == ["synchronize", ("unregister", address, 7.0)]


def test_pinned_buffers_have_every_type_and_none_is_of_nothing(cudart):
    for dtype in (torch.bfloat16, torch.uint8, torch.int64):
        buffer = pinned_empty(9, dtype, torch.device("cuda"))
        assert (buffer.dtype, buffer.shape) == (dtype, (9,))
    assert [call[2] for call in cudart.calls if call[0] == "register"] == [18, 9, 72]
    cudart.calls.clear()
    assert pinned_empty(0, torch.float32, torch.device("cuda")).shape == (0,)
    assert not [call for call in cudart.calls if call[0] == "register"]


def test_a_refusal_to_pin_is_an_error_that_no_later_launch_reports(cudart, monkeypatch):
    cudart.code = 2

    def launch(*shape, device):
        cudart.calls.append(("launch", device))
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "ones", launch)
    with pytest.raises(RuntimeError, match=r"CUDA error 2: cannot pin 4\.00 MiB of host memory"):
        pinned_empty(2**20, torch.float32, torch.device("cuda"))
    assert [call[0] for call in cudart.calls] == ["register", "launch"]


def test_the_cpu_pins_nothing(cudart):
    assert pinned_empty(1000, torch.float32, torch.device("cpu")).shape == (1000,)
    assert not cudart.calls


def test_torchs_pinned_pool_is_left_as_it_is():
    """Whatever its settings could save: in 2.13 they make it hand out less memory than asked for."""
    assert "memtrain.cli" in sys.modules  # which would set them before torch is imported
    assert "pinned" not in os.environ.get("PYTORCH_ALLOC_CONF", "")


@pytest.mark.parametrize(
    ("version", "settings", "refused"),
    [
        ("2.13.0+cu130", "pinned_max_round_threshold_mb:0", True),
        ("2.13.1", "expandable_segments:True,pinned_max_round_threshold_mb:64", True),
        ("2.13.0", "pinned_max_round_threshold_mb:1,pinned_max_cached_size_mb:2", True),
        ("2.13.0", "pinned_max_round_threshold_mb:2,pinned_max_cached_size_mb:2", False),
        ("2.13.0", "pinned_max_cached_size_mb:2", False),
        ("2.13.0", "expandable_segments:True", False),
        ("2.14.0", "pinned_max_round_threshold_mb:0", False),
    ],
)
def test_a_pinned_pool_that_hands_out_too_little_is_refused(
    monkeypatch, version, settings, refused
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    assert select_device("cpu").type == "cpu"
    if refused:
        with pytest.raises(UserError, match=rf"^PYTORCH_CUDA_ALLOC_CONF: .* torch {version[:6]}"):
            select_device("auto")
    else:
        assert select_device("auto").type == "cuda"
