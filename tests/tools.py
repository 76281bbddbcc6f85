"""Programs that tests use where the machine has them; `scripts/setup.sh tools` gets them on Debian."""

import os
import shutil
import sys
from pathlib import Path

import pytest

PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def tool(*names: str) -> str:
    """The path of the first of these programs that is there; without any, the test is skipped."""
    for name in names:
        if found := shutil.which(name, path=PATH):
            return found
    pytest.skip(f"needs {names[0]}, which is not on this machine: see scripts/setup.sh, part tools")
