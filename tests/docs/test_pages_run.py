"""Every piece of code in the README and under docs/ does what its page says.

What a page can hold:

    ```python                   run: all of a page together, as one script whose line numbers are the page's
    ```python title="name.py"   written to that file, for the page's commands
    ```console                  run: lines that begin with `$ ` are commands, the rest is their output, where
                                a line `...` stands for any lines and `...` in a line for anything
    <!-- not run: why -->       on the line before a block: left alone
    ``` or ```text              a drawing

`python` and `shmring` are those of the tests. A page's files, script and commands share an empty folder.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WATCHDOG_S = 60
_FENCE = re.compile(r'```(\w*)(?: title="([^"]+)")?$')
_NOT_RUN = re.compile(r"<!-- not run: \S.* -->$")


@dataclass(frozen=True)
class Block:
    """A fenced piece of a page."""

    language: str
    title: str | None
    line: int
    """Of its first line, from 1."""
    text: str
    is_run: bool


def blocks_of(page: Path) -> list[Block]:
    blocks, lines = [], page.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if fence:
            end = lines.index("```", at + 1)
            is_run = not (at and _NOT_RUN.match(lines[at - 1]))
            text = "".join(f"{line}\n" for line in lines[at + 1 : end])
            blocks.append(Block(fence[1], fence[2], at + 2, text, is_run))
            at = end
        at += 1
    return blocks


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _environment() -> dict[str, str]:
    folder = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONWARNINGS": "error"}


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
        check=False,
    )


RUNNABLE = [
    page for page in PAGES if any(block.language in ("python", "console") for block in blocks_of(page))
]


@pytest.mark.parametrize("page", RUNNABLE, ids=_name)
def test_the_code_of_a_page_runs(page, tmp_path):
    """Whoever copies from a page gets what the page says."""
    blocks = [block for block in blocks_of(page) if block.is_run]
    for block in blocks:
        if block.title is not None:
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
    script = [block for block in blocks if block.language == "python" and block.title is None]
    if script:
        _run_script(page, script, tmp_path)
    for block in blocks:
        if block.language == "console":
            _run_commands(page, block, tmp_path)


def _run_script(page: Path, blocks: list[Block], folder: Path) -> None:
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - 1 - len(lines))
        lines += block.text.splitlines()
    file = folder / f"{page.stem}_page.py"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    answer = _run([sys.executable, file.name], folder)
    assert answer.returncode == 0, f"{_name(page)}\n{answer.stdout}{answer.stderr}"


def _run_commands(page: Path, block: Block, folder: Path) -> None:
    commands = [line[2:] for line in block.text.splitlines() if line.startswith("$ ")]
    said = [line for line in block.text.splitlines() if not line.startswith("$ ")]
    answer = _run(["bash", "-e", "-c", "\n".join([*commands, "wait"])], folder)
    told = f"{_name(page)}:{block.line}\n{answer.stdout}{answer.stderr}"
    assert answer.returncode == 0, told
    if said:
        assert re.fullmatch("".join(map(_pattern, said)), answer.stdout.rstrip("\n") + "\n"), told


def _pattern(line: str) -> str:
    return r"(?:.*\n)*" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + r"\n"
