"""How many users there are over time. Pure: each shape takes the share of the run that has passed and gives that of the
peak."""

import math
from collections.abc import Callable
from typing import Final

NIGHT: Final = 0.1
BEFORE_SPIKE: Final = 0.25
SPIKE: Final = (0.4, 0.6)


def ramp(passed: float) -> float:
    """Evenly up to the peak: where does it begin to refuse?"""
    return passed


def spike(passed: float) -> float:
    """Four times as many for a fifth of the time: does it come back?"""
    return 1.0 if SPIKE[0] <= passed < SPIKE[1] else BEFORE_SPIKE


def soak(passed: float) -> float:
    """The peak all the time: does anything leak?"""
    return 1.0


def day(passed: float) -> float:
    """From night to night over a busy noon."""
    return NIGHT + (1 - NIGHT) * math.sin(math.pi * passed) ** 2


SHAPES: Final[dict[str, Callable[[float], float]]] = {"ramp": ramp, "spike": spike, "soak": soak, "day": day}


def users(shape: str, peak: int, passed_s: float, run_s: float) -> int | None:
    """Users at this moment, at least one; None when the run is over."""
    if passed_s >= run_s:
        return None
    return max(1, round(peak * SHAPES[shape](passed_s / run_s)))
