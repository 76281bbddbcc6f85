"""The application: which routes there are and what lives as long as it does. A table of contents."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse

from app.cors import Cors
from app.gateway import Door, Gateway
from app.keys import load_keys
from app.metrics import CONTENT_TYPE
from app.routes import FORWARDED, OPS, PAGES, Routes
from app.settings import Settings
from app.stats import Watch
from app.status import EngineState, EngineStatus

PAGE: Final = Path(__file__).parent / "page"
PAGE_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
TOLD_TO_BROWSERS: Final = (
    "x-request-id x-tidegate-reason x-tidegate-lane x-tidegate-queue-ms retry-after retry-after-ms x-should-retry"
).split()

ops = APIRouter()
pages = APIRouter()


def create_app(settings: Settings, engine_status: EngineStatus | None = None) -> FastAPI:
    """The gateway. Without an `engine_status` that a launcher fills, it infers the engine's state by itself.

    Raises:
        SettingsError: the API keys are not `name:key`, or their file cannot be read.
    """
    keys = load_keys(settings)

    opened = asyncio.Event()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        alone = engine_status is None
        gateway = app.state.gateway = Gateway(settings, keys, engine_status or EngineStatus(), alone=alone)
        tasks = [asyncio.create_task(work.run()) for work in (gateway.monitor, gateway.stats)]
        opened.set()
        yield
        for task in tasks:
            task.cancel()
        await gateway.aclose()

    app = FastAPI(title="Tidegate", lifespan=lifespan, openapi_url=None)
    app.state.opened = opened
    app.include_router(pages)
    routes = [*FORWARDED, *PAGES]
    if settings.ops_port is None:
        app.include_router(ops)
        routes += OPS
    app.add_middleware(Door, routes=Routes(*routes))
    if origins := [origin.strip() for origin in settings.cors_origins.split(",") if origin.strip()]:
        app.add_middleware(
            Cors,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=TOLD_TO_BROWSERS,
        )
    return app


def create_ops_app(app: FastAPI) -> FastAPI:
    """Probes and metrics of `app`, for a port of their own."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await app.state.opened.wait()
        yield

    ops_app = FastAPI(title="Tidegate ops", lifespan=lifespan, openapi_url=None)
    ops_app.state = app.state
    ops_app.include_router(ops)
    ops_app.add_middleware(Door, routes=Routes(*OPS))
    return ops_app


def _gateway(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


def _probe(good: bool, **fields: Any) -> Response:
    return JSONResponse({"status": "ok" if good else "unavailable", **fields}, 200 if good else 503)


@ops.get("/livez")
async def live() -> Response:
    """The process answers."""
    return _probe(True)


@ops.get("/readyz")
@ops.get("/health")
async def ready(request: Request) -> Response:
    """Requests would be taken: the engine is up and the server is not draining."""
    gateway = _gateway(request)
    draining = gateway.house.draining
    return _probe(gateway.status.ready and not draining, engine=gateway.status.state, draining=draining)


@ops.get("/enginez")
async def engine(request: Request) -> Response:
    """The engine is not stalled: what its liveness probe asks."""
    state = _gateway(request).status.state
    return _probe(state is not EngineState.STALLED, engine=state)


@ops.get("/metrics")
async def metrics(request: Request) -> Response:
    """Own series and the engine's `vllm:` series."""
    gateway = _gateway(request)
    text = await gateway.monitor.metrics_text()
    return Response(gateway.metrics.render(text), media_type=CONTENT_TYPE)


@pages.get("/stats")
async def stats(request: Request) -> Response:
    """What is going on now; `?watch=1` goes on telling, `&history=1` begins with the last five minutes."""
    gateway, asked = _gateway(request), request.query_params
    if asked.get("watch") != "1":
        return JSONResponse(gateway.stats.snapshot())
    events = gateway.stats.watch(gateway.empty, history=asked.get("history") == "1")
    return Watch(gateway.stats, events)


@pages.get("/")
async def page() -> Response:
    """The same for people."""
    return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)


@pages.get("/page.js")
@pages.get("/page.css")
async def page_part(request: Request) -> Response:
    """What the page is made of."""
    return FileResponse(PAGE / request.url.path.lstrip("/"), headers=PAGE_HEADERS)
