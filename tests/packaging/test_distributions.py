"""What people install holds everything it needs and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv", ".cache", "*.so", "build", "dist", "*.egg-info", "__pycache__"
)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """Made from a copy: a build leaves traces where it runs."""
    folder = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, folder / "tree", ignore=NOT_SOURCE)
    return _build("--sdist", folder / "tree", folder)


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    """Made from the sdist, as pip does it where there is no wheel: what is missing there shows here."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(["tar", "-xzf", str(sdist), "-C", str(folder)], check=True)
    return _build("--wheel", folder / sdist.name.removesuffix(".tar.gz"), folder)


def _build(kind: str, tree: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "build", kind, "--outdir", str(folder / "dist"), str(tree)]
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-3000:]
    (made,) = (folder / "dist").iterdir()
    return made


def _sources() -> set[str]:
    """Every file of both packages that is no C and no leftover."""
    return {
        str(path.relative_to(ROOT))
        for package in ("shmring", "manager")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in {".so", ".pyc", ".c"}
    }


def test_the_wheel_holds_every_file_of_the_packages(wheel):
    """A stub, a data file or a module that stays behind is missed only at the user's."""
    names = set(zipfile.ZipFile(wheel).namelist())
    assert _sources() - names == set()


def test_the_wheel_holds_the_compiled_modules_and_no_sources_of_them(wheel):
    """Without them nothing can be imported."""
    names = zipfile.ZipFile(wheel).namelist()
    compiled = sorted(name.split(".")[0] for name in names if name.endswith(".so"))
    assert compiled == ["manager/_detok", "manager/_egress", "shmring/_fast", "shmring/_native"]
    others = [name for name in names if not name.startswith(("shmring/", "manager/", "shmring-"))]
    assert not others


def test_the_sdist_can_build_and_test(sdist):
    """Whoever packages for a distribution has the sdist and nothing else."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {
        "Makefile",
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "pyproject.toml",
        "setup.py",
        "native/cdefs.h",
        "native/include/shmring/layout.h",
        "native/python/fast.h",
        "tests/conftest.py",
        "scripts/fetch_tokenizers.py",
        "docs/index.md",
    }
    assert wanted - names == set()
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_the_metadata_says_what_is_needed(wheel):
    """pip refuses where it cannot run, instead of failing at import."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    needed = {
        line.split(">")[0].split(";")[0].strip()
        for line in metadata.get_all("Requires-Dist", [])
        if "extra" not in line
    }
    assert needed == {"cffi", "msgspec", "numpy", "posix_ipc", "tokenizers", "typing_extensions"}
