"""Learning rate as a function of the optimizer steps made so far."""

import math
from collections.abc import Callable

Schedule = Callable[[int], float]
"""Steps made -> learning rate of the next one."""


def make_schedule(name: str, peak: float, warmup: int, steps: int, min_ratio: float) -> Schedule:
    """Linear warm-up to `peak` at step number `warmup`, then `cosine`, `linear` or `constant` to step `steps`."""

    def decay(progress: float) -> float:
        if name == "constant":
            return 1.0
        falling = 0.5 * (1 + math.cos(math.pi * progress)) if name == "cosine" else 1 - progress
        return min_ratio + (1 - min_ratio) * falling

    def learning_rate(made: int) -> float:
        number = made + 1
        if number <= warmup:
            return peak * number / warmup
        progress = (number - warmup) / max(1, steps - warmup)
        return peak * decay(min(1.0, progress))

    return learning_rate
