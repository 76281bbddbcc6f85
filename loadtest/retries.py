"""What an OpenAI SDK does after a failure: again or not, and after how long. Pure."""

from collections.abc import Mapping
from typing import Final

RETRIES: Final = 2  # the SDKs' default
FIRST_S: Final = 0.5  # without a word from the server; doubled each time
MOST_S: Final = 8.0
LONGEST_TOLD_S: Final = 120.0  # what a server may ask for
JITTER: Final = 0.25  # share by which a pause of its own may be shorter
RETRIED: Final = (408, 409, 429)  # and every 5xx


def pause(status: int | None, headers: Mapping[str, str], attempt: int, chance: float) -> float | None:
    """Seconds to wait after a failed attempt (the first is 0) before the next, None for no other.

    `status` is None when no head came: a lost connection or the client's own time limit. Header names are in lower
    case; `chance` is random, from 0 to 1.
    """
    again = status is None or status in RETRIED or status >= 500
    if (said := headers.get("x-should-retry")) in ("true", "false"):
        again = said == "true"
    if not again or attempt >= RETRIES:
        return None
    told = _told(headers)
    if told is not None and told > LONGEST_TOLD_S:
        return None
    if told is not None and told > 0:
        return told
    return min(FIRST_S * float(2**attempt), MOST_S) * (1 - JITTER * chance)


def _told(headers: Mapping[str, str]) -> float | None:
    for name, unit in (("retry-after-ms", 1000), ("retry-after", 1)):
        try:
            return float(headers[name]) / unit
        except (KeyError, ValueError):
            continue
    return None
