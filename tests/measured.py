"""What a real run on the CPU allocates, by torch's profiler."""

import gc
from collections.abc import Callable
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile


def real_peak_bytes(run: Callable[[], object]) -> int:
    """Largest sum of the profiler's allocation events while `run` runs.

    Without oneDNN, whose scratchpads depend on the processor's instruction set.
    """
    gc.collect()
    with (
        torch.backends.mkldnn.flags(enabled=False),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded,
    ):
        run()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events))
