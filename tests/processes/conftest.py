"""Commands of the manager as processes of a test: started, watched, and gone when the test is."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WATCHDOG_S = 60.0
ROOT = Path(__file__).parents[2]


def _environment() -> dict[str, str]:
    """Children find the package wherever the test was started from."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = WATCHDOG_S) -> None:
    """Poll until `condition` holds; fail the test if it never does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: what={what}, timeout_s={timeout_s}"
        time.sleep(0.005)


class Command:
    """One process; what it says goes to files, so that it never waits for its reader."""

    def __init__(self, folder: Path, arguments: list[str], *, stdin: int | None) -> None:
        self._out, self._err = folder / "out", folder / "err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=out,
                stderr=err,
                env=_environment(),
                cwd=folder,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def out(self) -> str:
        return self._out.read_text(encoding="utf-8")

    @property
    def err(self) -> str:
        return self._err.read_text(encoding="utf-8")

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def wait(self, timeout_s: float = WATCHDOG_S) -> int:
        """The exit code; fails the test if the process hangs."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"process hangs: arguments={self.process.args}, err={self.err}")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Commands:
    """Starts commands; ends what is left of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._commands: list[Command] = []

    def python(self, *arguments: str, stdin: int | None = None) -> Command:
        folder = self._folder / f"command-{len(self._commands)}"
        folder.mkdir()
        command = Command(folder, [sys.executable, *arguments], stdin=stdin)
        self._commands.append(command)
        return command

    def manager(self, *arguments: str, stdin: int | None = None) -> Command:
        """`python -m manager ...`."""
        return self.python("-m", "manager", *arguments, stdin=stdin)

    def end(self) -> None:
        for command in self._commands:
            if command.is_running:
                command.kill()
            # pytest shows it where the test has failed
            print(f"{command.process.args}: exit code {command.process.returncode}\n{command.err}")


@pytest.fixture
def commands(tmp_path: Path, deployment_name: str) -> Iterator[Commands]:
    """Give a starter of processes. They end before the deployment's leftovers are looked for."""
    started = Commands(tmp_path)
    yield started
    started.end()


def processes_of(name: str) -> list[int]:
    """Pids of the living processes that were started for this deployment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):  # gone meanwhile
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if name.encode() in words:
                    found.append(int(folder.name))
    return found


def segments_of(name: str) -> list[str]:
    """What is in shared memory of this deployment."""
    return [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(f"shmring.{name}")]


@pytest.fixture
def deployment_name(ring_name: str) -> Iterator[str]:
    """Give a deployment's name, and see that its processes and segments are gone in the end."""
    yield ring_name
    deadline = time.monotonic() + 10
    while (processes_of(ring_name) or segments_of(ring_name)) and time.monotonic() < deadline:
        time.sleep(0.01)
    left = processes_of(ring_name)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"processes were left behind: pids={left}"


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    """Give `wait_for`."""
    return wait_for


@pytest.fixture(scope="session")
def pids_of() -> Callable[[str], list[int]]:
    """Give `processes_of`."""
    return processes_of


@pytest.fixture(scope="session")
def names_left() -> Callable[[str], list[str]]:
    """Give `segments_of`."""
    return segments_of
