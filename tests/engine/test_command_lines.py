"""vLLM's own parser takes every command line that the launcher makes, for GPUs and machines that aren't here too."""

import json
import subprocess
import sys

import pytest

from launcher.command import DTYPES, SEQUENCES
from tests.harness import ROOT
from tests.unit.test_launcher_command import COMMAND_LINES, commands

PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
print("dtypes", *next(one.choices for one in parser._actions if "--dtype" in one.option_strings))
for arguments in json.load(sys.stdin):
    parsed = parser.parse_args(arguments)
    validate_parsed_serve_args(parsed)
    print(parsed.max_num_seqs, parsed.scheduling_policy)
"""


@pytest.mark.timeout(300)
def test_every_command_line_is_one_that_vllm_takes() -> None:
    made = [row.plan() for row in COMMAND_LINES]
    others = [arguments for _, arguments in commands("vllm serve")]  # of the machines without a front end
    arguments = json.dumps([*(one.argv[one.argv.index("-m") + 2 :] for one in made), *others])
    done = subprocess.run(
        [sys.executable, "-c", PARSE], input=arguments, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"dtypes {' '.join(DTYPES)}" in done.stdout.splitlines()
    seen = [line.split() for line in done.stdout.splitlines() if line.endswith(("priority", "fcfs"))]
    assert [count for count, _ in seen[: len(made)]] == [one.flags["max-num-seqs"] for one in made]
    assert seen[len(made) :] == [[str(SEQUENCES["cuda"]), "priority"]] * 2, (
        "as the launcher passes on the first machine"
    )


@pytest.mark.timeout(300)
def test_its_own_load_test_starts_where_its_command_does_not() -> None:
    command = [sys.executable, "-m", "loadtest.bench_serve", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for flag in ("--goodput", "--request-rate", "--header", "--extra-body", "--save-detailed"):
        assert flag in done.stdout
