"""The door: the allow-list, keys and headers, and one place where every failure becomes what the client is told."""

import asyncio
import logging

from starlette.types import ASGIApp, Receive, Scope, Send

from app.admission import Admission
from app.beside import Beside
from app.call import Call, ClientLeft
from app.deadline import from_headers
from app.engine import EngineTransport
from app.errors import DRAINING, INVALID_KEY, SHEDDABLE, Refused
from app.forward import Forwarder
from app.house import House
from app.keys import Keys
from app.lanes import Lanes
from app.log import RequestLog
from app.metrics import Metrics
from app.monitor import Monitor
from app.recent import Recent
from app.relay import end_broken
from app.routes import Routes, Way
from app.settings import Settings
from app.stats import Stats
from app.status import EngineStatus

log = logging.getLogger("tidegate")


class Gateway:
    """What the routes share. Made once the event loop runs; `alone` when no launcher tells the engine's state."""

    def __init__(self, settings: Settings, keys: Keys, status: EngineStatus, *, alone: bool) -> None:
        self.settings = settings
        self.status = status
        self.house = House(
            settings.max_in_flight + settings.max_queue, settings.max_body_bytes, settings.max_held_bytes
        )
        self._loop = asyncio.get_running_loop()
        self._lanes = Lanes(settings.lanes)
        self._engine = EngineTransport(settings.engine_url)
        self.monitor = Monitor(self._engine, status, self._lanes, settings.stall_s, alone=alone)
        forwarder = Forwarder(settings, status, self._engine, self.monitor, self._lanes)
        self.admission = Admission(settings, status, self.house, self._lanes, forwarder)
        self._beside = Beside(status, self.house, forwarder)
        self.metrics = Metrics(status, self.admission.gate, self.house)
        self._recent = Recent(self.admission.gate.lanes)
        self.stats = Stats(self.admission.gate, self.house, self.metrics, self.monitor, status, self._recent)
        self._keys = keys
        self._log = RequestLog()
        self._calls: set[Call] = set()
        self.monitor.name_calls = lambda: ", ".join(sorted(call.id.decode() for call in self._calls if call.sent_at))
        self.empty = asyncio.Event()  # set in a drain once no request is left

    # draining

    def drain(self) -> None:
        """Take no more requests; those that are here may finish."""
        self.house.draining = True
        self._note_empty()

    def _note_empty(self) -> None:
        if self.house.draining and not self._calls:
            self.empty.set()

    def cut(self) -> int:
        """End every request that is still here with an error; returns how many."""
        for call in self._calls:
            call.interrupt(Refused(DRAINING, "The server shut down before the answer was complete."))
        return len(self._calls)

    async def aclose(self) -> None:
        """Let go of the engine."""
        await self.monitor.aclose()
        await self._engine.aclose()

    # one call

    async def serve(self, call: Call, routes: Routes, own: ASGIApp) -> None:
        """Answer one call, whatever happens to it."""
        gated = False
        try:
            route = call.route = routes.find(call.scope["method"], call.scope["raw_path"])
            if call.scope["method"] == "OPTIONS":
                return await self._preflight(call, route.method)
            if route.way is not Way.OPEN:
                self._check_key(call)
            if route.way in (Way.OPEN, Way.GUARDED):
                return await own(call.scope, call.receive, call.raw_send)
            self._calls.add(call)
            gated = route.way is Way.GATED
            self.metrics.total_requests += gated
            call.deadline = from_headers(call.headers, call.deadline.arrived, self.settings.deadline_s)
            await (self.admission if gated else self._beside).serve(call)
        except Refused as refused:
            await self._tell(call, refused, gated=gated)
        except ClientLeft:
            call.outcome = "client_left"
            call.abort()
            self._count_abort(call, "client_left")
        finally:
            if call in self._calls:
                self._calls.discard(call)
                self._end(call, gated=gated)
                self._note_empty()
            elif call.outcome:  # refused at the door
                self._log.write(call, self._loop.time())

    def _check_key(self, call: Call) -> None:
        key = self._keys.name_of(call.headers)
        if key is None:
            how = "Send it as Authorization: Bearer KEY, or as x-api-key."
            raise Refused(INVALID_KEY, f"The API key is missing or not known here. {how}")
        call.key = key

    async def _preflight(self, call: Call, method: str) -> None:
        allow = f"{method}, OPTIONS".encode()
        call.body_read = True
        await call.send_head(204, [(b"allow", allow)])
        await call.finish()

    async def _tell(self, call: Call, refused: Refused, *, gated: bool) -> None:
        call.outcome = refused.kind.outcome
        if gated:
            self.metrics.refused(call, refused)
        if refused.kind.reason in ("deadline", "draining"):
            self._count_abort(call, refused.kind.reason)
        if call.head_sent:
            return await end_broken(call, refused)
        shed = self.settings.shed_status if refused.kind in SHEDDABLE else None
        await call.refuse(refused, shed)

    def _count_abort(self, call: Call, cause: str) -> None:
        if call.sent_at is not None:
            self.metrics.aborted(cause)

    def _end(self, call: Call, *, gated: bool) -> None:
        now = self._loop.time()
        call.outcome = call.outcome or "engine_error"
        if gated:
            self.metrics.ended(call, now)
            self._recent.ended(call, now)
        self._log.write(call, now)


class Door:
    """The ASGI layer in front of FastAPI's routing: forwarded routes end here, our own go on to `app`."""

    def __init__(self, app: ASGIApp, routes: Routes) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Called by the server."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        gateway: Gateway = scope["app"].state.gateway
        await gateway.serve(Call(scope, receive, send), self._routes, self._app)
