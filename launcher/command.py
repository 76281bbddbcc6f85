"""From a device, a model and the user's own arguments to vLLM's command line and environment. Pure."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from launcher.device import Device
from launcher.niceness import NICENESS

GIB: Final = 2**30
SEQUENCES: Final = {"cpu": 16, "cuda": 256}  # at a time, by default; vLLM's own 1,024 on large GPUs is past the knee
ENTRY: Final = "vllm.entrypoints.openai.api_server"  # the CPU build's `vllm` command doesn't start
BACKSTOP: Final = 4096  # sequences beyond the limit: a body may hold more prompts than the slots it takes
RANKS: Final = {"-tp": "tensor-parallel-size", "-pp": "pipeline-parallel-size", "-dp": "data-parallel-size"}
SHORT: Final = RANKS | {
    "-n": "nnodes",
    "-r": "node-rank",
    "-dpl": "data-parallel-size-local",
    "-dpn": "data-parallel-rank",
    "-dpr": "data-parallel-start-rank",
    "-dpa": "data-parallel-address",
    "-dpb": "data-parallel-backend",
    "-dph": "data-parallel-hybrid-lb",
    "-dpe": "data-parallel-external-lb",
    "-dcp": "decode-context-parallel-size",
    "-ep": "enable-expert-parallel",
    "-q": "quantization",
    "-O": "optimization-level",
    "-cc": "compilation-config",
}
OURS: Final = set("model uds host port ssl-keyfile ssl-certfile root-path api-key headless grpc".split())
COMPILED: Final = {"enforce-eager", "optimization-level", "compilation-config"}
DTYPES: Final = ("auto", "bfloat16", "float", "float16", "float32", "half")  # as vLLM knows them
CACHE_SIZE: Final = {"kv-cache-memory-bytes", "gpu-memory-utilization", "num-gpu-blocks-override"}


class BadArguments(Exception):
    """vLLM arguments that cannot work under the launcher; the text says what to do instead."""


@dataclass(frozen=True, slots=True)
class Model:
    """A folder or a Hugging Face id, and the name that clients use."""

    path: str
    name: str
    embedded: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """How vLLM will be started; `limit` is what the gateway may keep in flight."""

    argv: list[str]
    env: dict[str, str]
    socket: Path
    limit: int
    dtype: str
    flags: Mapping[str, str] = field(default_factory=dict)  # all that vLLM gets, without the dashes
    niceness: int = 0  # towards the other processes on the machine
    warnings: list[str] = field(default_factory=list)


def make_plan(
    device: Device,
    model: Model,
    socket: Path,
    extra: Sequence[str],
    base_env: Mapping[str, str],
    *,
    max_in_flight: int | None = None,
    api_key: str | None = None,
) -> Plan:
    """The plan; the user's own `extra` arguments and environment win over what is chosen here.

    Raises:
        BadArguments: an argument would cut the gateway off from the engine, or has no sensible value.
    """
    given = _parse(extra)
    if taken := sorted(OURS & given.keys()):
        raise BadArguments(
            f"--{taken[0]} cannot be passed on to vLLM: the launcher decides what is served and how it is reached. "
            "MODEL, --host and --port go before the --; a key for the engine is TIDEGATE_ENGINE_API_KEY"
        )
    if extra and not extra[0].startswith("-"):  # vLLM would serve what --model says
        raise BadArguments(f"{extra[0]}: no argument of vLLM's begins like that; MODEL goes before the --")
    if (dtype := given.get("dtype", "auto")) not in DTYPES:  # vLLM would say so after seconds
        raise BadArguments(f"--dtype {dtype}: vLLM knows {', '.join(DTYPES[:-1])} and {DTYPES[-1]}")
    limit, sequences, warnings = _sequences(device, given, max_in_flight)
    chosen = {
        "model": model.path,
        "uds": str(socket),
        "max-num-seqs": str(sequences),
        "max-num-queued-reqs": str(limit + BACKSTOP),
        "scheduling-policy": "priority",
        "disable-uvicorn-access-log": "",
        "enable-request-id-headers": "",
    }
    if model.name != model.path:  # else a folder's whole path, another one on every machine
        chosen["served-model-name"] = model.name
    if model.embedded:
        chosen |= {"enable-auto-tool-choice": "", "tool-call-parser": "hermes"}
    if device.kind == "cpu":
        chosen |= _for_cpu(device, model, given, base_env)
    known = {*chosen, *OURS, *RANKS.values()}
    for name in given.keys() - known:
        if full := sorted(one for one in known if one.startswith(name)):  # vLLM would take it for that one
            raise BadArguments(f"--{name}: write it in full, --{' or --'.join(full)}")
    argv = [sys.executable, "-P", "-m", ENTRY]  # -P: nothing in the working folder passes for a module
    for name, value in chosen.items():
        if name not in given:
            argv += [f"--{name}", value] if value else [f"--{name}"]
    _check_gpus(device, given)
    warnings += _contradictions(device, given, limit)
    env = _environment(model, socket, base_env, api_key)
    return Plan(
        [*argv, *extra],
        env,
        socket,
        limit,
        dtype=given.get("dtype") or chosen.get("dtype", "as the model says"),
        flags=chosen | given,
        niceness=NICENESS if device.kind == "cpu" else 0,
        warnings=warnings,
    )


def _for_cpu(device: Device, model: Model, given: Mapping[str, str], base_env: Mapping[str, str]) -> dict[str, str]:
    """VLLM_CPU_OMP_THREADS_BIND stays `auto`, which leaves one core to everything else. Binding both of two gave 280
    tokens/s instead of 210 while nothing else ran, but a fifth of what `auto` gave beside other work."""
    # The embedded model's four bits leave nothing to round off: asked for the capital of France, it has the right first
    # word ahead of a wrong one by 0.1 in 25, and in vLLM's bfloat16 it takes the wrong one.
    chosen = {"dtype": "bfloat16" if device.bf16 and not model.embedded else "float32"}
    chosen["max-model-len"] = "auto"  # the model's own context, or what fits into the KV cache
    if not given.keys() & COMPILED:
        chosen["enforce-eager"] = ""  # compiling takes over a minute and gains 5%
    if not given.keys() & CACHE_SIZE and not base_env.get("VLLM_CPU_KVCACHE_SPACE"):
        # By default vLLM takes 92% of the memory, and fails where that much isn't free.
        chosen["kv-cache-memory-bytes"] = str(min(16, max(1, device.memory // 4 // GIB)) * GIB)
    return chosen


def _environment(model: Model, socket: Path, base_env: Mapping[str, str], api_key: str | None) -> dict[str, str]:
    """What the user has set, without our own settings (keys are among them), over what is chosen here."""
    chosen = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120",  # 5 s otherwise, like the gateway's: they would meet
        "VLLM_RPC_BASE_PATH": str(socket.parent),  # inner sockets; they would stay in /tmp for ever
        "PYTHONUNBUFFERED": "1",
    }
    if model.path.startswith("/"):
        chosen["HF_HUB_OFFLINE"] = "1"
    theirs = {name: value for name, value in base_env.items() if not _foreign(name, value)}
    return chosen | theirs | ({"VLLM_API_KEY": api_key} if api_key else {})


def _foreign(name: str, value: str) -> bool:
    link = value.startswith(("tcp://", "udp://"))  # Kubernetes, about a Service that is named vllm
    return (
        name.startswith("TIDEGATE_")
        or name in ("VLLM_API_KEY", "WEB_CONCURRENCY")
        or (name.startswith("VLLM_") and link)
    )


def _sequences(device: Device, given: Mapping[str, str], asked: int | None) -> tuple[int, int, list[str]]:
    """The gateway's limit, and vLLM's `--max-num-seqs`, which counts for each data-parallel rank."""
    ranks = _served_ranks(given)
    if "max-num-seqs" not in given:
        limit = asked or SEQUENCES[device.kind] * ranks
        return limit, math.ceil(limit / ranks), []
    sequences = number(given, "max-num-seqs", 1)
    limit = sequences * ranks
    clash = (
        f"--max-num-seqs {sequences} and TIDEGATE_MAX_IN_FLIGHT={asked} contradict each other: {limit} at a time it is"
    )
    return limit, sequences, [clash] if asked not in (None, limit) else []


def _served_ranks(given: Mapping[str, str]) -> int:
    """Over how many data-parallel ranks this engine spreads its requests; with an outer balancer only over its own."""
    if given.keys() & {"data-parallel-external-lb", "data-parallel-rank"}:
        return 1
    if given.keys() & {"data-parallel-hybrid-lb", "data-parallel-start-rank"}:
        return number(given, "data-parallel-size-local", 1)
    return number(given, "data-parallel-size", 1)


def _contradictions(device: Device, given: Mapping[str, str], limit: int) -> list[str]:
    """A warning for each pair of wishes that can't both come true; it names both."""
    found = []
    if given.get("scheduling-policy", "priority") != "priority":
        found.append(
            f"with --scheduling-policy {given['scheduling-policy']} the priorities in TIDEGATE_LANES have no effect"
        )
    if "config" in given:
        found.append("what the launcher passes itself, such as --max-num-seqs, beats the same setting in --config")
    if "max-num-queued-reqs" in given and number(given, "max-num-queued-reqs", 1) < limit:
        found.append(
            f"--max-num-queued-reqs {given['max-num-queued-reqs']} is below the {limit} that TIDEGATE_MAX_IN_FLIGHT "
            "(or --max-num-seqs) lets through: vLLM will refuse what the gateway has admitted"
        )
    if "disable-log-stats" in given:
        found.append(
            "with --disable-log-stats vLLM counts nothing, so TIDEGATE_STALL_S has no effect: no stall is found"
        )
    if number(given, "api-server-count", 1) > 1:
        found.append(
            "with --api-server-count above 1 a scrape shows one server's part, so TIDEGATE_STALL_S may misjudge"
        )
    if len(both := sorted(given.keys() & {"kv-cache-memory-bytes", "gpu-memory-utilization"})) == 2:
        found.append(f"--{both[1]} fixes the size of the KV cache, so --{both[0]} doesn't decide it")
    if "enforce-eager" in given and (other := sorted(given.keys() & COMPILED - {"enforce-eager"})):
        found.append(f"--enforce-eager switches off what --{other[0]} asks for")
    if device.kind == "cpu" and given.get("dtype") == "bfloat16" and not device.bf16:
        found.append(
            "--dtype bfloat16 on a processor without it: float32, which --device cpu takes here, is twice as fast"
        )
    return found


