"""`vllm bench serve`, vLLM's own load test, also where its command does not start: the CPU build has another name.

python -m loadtest.bench_serve --host 127.0.0.1 --port 8000 …     the flags are its own
"""

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; its result is what it prints, and a file with `--save-result`."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as serve

    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_serve", description=(__doc__ or "").split("\n")[0])
    add_cli_args(parser)
    serve(parser.parse_args(argv))
    return 0


if __name__ == "__main__":
    sys.exit(main())
