"""The life of parts, with small programs in place of the manager's own."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from manager import Settings, TokenizerManager
from manager import supervisor as module
from manager.errors import ConfigError
from manager.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SLEEP = "import time; time.sleep(60)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
)


@pytest.fixture
def supervise(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Supervisor]]:
    """Give a maker of supervisors whose parts are `python -c ARGUMENT`."""
    made: list[Supervisor] = []
    real = subprocess.Popen

    def popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return real([sys.executable, "-c", command[-1]], **options, stdout=subprocess.DEVNULL)

    monkeypatch.setattr(module.subprocess, "Popen", popen)

    def make(restarts_max: int = 3) -> Supervisor:
        made.append(Supervisor(restarts_max=restarts_max))
        return made[-1]

    yield make
    for supervisor in made:
        supervisor.stop(0)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def pid_of(supervisor: Supervisor, label: str) -> int:
    process = supervisor._parts[label].process
    assert process is not None
    return process.pid


def test_a_dead_part_is_started_again(supervise: Callable[..., Supervisor]) -> None:
    """A worker that crashed once must not leave its shard dark."""
    supervisor = supervise()
    supervisor.start("a", [SLEEP])
    supervisor.start("b", [SLEEP])
    pids = {label: pid_of(supervisor, label) for label in "ab"}
    assert supervisor.restart_dead() == []
    os.kill(pids["a"], signal.SIGKILL)
    wait_until(lambda: supervisor.exit_code("a") is not None)
    assert supervisor.restart_dead() == ["a"]
    assert supervisor.exit_code("a") is None
    assert pid_of(supervisor, "a") != pids["a"]
    assert pid_of(supervisor, "b") == pids["b"]


@pytest.mark.parametrize("restarts_max", [0, 1, 3])
def test_a_part_that_always_dies_is_given_up(supervise: Callable[..., Supervisor], restarts_max: int) -> None:
    """Started again for ever it would burn a core and fill the log."""
    supervisor = supervise(restarts_max)
    supervisor.start("a", ["raise SystemExit(7)"])
    restarts = 0
    while not supervisor.is_given_up("a"):
        wait_until(lambda: supervisor.exit_code("a") is not None)
        restarts += len(supervisor.restart_dead())
        assert restarts <= restarts_max
    assert restarts == restarts_max
    assert supervisor.exit_code("a") == 7
    assert supervisor.restart_dead() == []


def test_deaths_of_long_ago_do_not_count(
    supervise: Callable[..., Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One crash a day is no crash loop."""
    supervisor = supervise(1)
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    supervisor.start("a", ["pass"])
    process = supervisor._parts["a"].process
    for _ in range(5):
        assert process is not None
        process.wait()
        now += 61
        assert supervisor.restart_dead() == ["a"]
        process = supervisor._parts["a"].process
    monkeypatch.undo()
    assert process is not None
    process.wait()


def test_a_part_that_cannot_be_started_for_now_is_tried_again(
    supervise: Callable[..., Supervisor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that has no descriptor left for a moment must not lose its watch, nor the part for good."""
    supervisor = supervise(1)
    supervisor.start("a", ["pass"])
    wait_until(lambda: supervisor.exit_code("a") is not None)
    popen = module.subprocess.Popen

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(module.subprocess, "Popen", refuse)
    for _ in range(5):
        assert supervisor.restart_dead() == []
    assert not supervisor.is_given_up("a")
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "a died and cannot be started, it is tried again: why=[Errno 24] Too many open files"
    ]
    monkeypatch.setattr(module.subprocess, "Popen", popen)
    assert supervisor.restart_dead() == ["a"]


def test_parts_that_end_by_themselves_are_only_waited_for(supervise: Callable[..., Supervisor]) -> None:
    """A part that is ended from outside could not say its last words."""
    supervisor = supervise()
    supervisor.start("a", ["import time; time.sleep(0.1); raise SystemExit(5)"])
    process = supervisor._parts["a"].process
    supervisor.stop(20)
    assert process is not None
    assert process.returncode == 5
    assert not supervisor.is_ours("a")
    supervisor.stop(20)


@pytest.mark.parametrize("program", [SLEEP, STUBBORN])
def test_parts_that_do_not_end_are_ended(supervise: Callable[..., Supervisor], program: str) -> None:
    """A shutdown that hangs on one part ends with a SIGKILL of everything, clean-up included."""
    supervisor = supervise()
    supervisor.start("a", [program])
    process = supervisor._parts["a"].process
    assert process is not None
    if program == STUBBORN:
        time.sleep(0.3)  # until it ignores the signal; if not, it is only less stubborn
    supervisor.stop(0.05)
    assert process.returncode is not None
    assert process.returncode < 0


def test_stopped_parts_are_ended_too(supervise: Callable[..., Supervisor]) -> None:
    """A process in a debugger hears nothing but SIGKILL."""
    supervisor = supervise()
    supervisor.start("a", [SLEEP])
    process = supervisor._parts["a"].process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    supervisor.stop(0.05)
    assert process.returncode == -signal.SIGKILL


def test_an_engine_that_there_is_not_is_refused_before_anything_is_made(ring_name: str):
    """A typing error would show as another program's usage text, or not at all."""
    with pytest.raises(ConfigError, match=r"engine='nope', known=echo, ngram") as refused:
        TokenizerManager(Settings(name=ring_name), engine="nope")
    assert refused.value.setting == "engine"
