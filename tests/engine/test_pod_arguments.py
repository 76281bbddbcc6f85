"""The arguments that pods give to vLLM are ones that it knows."""

import json
import subprocess
import sys

from tests.kubernetes.manifests import ON_GPUS, parse, pods, rendered

# As `vllm serve` reads its command line, up to where a GPU would be needed.
READ = """
import json, sys
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
command = ServeSubcommand()
command.subparser_init(parser.add_subparsers(required=True))
for arguments in json.load(sys.stdin):
    read = parser.parse_args(["serve", *arguments])
    command.validate(read)
    fields = "host port max_num_seqs scheduling_policy shutdown_timeout tensor_parallel_size nnodes node_rank headless"
    print(json.dumps({name: getattr(read, name) for name in fields.split()}))
"""


def test_vllm_understands_the_arguments_of_every_pod() -> None:
    engines = [(pod, pod.engine) for overlay in ON_GPUS for pod in pods(parse(rendered(overlay))) if pod.engine]
    given = [pod.arguments(engine) for pod, engine in engines]
    done = subprocess.run(
        [sys.executable, "-c", READ], input=json.dumps(given), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    read = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [one["tensor_parallel_size"] for one in read] == [1, 4, 8, 8]
    assert [(one["nnodes"], one["node_rank"], one["headless"]) for one in read[2:]] == [(2, 0, False), (2, 1, True)]
    assert {(one["host"], one["port"], one["scheduling_policy"]) for one in read} == {("127.0.0.1", 8001, "priority")}
    assert {(one["max_num_seqs"], one["shutdown_timeout"]) for one in read} == {(256, 30)}
