"""Log lines, for people or as JSON. One line ends each request; of a storm a part is shown and the rest counted."""

import asyncio
import json
import logging
import sys
import time
from collections import Counter
from typing import Any, Final

from app.call import Call

LINES_PER_S: Final = 50  # of lines about requests of one outcome; the rest of a second is counted only

NOT_WORTH_A_LINE: Final = (
    "without completing response",
    "Invalid HTTP request",
    "Unsupported upgrade request",
    "No supported WebSocket library",
)

_requests = logging.getLogger("tidegate.request")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _Console(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        text = super().format(record)
        return " ".join([text, *(f"{name}={value}" for name, value in fields.items() if value is not None)])


def configure(log_format: str) -> None:
    """Send all lines to standard error in the format of the settings: `console` or `json`."""
    handler = logging.StreamHandler(sys.stderr)
    console = _Console("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(_Json() if log_format == "json" else console)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # uvicorn reports a broken-off answer as an error of the application; here it is how a client is told. What is not
    # HTTP is answered with 400, and a wish to speak another protocol goes unheard; a line for each would let anybody
    # fill the disk.
    logging.getLogger("uvicorn.error").addFilter(_worth_a_line)


def _worth_a_line(record: logging.LogRecord) -> bool:
    text = str(record.msg)
    return not any(known in text for known in NOT_WORTH_A_LINE)


class RequestLog:
    """Writes the line that ends a request; each outcome has its own share, so that a storm of one hides no other."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._seen: Counter[str] = Counter()  # in this second, by outcome
        self._second_ends: asyncio.TimerHandle | None = None

    def write(self, call: Call, now: float) -> None:
        """One line for a call that is over, unless its kind has had its share."""
        if self._second_ends is None:
            self._second_ends = self._loop.call_later(1.0, self._count)
        self._seen[call.outcome] += 1
        if self._seen[call.outcome] <= LINES_PER_S:
            _requests.info("request", extra={"fields": call.log_fields(now)})

    def _count(self) -> None:
        """Say what was left out, also when nobody comes any more."""
        self._second_ends = None
        left_out = {name: count - LINES_PER_S for name, count in self._seen.items() if count > LINES_PER_S}
        self._seen.clear()
        if left_out:
            _requests.info("lines about requests left out", extra={"fields": left_out})
