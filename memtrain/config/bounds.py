"""Numbers with bounds, as the fields of the tree have them."""

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Range:
    """From `low` to `high`, both inclusive; `above`: without `low` itself."""

    low: float
    high: float
    above: bool = False

    def allows(self, value: float) -> bool:
        """Never nan; of an int of any length, too."""
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return f"{self.low_text} and at most {self.high}"

    @property
    def low_text(self) -> str:
        return f"{'above' if self.above else 'at least'} {self.low}"


FP32_HIGH = 1e38
"""A little below the largest fp32: what is computed with these becomes infinite above it."""
MOST = 10**9
Positive = Annotated[int, Range(1, MOST)]
NonNegative = Annotated[int, Range(0, 10**18)]  # torch and numpy count in 64 bits
Few = Annotated[int, Range(1, 10**4)]
Some = Annotated[int, Range(1, 10**6)]
"""Of what is made one by one, so that a slip of the finger is refused and not waited for."""
PositiveFloat = Annotated[float, Range(0, FP32_HIGH, above=True)]
NonNegativeFloat = Annotated[float, Range(0, FP32_HIGH)]
Rate = Annotated[float, Range(0.001, 10**9)]
"""Of what is divided by: a step takes no time without end."""
Share = Annotated[float, Range(0, 1)]
Probability = Annotated[float, Range(0, 0.999)]
