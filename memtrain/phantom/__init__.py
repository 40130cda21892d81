"""The GPU that is not there: run any PyTorch program on it, and see what it would take.

    with PhantomGPU("a100_80gb") as gpu:
        model = Model().to(gpu.device)
        for _ in range(2):
            training_step(model)
            gpu.step_boundary()
    print(gpu.report().peak_allocated_bytes)

Shapes, dtypes, strides and storages are real; data is not. The device is registered on the first
`PhantomGPU`, and stays registered; nothing else outlives the `with` block.
"""

from memtrain.phantom.allocator import CachingAllocator, OutOfMemoryError
from memtrain.phantom.failures import RaceError, UnsupportedOperator
from memtrain.phantom.gpu import PhantomCPU, PhantomGPU
from memtrain.phantom.held import CATEGORIES, Moment
from memtrain.phantom.report import OpUse, Report

__all__ = [
    "CATEGORIES",
    "CachingAllocator",
    "Moment",
    "OpUse",
    "OutOfMemoryError",
    "PhantomCPU",
    "PhantomGPU",
    "RaceError",
    "Report",
    "UnsupportedOperator",
]
