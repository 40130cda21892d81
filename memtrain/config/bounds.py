"""Numbers with bounds, as the fields of the tree have them."""

import math
from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Range:
    """Bounds of a number, both inclusive unless `above` is set."""

    low: float | None = None
    high: float | None = None
    above: float | None = None

    def allows(self, value: float) -> bool:
        return (
            is_finite(value)
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
        )

    def __str__(self) -> str:
        words = [
            f"at least {self.low}" if self.low is not None else "",
            f"above {self.above}" if self.above is not None else "",
            f"at most {self.high}" if self.high is not None else "",
        ]
        return " and ".join(word for word in words if word)

    def refusal_of(self, value: float) -> str:
        """What a value has to be, and what it is where the bounds do not show it."""
        if is_finite(value):
            return f"must be {self}"
        return f"must be {self}, not {'nan' if math.isnan(value) else 'infinite'}"


def is_finite(value: float) -> bool:
    """Of an int of any length, too, of which no float can be made."""
    return isinstance(value, int) or math.isfinite(value)


FP32_HIGH = 1e38
"""A little below the largest fp32: what is computed with these becomes infinite above it."""
MOST = 10**9
Positive = Annotated[int, Range(low=1, high=MOST)]
NonNegative = Annotated[int, Range(low=0, high=10**18)]  # torch and numpy count in 64 bits
Few = Annotated[int, Range(low=1, high=10**4)]
Some = Annotated[int, Range(low=1, high=10**6)]
"""Of what is made one by one, so that a slip of the finger is refused and not waited for."""
PositiveFloat = Annotated[float, Range(above=0, high=FP32_HIGH)]
NonNegativeFloat = Annotated[float, Range(low=0, high=FP32_HIGH)]
Rate = Annotated[float, Range(low=0.001, high=10**9)]
"""Of what is divided by: a step takes no time without end."""
Share = Annotated[float, Range(low=0, high=1)]
Probability = Annotated[float, Range(low=0, high=0.999)]
