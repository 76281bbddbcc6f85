"""What the server says before it serves."""

import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from app import server as module
from app.server import GatewayServer
from app.settings import Settings


@pytest.mark.parametrize(
    ("host", "keys", "warned"),
    [("0.0.0.0", {}, True), ("127.0.0.1", {}, False), ("0.0.0.0", {"api_keys": "a:1"}, False)],
)
async def test_a_port_that_is_open_to_all_is_told(
    host: str,
    keys: dict[str, Any],
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    def listen(*_: object) -> socket.socket:
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        return sock

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "_listen", listen)
    server = GatewayServer(Settings(host=host, **keys))
    with caplog.at_level(logging.WARNING):
        server.bind()
    for _, sock in server._sockets:
        sock.close()
    assert ("TIDEGATE_API_KEYS" in caplog.text) == warned
