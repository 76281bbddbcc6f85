"""A client on the bare socket: slow, half-open, stalled, impatient or talkative as a test wants it."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

PATIENCE_S = 20.0  # for anything that must happen at all
CHAT = "/v1/chat/completions"
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """A response as it came over the wire; `whole` is false when it was cut off."""

    status_code: int
    headers: dict[str, str]
    body: bytes
    whole: bool

    def json(self) -> Json:
        """The body as a JSON object."""
        return cast(Json, json.loads(self.body))


class Cut(Exception):
    """The connection ended where more had to come."""


class Wire:
    """A client on the bare socket: slow, half-open, stalled, impatient or talkative as a test wants it."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, headers: Mapping[str, str]
    ) -> None:
        self.reader = reader
        self.writer = writer
        self.host = host
        self.headers = headers

    @classmethod
    async def open(
        cls, port: int, *, headers: Mapping[str, str] | None = None, receive_buffer: int | None = None
    ) -> "Wire":
        """Connect to loopback; `receive_buffer` bytes bound what the kernel takes in for a reader that stalls."""
        sock = socket.socket()
        sock.setblocking(False)
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=receive_buffer or 2**16)
        return cls(reader, writer, f"127.0.0.1:{port}", headers or {})

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def send(self, data: bytes) -> None:
        """Write as it is."""
        self.writer.write(data)
        await self.writer.drain()

    def head(self, method: str, target: str, headers: Mapping[str, str] | None = None) -> bytes:
        """A request head."""
        lines = [f"{method} {target} HTTP/1.1"]
        given = {"host": self.host} | dict(self.headers) | dict(headers or {})
        return ("\r\n".join([*lines, *(f"{name}: {value}" for name, value in given.items())]) + "\r\n\r\n").encode(
            "latin-1"
        )

    async def request(
        self,
        target: str = CHAT,
        body: Json | bytes | None = None,
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        length: int | None = None,
    ) -> None:
        """Send a request; `length` announces another length than the body has."""
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"content-type": "application/json", "content-length": str(len(data) if length is None else length)}
        await self.send(self.head(method, target, (given if body is not None else {}) | dict(headers or {})) + data)

    async def start_chunked(self, target: str = CHAT, *, headers: Mapping[str, str] | None = None) -> None:
        """The head of a request whose body comes in chunks."""
        given = {"content-type": "application/json", "transfer-encoding": "chunked"}
        await self.send(self.head("POST", target, given | dict(headers or {})))

    async def chunk(self, data: bytes) -> None:
        """One chunk (an empty one ends the body)."""
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def read_head(self, within: float | None = PATIENCE_S) -> tuple[int, dict[str, str]]:
        """Status and headers of the next response; informational ones come as they are.

        Raises:
            Cut: the connection ended first.
        """
        try:
            text = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), within)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise Cut(f"no head: {error!r}") from error
        lines = text.decode("latin-1").split("\r\n")
        pairs = (line.split(":", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), {name.lower(): value.strip() for name, value in pairs}

    async def pieces(self, headers: Mapping[str, str], within: float | None = PATIENCE_S) -> AsyncIterator[bytes]:
        """The body's chunks as they arrive.

        Raises:
            Cut: the connection ended before the body did.
        """
        try:
            if "content-length" in headers:
                left = int(headers["content-length"])
                while left:
                    data = await asyncio.wait_for(self.reader.read(min(left, 65536)), within)
                    if not data:
                        raise Cut(f"{left} bytes missing")
                    left -= len(data)
                    yield data
            elif headers.get("transfer-encoding") == "chunked":
                while size := int((await asyncio.wait_for(self.reader.readuntil(b"\r\n"), within)).split(b";")[0], 16):
                    yield (await asyncio.wait_for(self.reader.readexactly(size + 2), within))[:-2]
                await asyncio.wait_for(self.reader.readuntil(b"\r\n"), within)
            else:
                while data := await asyncio.wait_for(self.reader.read(65536), within):
                    yield data
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise Cut(repr(error)) from error

    async def answer(self, within: float | None = PATIENCE_S, *, pause_s: float = 0) -> Answer:
        """The next final response, whole or as far as it came; read slowly, with a pause after each piece."""
        status, headers = await self.read_head(within)
        while status < 200:
            status, headers = await self.read_head(within)
        body = bytearray()
        try:
            if status not in (204, 304):
                async for piece in self.pieces(headers, within):
                    body += piece
                    if pause_s:
                        await asyncio.sleep(pause_s)
        except Cut:
            return Answer(status, headers, bytes(body), False)
        return Answer(status, headers, bytes(body), True)

    async def ended(self, within: float | None = PATIENCE_S) -> bool:
        """Whether the other side closes (by end of file or reset) without another byte."""
        try:
            return await asyncio.wait_for(self.reader.read(1), within) == b""
        except ConnectionError:
            return True

    def half_close(self) -> None:
        """Send end of file, keep reading."""
        self.writer.write_eof()

    def reset(self) -> None:
        """End the connection by RST."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def close(self) -> None:
        """End the connection."""
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


def events_of(body: bytes) -> list[bytes]:
    """A stream's events, comments left out; what follows the last complete event is an element of its own."""
    parts = body.replace(b"\r\n", b"\n").split(b"\n\n")
    return [part for part in parts if part and not part.startswith(b":")]


def data_of(event: bytes) -> Any:
    """The JSON in an event's `data:` line."""
    (line,) = [line for line in event.split(b"\n") if line.startswith(b"data:")]
    return json.loads(line[5:])
