"""Pages of other origins: a preflight is an OPTIONS request like any other, and CORS adds its headers to the answer."""

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Message, Receive, Scope, Send


class Cors(CORSMiddleware):
    """Starlette answers a preflight by itself, on routes that there aren't too; here the door does."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Called by the server."""
        asked = Headers(scope=scope) if scope["type"] == "http" and scope["method"] == "OPTIONS" else Headers()
        if "origin" not in asked or "access-control-request-method" not in asked:
            return await super().__call__(scope, receive, send)
        answer = self.preflight_response(asked)  # one to a stranger's lacks the header that would allow anything
        told = [header for header in answer.raw_headers if not header[0].startswith(b"content-")]

        async def send_told(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *told]
            await send(message)

        await self.app(scope, receive, send_told)
