"""Resolve pyproject.toml into the pinned, hashed files of requirements/.

Usage: python scripts/lock.py [--upgrade]

Pins that still fit are kept; --upgrade takes the newest of everything. Needs uv beside this Python: `make lock`.
Every file is resolved under the pins of those before it, so that all can share one environment.
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = Path(sys.executable).with_name("uv")
NODE = ROOT / "tests" / "node"

# The engine first, right after the gateway: its ranges are the narrowest.
LOCKS: dict[str, list[str]] = {
    "uv": ["requirements/uv.in"],
    "node": ["requirements/node.in"],
    "gateway": ["pyproject.toml"],
    "engine-gpu": ["pyproject.toml", "--extra=gpu"],
    "engine-cpu": [
        "pyproject.toml",
        "requirements/engine-cpu.in",
        "--extra=cpu",
        "--excludes=requirements/engine-cpu.excludes",
    ],
    "dev": ["pyproject.toml", "--extra=dev"],
    "tools": ["requirements/tools.in"],
    "loadtest": ["pyproject.toml", "--extra=loadtest"],
    "fuzz": ["pyproject.toml", "--extra=fuzz"],
    # Each in an environment of its own.
    "checkov": ["requirements/checkov.in"],
    "audit": ["requirements/audit.in"],
    **{f"peers/{name}": [f"requirements/peers/{name}.in"] for name in ("litellm", "relay", "smg", "vllm-router")},
}
CONSTRAINTS: dict[str, list[str]] = {
    "engine-gpu": ["gateway"],
    "engine-cpu": ["gateway"],
    "dev": ["gateway", "engine-cpu", "engine-gpu"],
    "tools": ["gateway", "engine-cpu", "engine-gpu", "dev"],
    "loadtest": ["gateway", "engine-cpu", "engine-gpu", "dev", "tools"],
    "fuzz": ["gateway", "engine-cpu", "engine-gpu", "dev", "tools", "loadtest"],
}
MARKER = re.compile(r" ; (.+?)(?= \\$)", re.MULTILINE)


def path_of(name: str) -> Path:
    """The lock file of that name."""
    return ROOT / "requirements" / f"{name}.txt"


def resolve(name: str, upgrade: bool) -> None:
    """Write one lock file."""
    target = path_of(name)
    command = [str(UV), "pip", "compile", *LOCKS[name], "--quiet", "--universal", "--python-version=3.11"]
    command += [
        "--generate-hashes",
        "--no-strip-extras",
        "--custom-compile-command=make lock",
        f"--output-file={target}",
    ]
    command += [f"--constraints={path_of(other)}" for other in CONSTRAINTS.get(name, [])]
    if upgrade:
        command.append("--upgrade")
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    target.write_text(without_common_marker(target.read_text()))


def without_common_marker(text: str) -> str:
    """Drop from every line what `tool.uv.environments` says of all of them, and keep what a line says beyond that."""
    markers = Counter(MARKER.findall(text))
    if not markers:
        return text
    common = markers.most_common(1)[0][0]
    text = text.replace(f" ; {common} \\", " \\")
    version, _, rest = common.partition(" and ")
    return text.replace(f" and {version} and {rest}", "").replace(f" and {rest}", "")


def main() -> int:
    """Resolve everything; 0 if all of it went well."""
    upgrade = sys.argv[1:] == ["--upgrade"]
    if sys.argv[1:] and not upgrade:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        for name in LOCKS:
            print(f"requirements/{name}.txt", flush=True)
            resolve(name, upgrade)
        print("tests/node/package-lock.json", flush=True)
        npm = ["npm", "update" if upgrade else "install", "--package-lock-only", "--omit-lockfile-registry-resolved"]
        subprocess.run([*npm, "--no-audit", "--no-fund"], cwd=NODE, check=True, stdout=subprocess.DEVNULL)
    except FileNotFoundError as error:
        print(f"lock: {error.filename} is missing (uv comes with `make setup`, npm with Node.js 20)", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError:
        print("lock: no solution, see above; loosen or move a range in pyproject.toml", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
