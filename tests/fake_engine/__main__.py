"""The command line of the fake engine."""

import argparse
import asyncio
import signal
from pathlib import Path

from tests.fake_engine import __doc__ as about
from tests.fake_engine.engine import Engine
from tests.fake_engine.script import Script, help_text, parse
from tests.fake_engine.server import Connection, factory

DEFAULT_MODEL = "fake-model"


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fake_engine",
        description=about,
        epilog=f"fields of a script, with their defaults:\n{help_text()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--uds", help="listen on this Unix socket (a stale one is replaced)")
    parser.add_argument("--port", type=int, help="listen on 127.0.0.1 at this port")
    parser.add_argument("--control-uds", help="answer /fake/ here too, out of reach of every fault")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name of the served model [%(default)s]")
    parser.add_argument(
        "--max-num-seqs", type=int, default=0, help="slots, as vLLM's; the rest waits by priority [no limit]"
    )
    parser.add_argument(
        "--kv-tokens", type=int, default=100_000, help="KV cache in tokens, for the metric [%(default)s]"
    )
    parser.add_argument("--log-size", type=int, default=100_000, help="requests that the log keeps [%(default)s]")
    parser.add_argument("--defaults", default="{}", help="the script of requests that carry none, JSON")
    given = parser.parse_args()
    if not given.uds and given.port is None:
        parser.error("give --uds or --port")
    return given


def unlink(path: str | None) -> None:
    """Remove a socket that a former run left."""
    if path:
        Path(path).unlink(missing_ok=True)


async def serve(given: argparse.Namespace) -> None:
    """Listen until SIGTERM or SIGINT."""
    engine = Engine(
        model=given.model,
        max_num_seqs=given.max_num_seqs,
        kv_tokens=given.kv_tokens,
        log_size=given.log_size,
        defaults=parse(given.defaults, Script()),
    )
    everyone: set[Connection] = set()
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    servers = []  # held, since uvloop closes a server that nobody refers to
    if given.uds:
        unlink(given.uds)
        servers.append(await loop.create_unix_server(factory(engine, everyone), given.uds, backlog=4096))
    if given.port is not None:
        servers.append(await loop.create_server(factory(engine, everyone), "127.0.0.1", given.port, backlog=4096))
        print(f"listening on 127.0.0.1:{servers[-1].sockets[0].getsockname()[1]}", flush=True)
    if given.control_uds:
        unlink(given.control_uds)
        servers.append(await loop.create_unix_server(factory(engine, everyone, control=True), given.control_uds))
    await over.wait()
    for path in (given.uds, given.control_uds):
        unlink(path)


def main() -> None:
    """Run on uvloop where it is installed."""
    given = arguments()
    try:
        import uvloop
    except ImportError:
        asyncio.run(serve(given))
    else:
        uvloop.run(serve(given))


if __name__ == "__main__":
    main()
