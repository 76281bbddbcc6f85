"""`python -m app`: the gateway alone, in front of the engine at `TIDEGATE_ENGINE_URL`."""

import argparse
import asyncio
import logging
import sys

import uvloop

from app.log import configure
from app.server import GatewayServer, PortTaken
from app.settings import Settings, SettingsError, load_settings

BAD_SETTINGS = 2


def main() -> int:
    """Serve until a signal; the exit codes are those of the README."""
    parser = argparse.ArgumentParser(
        prog="python -m app",
        description="Tidegate's gateway alone, in front of any OpenAI-compatible engine. It is configured by the "
        "environment: TIDEGATE_ENGINE_URL, TIDEGATE_PORT and the others that .env.example lists.",
    )
    parser.add_argument("--workers", type=int, default=1, help=argparse.SUPPRESS)
    if parser.parse_args().workers != 1:
        return _complain(
            "several workers would each admit up to the limit: one process holds one gate; leave out --workers"
        )
    json_lines = False  # until the settings are known
    try:
        settings = load_settings()
        json_lines = settings.log_format == "json"
        configure(settings.log_format)
        return asyncio.Runner(loop_factory=uvloop.new_event_loop).run(_serve(settings))
    except (SettingsError, PortTaken) as error:
        return _complain(str(error), json_lines=json_lines)


async def _serve(settings: Settings) -> int:
    server = GatewayServer(settings)
    server.bind()
    ops = f", probes and metrics on port {settings.ops_port}" if settings.ops_port is not None else ""
    logging.getLogger("tidegate").info("listening on %s port %d%s", settings.host, server.port, ops)
    return await server.run()


def _complain(text: str, *, json_lines: bool = False) -> int:
    if json_lines:
        logging.getLogger("tidegate").error("%s", text)
    else:
        print(f"tidegate: {text}", file=sys.stderr)
    return BAD_SETTINGS


if __name__ == "__main__":
    sys.exit(main())