def _check_gpus(device: Device, given: Mapping[str, str]) -> None:
    """vLLM would say so only after a while, deep in a worker."""
    spread = given.keys() & {"nnodes", "data-parallel-size-local", "data-parallel-address"}
    spread |= {name for name in given if name.endswith("-backend") and given[name] == "ray"}
    if device.kind == "cuda" and not spread and (needed := workers(given)) > device.count:
        asked = " ".join(f"--{name} {given[name]}" for name in RANKS.values() if name in given)
        raise BadArguments(
            f"{asked}: asks for {needed} GPUs, there are {device.count}; docs/scaling.md has the ways out"
        )


def workers(given: Mapping[str, str]) -> int:
    """How many GPUs of this machine these arguments take."""
    tensor, pipeline, data = (number(given, name, 1) for name in RANKS.values())
    if given.keys() & {"data-parallel-external-lb", "data-parallel-rank"}:
        data = 1
    if "nnodes" in given:
        return math.ceil(tensor * pipeline * data / number(given, "nnodes", 1))
    return tensor * pipeline * number(given, "data-parallel-size-local", data)


def number(given: Mapping[str, str], name: str, default: int) -> int:
    """A count among the arguments.

    Raises:
        BadArguments: it is none.
    """
    text = given.get(name, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise BadArguments(f"--{name} {text}: must be a whole number from 1 up")
    return int(text)


def _parse(extra: Sequence[str]) -> dict[str, str]:
    """Names and values as vLLM reads them: `_` is `-`, `--no-x` and `--x.y 1` are about x, the last one counts."""
    given = {}
    for argument, following in zip(extra, [*extra[1:], "-"], strict=False):
        name, equals, value = argument.partition("=")
        if name.startswith("-O"):
            name = "-O"  # -O3
        if name.startswith("--"):
            name = name.removeprefix("--").replace("_", "-").removeprefix("no-").partition(".")[0]
        elif name in SHORT:
            name = SHORT[name]
        else:
            continue
        given[name] = value if equals else "" if following.startswith("-") else following
    return given
