"""One streamed call in blocking form: bytes go from the socket to a parser as they come, so times are those of arrival.

Under locust, gevent has made the sockets below yield. (Reading lines through an HTTP library that fills blocks of a
fixed size first gives times of blocks, not of tokens.)
"""

import json
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import httptools

from loadtest.client import Answer
from loadtest.outcomes import Outcome, Record

READ_BYTES: Final = 65_536
CONNECT_S: Final = 10.0


@dataclass(slots=True)
class Seen:
    """A call as its client saw it. Times are seconds since the call began."""

    record: Record
    headers: dict[str, str] = field(default_factory=dict)  # names in lower case
    body: bytes = b""
    longest_gap: float = 0.0  # between pieces of the body after the first event
    left: bool = False  # the client's own doing

    @property
    def failure(self) -> str:
        """What is wrong with it, empty for a whole answer, a refusal and a client that left."""
        if self.left or self.record.outcome in (Outcome.GOOD, Outcome.LATE, Outcome.REFUSED):
            return ""
        said = self.record.error or ("no end mark" if self.record.status == 200 else "")
        return f"status {self.record.status}{', ' if said else ''}{said}"

    @property
    def between_s(self) -> float | None:
        """Mean time between tokens; None with fewer than two."""
        record = self.record
        if record.first is None or record.end is None or record.events < 2:
            return None
        return (record.end - record.first) / (record.events - 1)

    def text(self) -> str:
        """What the model has said."""
        said = []
        for line in self.body.split(b"\n"):
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:]).get("choices") or [{}]
                said.append((choices[0].get("delta") or {}).get("content") or "")
        return "".join(said)


class Call:
    """A request and the callbacks of its parser."""

    def __init__(self, tokens: int) -> None:
        self.seen = Seen(Record(0, "", tokens, float("inf"), 0.0, sent=0.0))
        self.over = False
        self._begin = time.monotonic()
        self._answer = Answer()
        self._parser = httptools.HttpResponseParser(self)
        self._last: float | None = None

    def run(self, url: str, path: str, headers: Mapping[str, str], body: bytes, leave_s: float, limit_s: float) -> Seen:
        """Send it and read the answer to its end; after `leave_s` the user leaves, after `limit_s` it has failed."""
        record = self.seen.record
        try:
            with connect(url) as line:
                line.sendall(request(url, path, headers, body))
                while not self.over:
                    left = min(leave_s, limit_s) - self._now()
                    if left <= 0:
                        raise TimeoutError
                    line.settimeout(left)
                    data = line.recv(READ_BYTES)
                    if not data:
                        if not self._ends_with_the_connection:
                            record.error = "connection closed before the end"
                        break
                    self._parser.feed_data(data)
        except TimeoutError:
            self.seen.left = leave_s < limit_s and self._now() >= leave_s
            record.error = "" if self.seen.left else "timed out"
        except httptools.HttpParserError as error:
            record.error = f"not HTTP: {error}"
        except OSError as error:
            record.error = f"connection: {error.strerror or error}"
        record.end = self._now()
        self._answer.tell(record)
        return self.seen

    # called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self.seen.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.seen.record.status = self._parser.get_status_code()
        self.seen.record.reason = self.seen.headers.get("x-tidegate-reason", "")

    def on_body(self, data: bytes) -> None:
        now = self._now()
        if self._last is not None:
            self.seen.longest_gap = max(self.seen.longest_gap, now - self._last)
        self._answer.feed(data, now)
        if self._answer.events:
            self._last = now
        self.seen.body += data

    def on_message_complete(self) -> None:
        self.over = True

    @property
    def _ends_with_the_connection(self) -> bool:
        framed = self.seen.headers.keys() & {"content-length", "transfer-encoding"}
        return self.seen.record.status is not None and not framed

    def _now(self) -> float:
        return time.monotonic() - self._begin


def connect(url: str) -> socket.socket:
    """A connection to the server of a URL, `http` or `https`."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    line = socket.create_connection((parts.hostname or "127.0.0.1", parts.port or (443 if secure else 80)), CONNECT_S)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ssl.create_default_context().wrap_socket(line, server_hostname=parts.hostname) if secure else line


def request(url: str, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """The bytes of a POST of JSON; the connection is for it alone."""
    given: dict[str, Any] = {
        "host": urlsplit(url).netloc,
        "content-type": "application/json",
        "content-length": len(body),
        "connection": "close",
        **headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"POST {urlsplit(url).path.rstrip('/')}{path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body
