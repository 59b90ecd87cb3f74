"""The API as users write it passes mypy --strict, and what is wrong does not."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

pytestmark = pytest.mark.skipif(find_spec("mypy") is None, reason="mypy is not installed")


def _check(files: list[Path], folder: Path) -> subprocess.CompletedProcess[str]:
    # From an empty folder and without our configuration: as in a user's project. The package is
    # looked for where this interpreter would find it, which mypy cannot do for an editable install;
    # what there is to say of the package itself is no user's concern, as for all that is installed.
    options = ["--strict", "--no-error-summary", "--config-file=", "--follow-imports=silent"]
    command = [sys.executable, "-m", "mypy", *options, *map(str, files)]
    environment = {**os.environ, "MYPYPATH": str(_package_home()), "MYPY_CACHE_DIR": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def _package_home() -> Path:
    spec = find_spec("shmring")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


def test_what_users_write_is_accepted(tmp_path):
    """A type error in right code makes people switch the checker off."""
    answer = _check([HERE / "accepted.py", *EXAMPLES], tmp_path)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_what_is_wrong_is_refused_line_by_line(tmp_path):
    """Stubs that accept everything say nothing."""
    file = HERE / "refused.py"
    answer = _check([file], tmp_path)
    wanted = [n for n, line in enumerate(file.read_text().splitlines(), 1) if line.endswith("# wrong")]
    found = sorted({int(line.split(":")[1]) for line in answer.stdout.splitlines() if ": error:" in line})
    assert found == wanted, answer.stdout + answer.stderr
