"""A Dockerfile's steps, run on this machine as far as that goes: each RUN and COPY, with absolute paths below a folder.

What stands in for the base image is the Python that runs this; steps of the system's package manager are left out.
Needs the package registry, as `make setup` does.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.harness import ROOT

RUN_S = 600.0
OURS = re.compile(r"(?<![\w.:/])/(?=opt/|src\b|home/)")  # absolute paths that a Dockerfile here makes


class Image:
    """What comes of a Dockerfile: a folder with its files, and how its container is started."""

    def __init__(self, dockerfile: Path, folder: Path) -> None:
        self.root = folder / "root"
        self.build = folder / "build"  # what the stage before has left
        self.base = folder / "base"  # commands of the base image
        self.base.mkdir()
        python = self.base / "python"
        python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys._base_executable)} "$@"\n')  # type: ignore[attr-defined]
        python.chmod(0o755)
        self.environment: dict[str, str] = {}
        self.folder = self.root
        self.entrypoint: list[str] = []
        self.healthcheck: list[str] = []
        self.user = ""
        self.left_out: list[str] = []
        for name, text in instructions(dockerfile.read_text()):
            getattr(self, f"_{name.lower()}")(text)

    def place(self, text: str) -> str:
        """The same text with absolute paths of the image below its folder here."""
        return OURS.sub(f"{self.root}/", text)

    def _from(self, text: str) -> None:
        if self.root.exists():
            self.root.rename(self.build)
        self.root.mkdir()
        self.environment, self.folder = {}, self.root

    def _workdir(self, text: str) -> None:
        self.folder = Path(self.place(text))
        self.folder.mkdir(parents=True, exist_ok=True)

    def _env(self, text: str) -> None:
        self.environment |= dict(part.split("=", 1) for part in shlex.split(self.place(text)))

    def _copy(self, text: str) -> None:
        *sources, target = shlex.split(text)
        if sources[0] == "--from=build":
            (source,) = sources[1:]
            assert source == target, "paths inside a virtual environment are absolute"
            there = Path(self.place(target))
            there.parent.mkdir(parents=True, exist_ok=True)
            (self.build / source.lstrip("/")).rename(there)
            return
        for source in sources:
            into = self.folder / target / (Path(source).name if target.endswith("/") else "")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, self.folder / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, into)

    def _run(self, text: str) -> None:
        if text.startswith("apt-get "):
            self.left_out.append(text)
            return
        (self.root / "home").mkdir(exist_ok=True)
        path = f"{self.base}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["/bin/sh", "-euc", self.place(text)],
            cwd=self.folder,
            env={**os.environ, "PATH": path, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_S,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}"

    def _user(self, text: str) -> None:
        self.user = text

    def _expose(self, text: str) -> None:
        pass

    def _entrypoint(self, text: str) -> None:
        self.entrypoint = json.loads(self.place(text))

    def _healthcheck(self, text: str) -> None:
        self.healthcheck = json.loads(self.place(text.partition(" CMD ")[2]))

    def files(self) -> set[str]:
        """All files of the image, but for its home."""
        return {str(file) for file in (self.root / "opt").rglob("*") if not file.is_dir()}

    def clean_environment(self, **more: str) -> dict[str, str]:
        """What a container of it would see, with some variables set by who starts it."""
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        return kept | self.environment | more

    def start(self, log: Path, **more: str) -> "subprocess.Popen[bytes]":
        """Its entry point, as a process of its own."""
        with log.open("wb") as output:
            return subprocess.Popen(
                self.entrypoint,
                cwd=self.folder,
                env=self.clean_environment(**more),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def is_healthy(self, **more: str) -> bool:
        """What its health check says."""
        done = subprocess.run(
            self.healthcheck, cwd=self.folder, env=self.clean_environment(**more), capture_output=True, timeout=30
        )
        return done.returncode == 0


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Names and texts of a Dockerfile's instructions."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, rest = line.partition(" ")
        yield name, " ".join(rest.split()) if name != "HEALTHCHECK" else rest
