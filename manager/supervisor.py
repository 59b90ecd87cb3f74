"""Processes that the manager starts: its workers, and an embedded engine. It owns their lives.

A part that dies is started again, a bounded number of times a minute. Parts end by themselves
when the manager closes its rings; only one that does not is ended from outside. Parts that
somebody else started are not touched.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from manager.cores import assign_cores
from manager.engines.catalogue import ENGINE_NAMES
from manager.errors import ConfigError
from manager.watch import SCHEDULER, worker_label

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from manager.config import Settings

log = logging.getLogger(__name__)

_MANAGERS_SIGNALS: Final = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
_RESTART_WINDOW_S: Final = 60.0
_POLL_S: Final = 0.01


def part_commands(
    settings: Settings, *, engine: str | None, start_workers: bool
) -> dict[str, tuple[str, ...]]:
    """The parts to be started, by label: arguments of `python -m manager`, the scheduler's first.

    Raises ConfigError for an engine that there is not.
    """
    parts: dict[str, tuple[str, ...]] = {}
    if engine is not None:
        if engine not in ENGINE_NAMES:
            raise ConfigError(
                f"no such engine: engine={engine!r}, known={', '.join(ENGINE_NAMES)}", setting="engine"
            )
        parts[SCHEDULER] = ("scheduler", "--name", settings.name, "--engine", engine)
    if start_workers:
        for shard in range(settings.workers):
            parts[worker_label(shard)] = ("worker", "--name", settings.name, "--shard", str(shard))
    cores = assign_cores(list(parts), settings.cores)
    return {
        label: (*arguments, *(("--core", str(cores[label])) if label in cores else ()))
        for label, arguments in parts.items()
    }


@dataclass
class Part:
    """One process of ours."""

    label: str
    arguments: tuple[str, ...]
    """Of `python -m manager`."""
    process: subprocess.Popen[bytes] | None = None
    starts: deque[float] = field(default_factory=deque)

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self.process is None else self.process.poll()

    def start(self) -> None:
        """Start the process; signals to the group are the manager's to handle. Raises OSError."""
        # Blocked in the child from its first moment on. It ends with us, however we end, and removes
        # what a killed manager leaves; a signal to the whole group must not end it before.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _MANAGERS_SIGNALS)
        try:
            self.process = subprocess.Popen(  # noqa: S603 - our own module, in our own interpreter
                [sys.executable, "-m", "manager", *self.arguments], stdin=subprocess.DEVNULL
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.starts.append(time.monotonic())


class Supervisor:
    """Starts parts, starts them again when they die, and ends them."""

    def __init__(self, *, restarts_max: int) -> None:
        self._restarts_max = restarts_max
        self._parts: dict[str, Part] = {}
        self._given_up: set[str] = set()
        self._unstartable: set[str] = set()  # said once, and tried again and again

    def start_all(self, commands: Mapping[str, Sequence[str]], deployment_id: int) -> None:
        """Start the parts of one deployment, by label: they serve this one, and none of its name after it."""
        for label, arguments in commands.items():
            self.start(label, (*arguments, "--supervised", str(deployment_id)))

    def start(self, label: str, arguments: Sequence[str]) -> None:
        """Start one part under a name of its own."""
        part = Part(label, tuple(arguments))
        self._parts[label] = part
        part.start()

    def is_ours(self, label: str) -> bool:
        """Tell whether this part was started here."""
        return label in self._parts

    def exit_code(self, label: str) -> int | None:
        """Exit code of a part of ours; None while it runs."""
        return self._parts[label].exit_code

    def is_given_up(self, label: str) -> bool:
        """Tell whether a part died so often that it is not started again."""
        return label in self._given_up

    def restart_dead(self) -> list[str]:
        """Start again what has died; returns the labels of those started.

        Where the machine has no process or file descriptor left it is no fault of the part: that does
        not count, and the next call tries again.
        """
        restarted = []
        for label, part in self._parts.items():
            if part.exit_code is None or label in self._given_up:
                continue
            now = time.monotonic()
            while part.starts and now - part.starts[0] > _RESTART_WINDOW_S:
                part.starts.popleft()
            if len(part.starts) > self._restarts_max:
                log.error("%s died too often and is not started again: exit_code=%s", label, part.exit_code)
                self._given_up.add(label)
                continue
            code = part.exit_code
            try:
                part.start()
            except OSError as error:
                if label not in self._unstartable:
                    log.error("%s died and cannot be started, it is tried again: why=%s", label, error)  # noqa: TRY400
                self._unstartable.add(label)
                continue
            self._unstartable.discard(label)
            log.warning("%s died and is started again: exit_code=%s", label, code)
            restarted.append(label)
        return restarted

    def stop(self, timeout_s: float) -> None:
        """Wait for all to end by themselves, then insist. Returns when none is left."""
        deadline = time.monotonic() + timeout_s
        processes = [part.process for part in self._parts.values() if part.process is not None]
        _wait(processes, deadline)
        for process in processes:
            if process.poll() is None:
                log.warning("a part did not end by itself and is killed: pid=%d", process.pid)
                process.kill()
            process.wait()
        self._parts.clear()


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(_POLL_S)
