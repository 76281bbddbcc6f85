"""vLLM's command line and environment for each kind of device and wish."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from launcher.command import BACKSTOP, DTYPES, GIB, BadArguments, Model, Plan, make_plan, workers
from launcher.device import Device
from tests.harness import ROOT

SOCKET = Path("/run/user/1/tidegate-x/engine.sock")
CPU = Device("cpu", "CPU, 2 cores", memory=10 * GIB, bf16=True)
OLD_CPU = Device("cpu", "CPU, 2 cores", memory=10 * GIB, bf16=False)
GPU = Device("cuda", "NVIDIA H200")
EIGHT_GPUS = Device("cuda", "NVIDIA H200", count=8)
EMBEDDED = Model("/cache/SmolLM2-b179c952", "SmolLM2-135M-Instruct", embedded=True)
LOCAL = Model("/models/llama-70b", "llama-70b")
REMOTE = Model("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")


Flags = dict[str, str | None]  # None: not there


def plan(device: Device, model: Model, *extra: str, env: dict[str, str] | None = None, **options: Any) -> Plan:
    return make_plan(device, model, SOCKET, extra, env or {}, **options)


def flags(made: Plan) -> dict[str, str]:
    """What vLLM is given, by name; each name may stand there once."""
    given: dict[str, str] = {}
    arguments = made.argv[made.argv.index("-m") + 2 :]
    for argument, following in zip(arguments, [*arguments[1:], "--"], strict=True):
        if argument.startswith("-"):
            name, _, value = argument.partition("=")
            assert name not in given, f"{name} stands there twice"
            given[name] = value or ("" if following.startswith("-") else following)
    return given


ALWAYS: Flags = {
    "--uds": str(SOCKET),
    "--scheduling-policy": "priority",
    "--disable-uvicorn-access-log": "",
    "--enable-request-id-headers": "",
}
ON_CPU = ALWAYS | {
    "--max-num-seqs": "16",
    "--max-num-queued-reqs": str(16 + BACKSTOP),
    "--dtype": "bfloat16",
    "--max-model-len": "auto",
    "--enforce-eager": "",
    "--kv-cache-memory-bytes": str(2 * GIB),
}
ON_GPU = ALWAYS | {"--max-num-seqs": "256", "--max-num-queued-reqs": str(256 + BACKSTOP)}
ON = {"cpu": ON_CPU, "cuda": ON_GPU}
NAMES: dict[Model, Flags] = {
    EMBEDDED: {
        "--model": EMBEDDED.path,
        "--served-model-name": "SmolLM2-135M-Instruct",
        "--enable-auto-tool-choice": "",
        "--tool-call-parser": "hermes",
    },
    LOCAL: {"--model": LOCAL.path, "--served-model-name": "llama-70b"},
    REMOTE: {"--model": REMOTE.path},
}
NOT_EAGER: Flags = {"--enforce-eager": None}


def seqs(number: int, limit: int) -> Flags:
    return {"--max-num-seqs": str(number), "--max-num-queued-reqs": str(limit + BACKSTOP)}


OFFLINE = {"HF_HUB_OFFLINE": "1"}
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120",
    "VLLM_RPC_BASE_PATH": str(SOCKET.parent),
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True)
class Row:
    """What is asked for, and where the flags differ from the usual ones.

    `env` is what vLLM, Ray and NCCL read about other machines: all of it must be passed on, and nothing else.
    """

    device: Device
    model: Model
    extra: str
    changed: Flags
    env: dict[str, str] = field(default_factory=dict)

    def plan(self) -> Plan:
        return plan(self.device, self.model, *self.extra.split(), env=self.env)


# Also parsed by vLLM itself, in tests/engine.
COMMAND_LINES: list[Row] = [
    Row(CPU, EMBEDDED, "", {"--dtype": "float32"}),
    Row(OLD_CPU, EMBEDDED, "", {"--dtype": "float32"}),
    Row(OLD_CPU, LOCAL, "", {"--dtype": "float32"}),
    Row(CPU, LOCAL, "", {}),
    Row(OLD_CPU, REMOTE, "--dtype bfloat16", {}),
    Row(CPU, REMOTE, "--max_model_len=2k", {"--max-model-len": None, "--max_model_len": "2k"}),
    Row(CPU, REMOTE, "-O 1", NOT_EAGER | {"-O": "1"}),
    Row(CPU, REMOTE, "-O3", NOT_EAGER | {"-O3": ""}),
    Row(CPU, REMOTE, "--compilation-config.mode 3", NOT_EAGER | {"--compilation-config.mode": "3"}),
    Row(CPU, REMOTE, "--no-enforce-eager", NOT_EAGER | {"--no-enforce-eager": ""}),
    Row(
        CPU,
        REMOTE,
        "--gpu-memory-utilization .5",
        {"--kv-cache-memory-bytes": None, "--gpu-memory-utilization": ".5"},
    ),
    Row(GPU, EMBEDDED, "--tool-call-parser=llama3_json", {"--tool-call-parser": "llama3_json"}),
    Row(GPU, LOCAL, "--served-model-name a", {"--served-model-name": "a"}),
    Row(GPU, REMOTE, "--scheduling-policy fcfs", {"--scheduling-policy": "fcfs"}),
    Row(GPU, REMOTE, "--max-num-seqs 8", seqs(8, 8)),
    # One GPU, and one of several.
    Row(GPU, EMBEDDED, "", {}),
    Row(GPU, REMOTE, "", {}),
    Row(EIGHT_GPUS, REMOTE, "", {}, {"CUDA_VISIBLE_DEVICES": "0"}),
    Row(EIGHT_GPUS, REMOTE, "", {}, {"CUDA_VISIBLE_DEVICES": "1"}),
    # Tensor parallel, pipeline parallel, both.
    Row(EIGHT_GPUS, LOCAL, "-tp 8", {"-tp": "8"}),
    Row(EIGHT_GPUS, LOCAL, "--tensor-parallel-size 4", {"--tensor-parallel-size": "4"}),
    Row(
        EIGHT_GPUS,
        REMOTE,
        "--tensor-parallel-size 2",
        {"--tensor-parallel-size": "2"},
        {"CUDA_VISIBLE_DEVICES": "2,3"},
    ),
    Row(EIGHT_GPUS, LOCAL, "--pipeline-parallel-size 2", {"--pipeline-parallel-size": "2"}),
    Row(EIGHT_GPUS, LOCAL, "--pipeline-parallel-size 2 -tp=4", {"--pipeline-parallel-size": "2", "-tp": "4"}),
    Row(
        EIGHT_GPUS,
        LOCAL,
        "--pipeline-parallel-size 2 --tensor-parallel-size 2",
        {"--pipeline-parallel-size": "2", "--tensor-parallel-size": "2"},
    ),
    # Data parallel: each rank has as many sequences.
    Row(EIGHT_GPUS, REMOTE, "-dp 4", seqs(256, 1024) | {"-dp": "4"}),
    Row(EIGHT_GPUS, REMOTE, "-dp 4 --max-num-seqs=32", seqs(32, 128) | {"-dp": "4"}),
    Row(
        EIGHT_GPUS,
        REMOTE,
        "--data-parallel-size 8 --enable-expert-parallel",
        seqs(256, 8 * 256) | {"--data-parallel-size": "8", "--enable-expert-parallel": ""},
    ),
    # One model over two machines, by vLLM's own workers and by Ray; both machines' GPUs make one engine.
    Row(
        EIGHT_GPUS,
        LOCAL,
        "--tensor-parallel-size 8 --pipeline-parallel-size 2 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1",
        {
            "--tensor-parallel-size": "8",
            "--pipeline-parallel-size": "2",
            "--nnodes": "2",
            "--node-rank": "0",
            "--master-addr": "10.0.0.1",
        },
        {"VLLM_HOST_IP": "10.0.0.1"},
    ),
    Row(
        EIGHT_GPUS,
        LOCAL,
        "-tp 8 -pp 2 -n 2 -r 0 --master-addr 10.0.0.1",
        {"-tp": "8", "-pp": "2", "-n": "2", "-r": "0", "--master-addr": "10.0.0.1"},
        {"VLLM_HOST_IP": "10.0.0.1", "NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"},
    ),
    Row(
        EIGHT_GPUS,
        LOCAL,
        "--tensor-parallel-size 8 --pipeline-parallel-size 2 --distributed-executor-backend ray",
        {
            "--tensor-parallel-size": "8",
            "--pipeline-parallel-size": "2",
            "--distributed-executor-backend": "ray",
        },
        {"RAY_ADDRESS": "10.0.0.1:6379"},
    ),
    # Data parallel over two machines: behind this engine all 16 ranks, behind a balancer only this machine's.
    Row(
        EIGHT_GPUS,
        LOCAL,
        "--data-parallel-size 16 --data-parallel-size-local 8 --data-parallel-address 10.0.0.1 "
        "--data-parallel-rpc-port 13345 --enable-expert-parallel",
        seqs(256, 16 * 256)
        | {
            "--data-parallel-size": "16",
            "--data-parallel-size-local": "8",
            "--data-parallel-address": "10.0.0.1",
            "--data-parallel-rpc-port": "13345",
            "--enable-expert-parallel": "",
        },
    ),
    Row(
        EIGHT_GPUS,
        LOCAL,
        "-dp 16 --data-parallel-size-local 8 --data-parallel-start-rank 8 --data-parallel-hybrid-lb",
        seqs(256, 8 * 256)
        | {
            "-dp": "16",
            "--data-parallel-size-local": "8",
            "--data-parallel-start-rank": "8",
            "--data-parallel-hybrid-lb": "",
        },
    ),
    Row(GPU, LOCAL, "-dp 16 --data-parallel-rank 3", {"-dp": "16", "--data-parallel-rank": "3"}),
]


@pytest.mark.parametrize("row", COMMAND_LINES, ids=lambda row: f"{row.device.kind} {row.extra}")
def test_command_line_and_environment(row: Row) -> None:
    wanted = ON[row.device.kind] | NAMES[row.model] | row.changed
    made = row.plan()
    assert flags(made) == {name: value for name, value in wanted.items() if value is not None}
    assert made.env == ENVIRONMENT | ({} if row.model is REMOTE else OFFLINE) | row.env


SCALING = (ROOT / "docs/scaling.md").read_text()


def commands(program: str) -> list[tuple[dict[str, str], list[str]]]:
    """Environment and arguments of each command with `program` in docs/scaling.md."""
    blocks = "\n".join(re.findall(r"^```bash\n(.*?)^```", SCALING, re.MULTILINE | re.DOTALL))
    found = []
    for line in blocks.replace("\\\n", " ").splitlines():
        before, there, after = line.partition(f"{program} ")
        if there and not line.startswith("#"):
            found.append((dict(word.split("=", 1) for word in before.split()), after.removesuffix("&").split()))
    return found


def test_the_table_holds_every_command_of_the_guide() -> None:
    table = {(row.extra, frozenset(row.env.items())) for row in COMMAND_LINES if row.device.kind == "cuda"}
    shown = commands(".venv/bin/python -m launcher")
    assert len(shown) == SCALING.count("-m launcher ")
    for env, arguments in shown:
        extra = " ".join(arguments[arguments.index("--") + 1 :]) if "--" in arguments else ""
        passed_on = {(name, value) for name, value in env.items() if not name.startswith("TIDEGATE_")}
        assert (extra, frozenset(passed_on)) in table, f"{extra} with {env}"


def test_own_arguments_come_last_and_as_they_are() -> None:
    extra = ["--override-generation-config", '{"temperature": 0}', "--limit-mm-per-prompt.image", "2"]
    assert plan(GPU, REMOTE, *extra).argv[-4:] == extra


@pytest.mark.parametrize(("free", "gib"), [(0, 1), (3 * GIB, 1), (12 * GIB, 3), (500 * GIB, 16)])
def test_kv_cache_is_a_part_of_the_free_memory(free: int, gib: int) -> None:
    made = plan(Device("cpu", "CPU", memory=free), EMBEDDED)
    assert flags(made)["--kv-cache-memory-bytes"] == str(gib * GIB)


def test_vllms_own_variable_for_the_kv_cache_is_heeded() -> None:
    assert "--kv-cache-memory-bytes" not in flags(plan(CPU, EMBEDDED, env={"VLLM_CPU_KVCACHE_SPACE": "4"}))


@pytest.mark.parametrize(
    ("device", "extra", "asked", "limit", "sequences", "warned"),
    [
        (CPU, [], None, 16, 16, False),
        (GPU, [], None, 256, 256, False),
        (CPU, [], 40, 40, 40, False),
        (CPU, ["--max-num-seqs", "8"], None, 8, 8, False),
        (CPU, ["--max-num-seqs", "8"], 8, 8, 8, False),
        (CPU, ["--max-num-seqs", "8"], 40, 8, 8, True),
        (EIGHT_GPUS, ["-dp", "8"], 100, 100, 13, False),
        (EIGHT_GPUS, ["-dp", "8", "--max-num-seqs", "10"], 80, 80, 10, False),
    ],
)
def test_limit_and_sequences_follow_each_other(
    device: Device, extra: list[str], asked: int | None, limit: int, sequences: int, warned: bool
) -> None:
    made = plan(device, REMOTE, *extra, max_in_flight=asked)
    assert (made.limit, flags(made)["--max-num-seqs"]) == (limit, str(sequences))
    assert bool(made.warnings) == warned
    for warning in made.warnings:
        assert "--max-num-seqs 8" in warning
        assert "TIDEGATE_MAX_IN_FLIGHT=40" in warning


@pytest.mark.parametrize(
    ("device", "extra", "names"),
    [
        (GPU, "--scheduling-policy=fcfs", ["--scheduling-policy fcfs", "TIDEGATE_LANES"]),
        (GPU, "--config vllm.yaml", ["--config", "--max-num-seqs"]),
        (GPU, "--max-num-queued-reqs 100", ["--max-num-queued-reqs 100", "TIDEGATE_MAX_IN_FLIGHT"]),
        (GPU, "--disable-log-stats", ["--disable-log-stats", "TIDEGATE_STALL_S"]),
        (GPU, "--api-server-count=2", ["--api-server-count", "TIDEGATE_STALL_S"]),
        (
            CPU,
            "--kv-cache-memory-bytes 1 --gpu-memory-utilization .5",
            ["--kv-cache-memory-bytes", "--gpu-memory-utilization"],
        ),
        (GPU, "--enforce-eager -O3", ["--enforce-eager", "--optimization-level"]),
        (OLD_CPU, "--dtype bfloat16", ["--dtype bfloat16", "--device cpu"]),
    ],
)
def test_arguments_that_contradict_each_other_are_warned_of_by_both_names(
    device: Device, extra: str, names: list[str]
) -> None:
    (warning,) = plan(device, REMOTE, *extra.split()).warnings
    assert all(name in warning for name in names), warning


@pytest.mark.parametrize("extra", ["--max-num-queued-reqs 1000", "-tp 1", "--enforce-eager", "--dtype bfloat16"])
def test_arguments_that_agree_are_not(extra: str) -> None:
    assert not plan(GPU, REMOTE, *extra.split()).warnings


@pytest.mark.parametrize("extra", ["-tp 2", "-pp 2", "-dp 2", "--tensor_parallel_size=2 -pp 4"])
def test_more_gpus_than_there_are_is_found_at_once(extra: str) -> None:
    with pytest.raises(BadArguments, match="there are 1"):
        plan(GPU, LOCAL, *extra.split())


@pytest.mark.parametrize(
    "extra", ["-tp 8 -n 4 -r 0", "-tp 8 --distributed-executor-backend=ray", "-dp 8 --data-parallel-backend ray"]
)
def test_unless_other_machines_have_them(extra: str) -> None:
    plan(EIGHT_GPUS, LOCAL, *f"-pp 4 {extra}".split())


@pytest.mark.parametrize(
    "extra",
    ["--uds=/x", "--port 1", "--host ::", "--model x", "--api-key secret", "--api_key=secret", "--headless", "--grpc"],
)
def test_arguments_that_would_cut_the_gateway_off_are_refused(extra: str) -> None:
    with pytest.raises(BadArguments) as caught:
        plan(GPU, REMOTE, *extra.split())
    assert "--" + extra[2:].replace("_", "-").partition("=")[0].split()[0] in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("extra", "full"), [("--max-num-seq 4", "--max-num-seqs"), ("--ud /x", "--uds"), ("--tensor_par=2", "--tensor-")]
)
def test_shortened_names_are_refused_since_vllm_would_take_them(extra: str, full: str) -> None:
    with pytest.raises(BadArguments, match=f"write it in full, {full}"):
        plan(GPU, REMOTE, *extra.split())


@pytest.mark.parametrize("extra", ["--max-num-seqs", "--max-num-seqs=0", "--max-num-seqs many", "-dp x"])
def test_numbers_that_are_none_are_refused(extra: str) -> None:
    with pytest.raises(BadArguments, match="must be a whole number"):
        plan(GPU, REMOTE, *extra.split())


@pytest.mark.parametrize("extra", ["--dtype float8", "--dtype=int8", "--dtype fp16", "--dtype BFloat16", "--dtype"])
def test_a_dtype_that_vllm_does_not_know_is_refused_with_those_that_it_knows(extra: str) -> None:
    with pytest.raises(BadArguments, match="vLLM knows auto, bfloat16, float, float16, float32 and half"):
        plan(GPU, REMOTE, *extra.split())


@pytest.mark.parametrize("dtype", DTYPES)
def test_those_are_passed_on(dtype: str) -> None:
    assert flags(plan(GPU, REMOTE, "--dtype", dtype))["--dtype"] == dtype


@pytest.mark.parametrize(
    ("extra", "gpus"),
    [
        ("", 1),
        ("-tp 4 --pipeline_parallel_size=2", 8),
        ("-tp 8 -pp 2 --nnodes 2", 8),
        ("-tp 2 -dp 8 --data-parallel-size-local 4", 8),
        ("-tp 2 -dp 8 --data-parallel-rank 3", 2),
        ("-tp 2 -dp 8 -dpl 4", 8),
        ("-tp 2 -dp 8 -dpn 3", 2),
        ("-dp 16 -n 2", 8),
    ],
)
def test_gpus_of_this_machine(extra: str, gpus: int) -> None:
    assert workers(plan(EIGHT_GPUS, LOCAL, *extra.split()).flags) == gpus


def test_threads_are_bound_by_vllm_itself() -> None:
    assert "VLLM_CPU_OMP_THREADS_BIND" not in plan(CPU, EMBEDDED).env


def test_the_engine_gives_way_where_it_shares_processors_with_the_gateway() -> None:
    assert plan(CPU, EMBEDDED).niceness == 10
    assert plan(GPU, EMBEDDED).niceness == 0


def test_only_a_local_model_keeps_the_engine_off_the_hub() -> None:
    assert plan(CPU, LOCAL).env["HF_HUB_OFFLINE"] == "1"
    assert plan(CPU, LOCAL, env={"HF_HUB_OFFLINE": "0"}).env["HF_HUB_OFFLINE"] == "0"
    assert "HF_HUB_OFFLINE" not in plan(CPU, REMOTE).env


def test_the_users_environment_is_passed_on_and_wins() -> None:
    given = {"PATH": "/bin", "HF_TOKEN": "hf_x", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "30", "VLLM_LOGGING_LEVEL": "DEBUG"}
    assert plan(CPU, EMBEDDED, env=given).env.items() >= given.items()


def test_the_gateways_settings_and_foreign_variables_stay_out_of_the_engine() -> None:
    """Kubernetes describes a Service named vllm as VLLM_PORT=tcp://…, which vLLM refuses."""
    given = {
        "TIDEGATE_API_KEYS": "a:secret",
        "WEB_CONCURRENCY": "1",
        "VLLM_API_KEY": "another",
        "VLLM_PORT": "tcp://10.0.0.1:80",
    }
    assert not plan(CPU, EMBEDDED, env=given).env.keys() & given.keys()


def test_the_engines_key_is_not_on_the_command_line() -> None:
    made = plan(CPU, EMBEDDED, api_key="secret")
    assert made.env["VLLM_API_KEY"] == "secret"
    assert not [argument for argument in made.argv if "secret" in argument]
