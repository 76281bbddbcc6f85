"""Whether a figure stays where it is: the straight line through its samples. Pure."""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Slope(NamedTuple):
    """Change for each unit, and its standard error."""

    value: float
    error: float

    @property
    def flat(self) -> bool:
        """Whether no change at all is within two standard errors."""
        return abs(self.value) <= 2 * self.error

    def __str__(self) -> str:
        return f"{self.value:+.3g} ± {self.error:.2g}"


def slope(samples: Sequence[tuple[float, float]]) -> Slope | None:
    """Least squares through (x, y); None with fewer than three samples, or none that differ in x."""
    count = len(samples)
    if count < 3:
        return None
    mean_x, mean_y = (sum(sample[axis] for sample in samples) / count for axis in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    if not spread:
        return None
    value = sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread
    rest = sum((y - mean_y - value * (x - mean_x)) ** 2 for x, y in samples)
    return Slope(value, math.sqrt(rest / (count - 2) / spread))
