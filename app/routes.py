"""The allow-list: every path that is answered, and how. Paths match raw and exactly; nothing is decoded."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from app.errors import METHOD, NOT_FOUND, Refused


class Way(Enum):
    """How a route is served."""

    GATED = auto()  # through the admission gate
    BESIDE = auto()  # forwarded to the engine without a slot
    GUARDED = auto()  # our own, behind the API keys
    OPEN = auto()  # our own, without a key


class Family(Enum):
    """Whose conventions a route's bodies and streams follow."""

    CHAT = auto()
    COMPLETIONS = auto()
    RESPONSES = auto()
    MESSAGES = auto()  # Anthropic's
    POOLING = auto()
    AUDIO = auto()
    OTHER = auto()


@dataclass(frozen=True, slots=True)
class Route:
    """One path. `name` is its label in metrics and logs."""

    name: str
    method: str
    way: Way
    family: Family = Family.OTHER


def _gated(family: Family, *paths: str) -> list[Route]:
    return [Route(path, "POST", Way.GATED, family) for path in paths]


def _own(way: Way, *paths: str) -> list[Route]:
    return [Route(path, "GET", way) for path in paths]


FORWARDED: Final = (
    *_gated(Family.CHAT, "/v1/chat/completions"),
    *_gated(Family.COMPLETIONS, "/v1/completions"),
    *_gated(Family.RESPONSES, "/v1/responses"),
    *_gated(Family.MESSAGES, "/v1/messages"),
    *_gated(Family.POOLING, "/v1/embeddings", "/v1/score", "/v1/rerank"),
    *_gated(Family.POOLING, "/score", "/rerank", "/v2/rerank", "/classify", "/pooling"),
    *_gated(Family.AUDIO, "/v1/audio/transcriptions", "/v1/audio/translations"),
    Route("/v1/messages/count_tokens", "POST", Way.BESIDE, Family.MESSAGES),
    Route("/tokenize", "POST", Way.BESIDE),
    Route("/detokenize", "POST", Way.BESIDE),
    Route("/v1/models", "GET", Way.BESIDE),
    Route("/version", "GET", Way.BESIDE),
)
OPS: Final = tuple(_own(Way.OPEN, "/livez", "/readyz", "/health", "/enginez", "/metrics"))
PAGES: Final = (*_own(Way.OPEN, "/", "/page.js", "/page.css"), *_own(Way.GUARDED, "/stats"))

GENERATION: Final = frozenset({Family.CHAT, Family.COMPLETIONS, Family.RESPONSES, Family.MESSAGES})


class Routes:
    """Looks a path up; built once for each port."""

    def __init__(self, *routes: Route) -> None:
        self._by_path = {route.name.encode(): route for route in routes}

    def find(self, method: str, path: bytes) -> Route:
        """The route for a method and a raw path; an OPTIONS request finds every known path.

        Raises:
            Refused: `not_found` or `method_not_allowed`.
        """
        route = self._by_path.get(path)
        if route is None:
            raise Refused(NOT_FOUND, f"There is no such route here.{self._hint(path)}")
        if method not in (route.method, "OPTIONS"):
            raise Refused(METHOD, f"This route takes {route.method} only.", allow=f"{route.method}, OPTIONS")
        return route

    def _hint(self, path: bytes) -> str:
        if path.startswith(b"/v1/realtime"):
            return " The realtime API is out of scope for Tidegate."
        if path.startswith(b"/v1/v1/"):
            return " The path has /v1 twice: a client that adds /v1 by itself wants a base_url without it."
        if path.rstrip(b"/") in self._by_path:
            return " The path ends with a slash too many."
        if b"/v1" + path in self._by_path:
            return " The path lacks /v1: end the client's base_url with it."
        return ""


def is_anthropic(path: bytes) -> bool:
    """Whether errors on this path take Anthropic's form, known route or not."""
    return path == b"/v1/messages" or path.startswith(b"/v1/messages/")
