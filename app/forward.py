"""Between a call and the engine: reads the body, sends it on, relays the answer, and names what went wrong."""

import asyncio

import httpx

from app.call import Call, ClientLeft
from app.engine import EngineTransport
from app.errors import ENGINE_ERROR, INVALID, Refused
from app.headers import Headers, to_engine
from app.house import Guest
from app.lanes import Lanes
from app.monitor import Monitor
from app.relay import Activity, Relay
from app.routes import GENERATION, Route, Way
from app.settings import Settings
from app.sse import EngineErrorEvent
from app.status import EngineStatus


class Forwarder:
    """Sends calls to the engine."""

    def __init__(
        self, settings: Settings, status: EngineStatus, engine: EngineTransport, monitor: Monitor, lanes: Lanes
    ) -> None:
        self._keepalive_s = settings.keepalive_s
        self._status = status
        self._engine = engine
        self._monitor = monitor
        self._lanes = lanes
        self._loop = asyncio.get_running_loop()
        self._own_headers: Headers = [(b"accept-encoding", b"identity")]
        if settings.engine_api_key is not None:
            token = settings.engine_api_key.get_secret_value()
            self._own_headers.append((b"authorization", b"Bearer " + token.encode()))

    async def read_body(self, call: Call, guest: Guest, limit_at: float) -> list[bytes]:
        """The whole body as the one element of a list, from which `send` takes it.

        Raises:
            Refused: it is larger than allowed, or the house holds too many bytes.
            ClientLeft: the client went away.
        """
        call.arm(min(call.deadline.at, limit_at))
        declared = b"content-length" in call.headers
        parts: list[bytes] = []
        size = 0
        while True:
            message = await call.receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            part = message.get("body", b"")
            size += len(part)
            parts.append(part)
            if not declared:
                guest.hold(size)
            if not message.get("more_body", False):
                call.body_read = True
                return parts if len(parts) == 1 else [b"".join(parts)]

    async def send(self, call: Call, body: list[bytes], guest: Guest, priority: int | None = None) -> None:
        """Send the request on and relay its answer to the end.

        Raises:
            Refused: `engine_unavailable` when nothing could be sent, `engine_error` when the engine broke off.
        """
        await self._monitor.settle()
        self._status.check_ready()
        assert call.route is not None
        target, headers = self._target(call, call.route), self._headers(call, call.route, len(body[0]), priority)
        call.sent_at = self._loop.time()
        # What the engine's front end answers by itself says nothing of the engine behind it.
        gated = call.route.way is Way.GATED
        if gated:
            self._monitor.request_sent()
        try:
            answer = await self._engine.ask(call.route.method, target, headers, body, guest.let_go)
            if answer.status < 300:
                self._monitor.prompt_counted(call.demand)
            activity = self._monitor.activity if gated else Activity()
            call.relay = Relay(call, answer, self._keepalive_s, activity)
            await call.relay.run()
            self._note_outcome(call, call.relay)
        except httpx.ConnectError:
            call.sent_at = None
            self._monitor.refused_connection()
            raise self._status.unavailable() from None
        except httpx.RemoteProtocolError as error:
            self._monitor.request_failed()
            raise Refused(ENGINE_ERROR, f"The engine did not complete its answer: {error}.") from None
        except EngineErrorEvent as event:
            if event.status < 500:
                call.outcome = "invalid"
            else:
                self._failed(call)
            no_retry = [(b"x-should-retry", b"false")] if event.status in (500, 502) else []
            await call.answer(event.status, no_retry, event.body)
        finally:
            if gated:
                self._monitor.request_over()

    def _note_outcome(self, call: Call, relay: Relay) -> None:
        if call.status >= 500 or (relay.has_events and relay.tail.failed):
            self._failed(call)
        elif call.status >= 400:
            call.outcome = "invalid"
        else:
            call.outcome = "completed"
            if (tokens := relay.output_tokens()) is not None:
                self._lanes.learn_output(relay.family, tokens // call.demand.weight)

    def _failed(self, call: Call) -> None:
        call.outcome = "engine_error"
        self._monitor.request_failed()

    @staticmethod
    def _target(call: Call, route: Route) -> bytes:
        query: bytes = call.scope["query_string"]
        return route.name.encode() + b"?" + query if query else route.name.encode()

    def _headers(self, call: Call, route: Route, length: int, priority: int | None) -> Headers:
        headers = to_engine(call.scope["headers"], call.headers.get(b"connection", b""))
        headers += self._own_headers
        headers.append((b"x-request-id", call.id))
        if length or route.method == "POST":
            headers.append((b"content-length", b"%d" % length))
        if priority is not None and route.family in GENERATION:
            headers.append((b"x-vllm-priority", b"%d" % priority))
        return headers


def content_length(call: Call) -> int:
    """The length that the client declares; 0 when the body comes in chunks.

    Raises:
        Refused: `invalid_request`.
    """
    length = call.headers.get(b"content-length", b"0")
    if not length.isdigit():
        raise Refused(INVALID, "The header content-length is not a number.", param="content-length")
    return int(length)
