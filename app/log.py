"""Log lines, for people or as JSON. One line ends each request; of a storm a part is shown and the rest counted."""

import json
import logging
import sys
import time
from typing import Any, Final

from app.call import Call

LINES_PER_S: Final = 50  # of lines about requests; the rest of a second is counted only

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
    # uvicorn reports a broken-off answer as an error of the application; here it is how a client is told.
    logging.getLogger("uvicorn.error").addFilter(_not_an_incomplete_answer)


def _not_an_incomplete_answer(record: logging.LogRecord) -> bool:
    return "without completing response" not in str(record.msg)


class RequestLog:
    """Writes the line that ends a request."""

    def __init__(self) -> None:
        self._second = 0
        self._written = 0
        self._left_out = 0

    def write(self, call: Call, now: float) -> None:
        """One line for a call that is over, unless this second has had its share."""
        second = int(time.monotonic())
        if second != self._second:
            if self._left_out:
                _requests.info("%d lines about requests left out", self._left_out)
            self._second, self._written, self._left_out = second, 0, 0
        self._written += 1
        if self._written > LINES_PER_S:
            self._left_out += 1
        else:
            _requests.info("request", extra={"fields": call.log_fields(now)})
