"""The repository's own rules. Each says what somebody would lose without it."""

from __future__ import annotations

import ast
import dataclasses
import enum
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

import manager
import shmring

ROOT = Path(__file__).parents[2]
LINES_MAX = 600
TEST_LINES_MAX = 1000  # a list of promises may be longer than a train of thought
CODE = {".py", ".pyi", ".c", ".h"}
PROSE = {".md", ".toml", ".yaml", ".in", ""}
PACKAGES = ("shmring", "manager")

# Spelled in two pieces, so that this file does not find itself.
BANNED = [
    "/" + "work/",
    "/" + "tmp/w",
    "/" + "root/",
    "/" + "home/",
    "DESIGN" + ".md",
    "QUALITY" + ".md",
    "STYLE" + ".md",
    "REPORT" + "S",
    "FIX" + "ME",
    "XX" + "X",
]


def _files() -> list[Path]:
    """What git knows; in an unpacked sdist, what lies there."""
    answer = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if answer.returncode:
        return [
            path for folder in (*PACKAGES, "native", "tests", "docs") for path in (ROOT / folder).rglob("*.*")
        ]
    return [ROOT / name for name in answer.stdout.split("\0") if name and (ROOT / name).is_file()]


FILES = _files()
TEXTS = [path for path in FILES if path.suffix in CODE | PROSE and "data" not in path.parts]
MODULES = [path for path in FILES if path.suffix == ".py"]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_every_module_says_what_it_owns():
    """The first line is what a reader decides by whether to read on."""
    bare = [
        _name(path)
        for path in MODULES
        if path.read_text(encoding="utf-8").strip()
        and path.name != "setup.py"
        and not ast.get_docstring(_tree(path))
    ]
    assert not bare


def test_every_c_file_says_what_it_owns():
    """As for modules; a source's header says it for both."""
    headers = {path.stem for path in FILES if path.suffix == ".h"}
    sources = [
        path for path in FILES if path.suffix == ".h" or (path.suffix == ".c" and path.stem not in headers)
    ]
    bare = [_name(path) for path in sources if not path.read_text(encoding="utf-8").lstrip().startswith("/*")]
    assert not bare


def test_no_file_is_too_long_to_read():
    """A file of this length is two files."""
    long = []
    for path in TEXTS:
        count = len(path.read_text(encoding="utf-8").splitlines())
        if count > (TEST_LINES_MAX if "tests" in path.parts else LINES_MAX):
            long.append(f"{_name(path)}: {count}")
    assert not long


def test_no_module_is_called_utils():
    """A helper without a home is a missing noun."""
    homeless = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert not [_name(path) for path in MODULES if path.stem in homeless]


def test_the_project_speaks_of_itself_alone():
    """A path of one machine, or a document that nobody has, helps no reader."""
    found = [
        f"{_name(path)}: {word}"
        for path in TEXTS
        for word in BANNED
        if word in path.read_text(encoding="utf-8")
    ]
    assert not found


def test_the_licence_is_here():
    """What may be done with the code must travel with it."""
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert (ROOT / "manager" / "engines" / "data" / "NOTICE.md").is_file()


def _imports(path: Path) -> list[tuple[str, list[str]]]:
    """(module, names) of each import; no names for a plain import."""
    found: list[tuple[str, list[str]]] = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found += [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, [alias.name for alias in node.names]))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_nobody_inside_imports_the_whole_package(package):
    """The import linter cannot tell such an import from one of a compiled module, and lets both pass."""
    modules = {path.stem for path in (ROOT / package).iterdir()} | {"_detok", "_native", "_fast"}
    found = [
        _name(path)
        for path in (ROOT / package).rglob("*.py")
        for module, names in _imports(path)
        if module == package and not (names and set(names) <= modules)
    ]
    assert not found


def test_the_manager_uses_public_names_of_shmring_only():
    """Whoever changes the inside of shmring need not look into manager."""
    found = [
        f"{_name(path)}: {module}"
        for path in (ROOT / "manager").rglob("*.py")
        for module, names in _imports(path)
        if module.startswith("shmring.") or (module == "shmring" and not set(names) <= set(shmring.__all__))
    ]
    assert not found


def _written() -> set[str]:
    """Every word in code quotes of the reference."""
    pages = (ROOT / "docs" / "reference").glob("*.md")
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    return {word for quoted in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"\w+", quoted)}


def test_every_public_name_is_in_the_reference():
    """A name that is not written down is found by nobody, and may not be relied on."""
    assert not {*shmring.__all__, *manager.__all__} - _written()


def test_every_public_member_is_in_the_reference():
    """As for the names: a method that only its author knows of is none."""
    written = _written()
    unwritten = []
    for package in (shmring, manager):
        for name in package.__all__:
            kind = getattr(package, name)
            if not isinstance(kind, type) or issubclass(kind, (Exception, enum.Enum, np.generic)):
                continue
            own = {member for base in kind.__mro__[:-1] for member in vars(base)} | set(fields_of(kind))
            unwritten += [f"{name}.{member}" for member in own if member[0] != "_" and member not in written]
    assert not sorted(unwritten)


def fields_of(kind: type) -> list[str]:
    """Fields of a dataclass, or of a msgspec structure."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return list(getattr(kind, "__struct_fields__", ()))
