"""Licences of the installed packages, and what a public database knows against the pinned ones.

Usage: python scripts/audit.py [--service pypi|osv|none] [LOCK...]

LOCK is the name of a file in requirements/ without its `.txt`; default: gateway, all that a gateway alone consists of.
Licences are read from what is installed. Known vulnerabilities are asked for by pip-audit, at PyPI or at OSV.

Exit code: 0 nothing found; 1 a known vulnerability, or a licence to look at; 2 the database did not answer for a
package, so that nothing is known about it, neither good nor bad.
"""

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
PIP_AUDIT: Final = Path(sys.prefix, "audit", "bin", "pip-audit")
PIN: Final = re.compile(r"^([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?==(\S+)", re.MULTILINE)
# Those that ask for no more than to be named; MPL-2.0 also for changes of its own files.
FREE: Final = re.compile(
    r"\b(MIT|BSD|0BSD|Apache|ISC|PSF|CNRI|Python Software Foundation|MPL|Mozilla|Unlicense|Zlib|HPND)\b"
)
CLASSIFIER: Final = "License :: OSI Approved :: "
LIMIT_S: Final = 600


@dataclass(slots=True)
class Finding:
    """What there is to say of one package."""

    name: str
    version: str
    licence: str = "not installed"
    known: list[str] = field(default_factory=list)
    asked: bool = False

    @property
    def free(self) -> bool:
        """Whether its licence is one of those that need no look."""
        if "GPL" in self.licence or "GNU" in self.licence:
            return False
        return FREE.search(self.licence) is not None or self.licence == "not installed"


def pinned(lock: str) -> list[tuple[str, str]]:
    """Names and versions in a lock file."""
    return PIN.findall((ROOT / "requirements" / f"{lock}.txt").read_text())


def licence_of(name: str) -> str:
    """What an installed package says: the expression, else the classifiers, else the first words of the text."""
    try:
        about = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
    said = about.get_all("Classifier") or []
    classified = [line.removeprefix(CLASSIFIER) for line in said if line.startswith(CLASSIFIER)]
    expression, text = ((about.get_all(name) or [""])[0] for name in ("License-Expression", "License"))
    return expression or ", ".join(classified) or text.strip().partition("\n")[0][:60] or "not said"


def ask(lock: str, service: str) -> dict[str, Any]:
    """pip-audit's answer, by package; empty where there is none."""
    if service == "none":
        return {}
    file = ROOT / "requirements" / f"{lock}.txt"
    output = ""
    command = [str(PIP_AUDIT), "--requirement", str(file), "--no-deps", "--disable-pip", "--format", "json"]
    command += ["--vulnerability-service", service, "--progress-spinner", "off"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        output = done.stderr
        return {one["name"].lower(): one for one in json.loads(done.stdout)["dependencies"]}
    except FileNotFoundError:
        print("audit: pip-audit is missing: scripts/setup.sh audit installs it", file=sys.stderr)
    except subprocess.TimeoutExpired:
        print(f"audit: no answer within {LIMIT_S} s", file=sys.stderr)
    except (ValueError, KeyError):
        print(f"audit: pip-audit failed: {output.strip()[-500:]}", file=sys.stderr)
    return {}


def audit(lock: str, service: str) -> list[Finding]:
    """All packages of a lock file."""
    answers = ask(lock, service)
    findings = []
    for name, version in pinned(lock):
        answer = answers.get(name.lower(), {})
        known = [f"{one['id']} (mended in {', '.join(one['fix_versions']) or '?'})" for one in answer.get("vulns", [])]
        findings.append(Finding(name, version, licence_of(name), known, "vulns" in answer))
    return findings


def report(findings: Sequence[Finding], *, licences_alone: bool = False) -> int:
    """Print them; returns the exit code."""
    width = max(len(f"{one.name} {one.version}") for one in findings)
    for one in findings:
        known = "; ".join(one.known) or ("nothing known" if one.asked else "not answered")
        mark = "" if one.free else "  <- look at this licence"
        print(f"  {f'{one.name} {one.version}':{width}}  {known:14}  {one.licence}{mark}")
    bad, odd = [one for one in findings if one.known], [one for one in findings if not one.free]
    silent = [one for one in findings if not one.asked]
    print(f"{len(findings)} packages: {len(bad)} with known vulnerabilities, {len(silent)} not answered for, ", end="")
    print(f"{len(odd)} licences to look at")
    if bad or odd:
        return 1
    return 2 if silent and not licences_alone else 0


def main(argv: Sequence[str]) -> int:
    """Audit each lock file named; the worst exit code."""
    locks = sorted(path.stem for path in (ROOT / "requirements").glob("*.txt"))
    parser = argparse.ArgumentParser(prog="scripts/audit.py", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("locks", nargs="*", metavar="LOCK", help=f"of {', '.join(locks)} (default: gateway)")
    parser.add_argument(
        "--service",
        choices=["pypi", "osv", "none"],
        default="pypi",
        help="whom to ask (default: pypi); none: licences alone",
    )
    arguments = parser.parse_args(argv)
    service = arguments.service
    codes = []
    for lock in arguments.locks or ["gateway"]:
        if lock not in locks:
            parser.error(f"there is no requirements/{lock}.txt")
        print(f"requirements/{lock}.txt: asking {service} about {len(pinned(lock))} packages ...", flush=True)
        codes.append(report(audit(lock, service), licences_alone=service == "none"))
    return 1 if 1 in codes else max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
