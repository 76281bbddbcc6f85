"""What can stand between client and engine: how each is installed, started, and recognised as missing.

Packages go into environments of their own under the user's cache folder, from pinned and hashed files in
requirements/peers/, since they could not share one with each other or with us.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.harness import free_port

ROOT: Final = Path(__file__).resolve().parent.parent
LOCKS: Final = ROOT / "requirements" / "peers"
CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidegate" / "peers"
INSTALL_S: Final = 600.0
MODEL: Final = "fake-model"
NGINX: Final = """\
worker_processes 1;
daemon off;
pid {folder}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  client_body_temp_path {folder};
  proxy_temp_path {folder};
  fastcgi_temp_path {folder};
  uwsgi_temp_path {folder};
  scgi_temp_path {folder};
  upstream engine {{ server 127.0.0.1:{engine}; keepalive 256; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://engine;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 600s;
    }}
  }}
}}
"""


class Missing(Exception):
    """A peer that cannot be had on this machine; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a peer listens, where its engine does, and a folder for its files."""

    port: int
    engine: int
    folder: Path


@dataclass(frozen=True, slots=True)
class Launch:
    """How it is started."""

    argv: list[str]
    env: dict[str, str]


@dataclass(frozen=True, slots=True)
class Peer:
    """One thing in the middle. `prepare` may install something; it raises Missing."""

    name: str
    about: str
    prepare: Callable[[Place, Callable[[str], None]], Launch]


def environment(name: str, tell: Callable[[str], None]) -> Path:
    """The virtual environment of a peer, made if it is not there as its lock file says; its folder of commands.

    Raises:
        Missing: it could not be installed.
    """
    lock = LOCKS / f"{name}.txt"
    wanted = hashlib.sha256(lock.read_bytes() + sys.version.encode()).hexdigest()
    folder = CACHE / name
    mark = folder / "installed"
    if not mark.exists() or mark.read_text() != wanted:
        tell(f"installing {name} (once)")
        shutil.rmtree(folder, ignore_errors=True)
        uv = str(Path(sys.executable).with_name("uv"))
        for command in (
            [uv, "venv", "--quiet", f"--python={sys.executable}", str(folder)],
            [uv, "pip", "install", "--quiet", "--require-hashes", f"--python={folder}/bin/python", "-r", str(lock)],
        ):
            try:
                subprocess.run(command, check=True, timeout=INSTALL_S, capture_output=True, text=True)
            except (OSError, subprocess.SubprocessError) as error:
                said = getattr(error, "stderr", None) or str(error)
                raise Missing(f"its installation failed: {said.strip().splitlines()[-1]}") from error
        mark.write_text(wanted)
    return folder / "bin"


def _clean() -> dict[str, str]:
    """The environment without what would make us or a proxy behave otherwise."""
    unwanted = ("TIDEGATE_", "WEB_CONC", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
    return {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}


def _nginx(place: Place, tell: Callable[[str], None]) -> Launch:
    command = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if command is None:
        raise Missing("nginx is not installed (on Debian and Ubuntu: apt-get install nginx-light)")
    file = place.folder / "nginx.conf"
    file.write_text(NGINX.format(folder=place.folder, engine=place.engine, port=place.port))
    return Launch([command, "-e", "stderr", "-p", str(place.folder), "-c", str(file)], _clean())


def _rust(command: Sequence[str], place: Place, log_level: str) -> Launch:
    """smg and vllm-router have one ancestor, and its flags."""
    engine = f"http://127.0.0.1:{place.engine}"
    where = ["--host", "127.0.0.1", "--port", str(place.port), "--prometheus-host", "127.0.0.1"]
    metrics = ["--prometheus-port", str(free_port())]
    policy = ["--policy", "round_robin", "--log-level", log_level]
    return Launch([*command, "--worker-urls", engine, *where, *metrics, *policy], _clean())


def _smg(place: Place, tell: Callable[[str], None]) -> Launch:
    return _rust([str(environment("smg", tell) / "smg"), "launch"], place, "warn")


def _vllm_router(place: Place, tell: Callable[[str], None]) -> Launch:
    return _rust([str(environment("vllm-router", tell) / "vllm-router")], place, "warning")


def _litellm(place: Place, tell: Callable[[str], None]) -> Launch:
    bin_ = environment("litellm", tell)
    engine = {"model": f"openai/{MODEL}", "api_base": f"http://127.0.0.1:{place.engine}/v1", "api_key": "none"}
    config = {"model_list": [{"model_name": MODEL, "litellm_params": engine}]}
    file = place.folder / "litellm.json"  # JSON is YAML
    file.write_text(json.dumps(config))
    argv = [str(bin_ / "litellm"), "--config", str(file), "--host", "127.0.0.1", "--port", str(place.port)]
    own = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False"}
    keyless = {"LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}  # it listens on the loopback alone
    return Launch(argv, _clean() | own | keyless)


def _relay(place: Place, tell: Callable[[str], None]) -> Launch:
    bin_ = environment("relay", tell)
    argv = [str(bin_ / "uvicorn"), "loadtest.baselines.relay:app", "--host", "127.0.0.1", "--port", str(place.port)]
    env = _clean() | {"ENGINE_URL": f"http://127.0.0.1:{place.engine}", "PYTHONPATH": str(ROOT)}
    return Launch([*argv, "--no-access-log", "--log-level", "warning"], env)


def tidegate(place: Place, **settings: str) -> Launch:
    """Ourselves, at the defaults but for a limit that lets the whole load through."""
    env = _clean() | {
        "PYTHONPATH": str(ROOT),
        "TIDEGATE_PORT": str(place.port),
        "TIDEGATE_ENGINE_URL": f"http://127.0.0.1:{place.engine}",
        "TIDEGATE_MAX_IN_FLIGHT": "256",
    }
    return Launch([sys.executable, "-m", "app"], env | {f"TIDEGATE_{name}": value for name, value in settings.items()})


PEERS: Final = {
    peer.name: peer
    for peer in (
        Peer("nginx", "C, a plain reverse proxy", _nginx),
        Peer("smg", "Rust, a gateway with admission", _smg),
        Peer("vllm-router", "Rust, vLLM's own router", _vllm_router),
        Peer("litellm", "Python, LiteLLM's proxy", _litellm),
        Peer("relay", "raw ASGI and aiohttp, nothing else", _relay),
        Peer("tidegate", "this gateway", lambda place, tell: tidegate(place)),
    )
}
RUST: Final = ("smg", "vllm-router")
