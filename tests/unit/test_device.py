"""What the host has, and what a run says when it is not enough."""

import os
import subprocess
import sys

import pytest
import torch

from memtrain.device import (
    allocator_statistics,
    free_host_bytes,
    host_memory_bytes,
    select_device,
)
from memtrain.errors import UserError
from memtrain.tasks import check_host_memory
from memtrain.units import GIB


def test_free_host_memory_is_at_most_what_there_is():
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < free_host_bytes() < installed


def test_too_much_offload_is_refused_with_both_figures():
    check_host_memory(GIB, 2 * GIB)
    with pytest.raises(UserError, match=r"needs 3.00 GiB of host memory, 2.00 GiB are free"):
        check_host_memory(3 * GIB, 2 * GIB)


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
