"""`scheduler` and `worker`: the parts of a deployment, each as a process that any supervisor can run."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

from manager.deployment import read_manifest, remove_dead_deployment
from manager.engines.catalogue import CONTINUES_PROMPT, ENGINE_NAMES, make_engine
from manager.engines.loop import run_engine
from manager.errors import ConfigError, DeploymentEndedError
from manager.scheduler_port import SchedulerPort
from manager.worker import run_worker
from shmring import SegmentNotFoundError

if TYPE_CHECKING:
    import argparse

    from manager.deployment import Manifest

_SILENT_WAIT_S = 0.5


def add_scheduler_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`python -m manager scheduler`."""
    parser = commands.add_parser("scheduler", help="run an embedded engine as the scheduler of a deployment")
    _add_common(parser)
    parser.add_argument("--engine", choices=ENGINE_NAMES, required=True)
    parser.add_argument("--seed", type=int, help="of requests without a seed; default: random")
    parser.add_argument("--chunk", type=int, default=1, help="echo: tokens of each request a step")
    parser.set_defaults(run=_run_scheduler)


def add_worker_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`python -m manager worker`."""
    parser = commands.add_parser("worker", help="run one detok worker of a deployment")
    _add_common(parser)
    parser.add_argument("--shard", type=int, required=True, help="which of the deployment's shards, from 0")
    parser.set_defaults(run=_run_worker)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", required=True, help="the deployment's name")
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="wait so long for the deployment; default: for ever"
    )
    parser.add_argument(
        "--supervised",
        type=int,
        metavar="ID",
        help="started by the manager of this very deployment: end with it, and leave signals to it",
    )
    parser.add_argument("--core", type=int, metavar="N", help="run on this core only")
    parser.add_argument("--verbose", action="store_true")


def _pin(options: argparse.Namespace) -> None:
    if options.core is None:
        return
    allowed = os.sched_getaffinity(0)
    if options.core not in allowed:
        raise ConfigError(f"core is not ours: core={options.core}, allowed={sorted(allowed)}", setting="core")
    os.sched_setaffinity(0, {options.core})


def _stop_on_signals(options: argparse.Namespace) -> threading.Event:
    stop = threading.Event()

    def on_signal(_number: int, _frame: object) -> None:
        stop.set()

    if options.supervised is None:  # else they are blocked, see Supervisor
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, on_signal)
    return stop


def _own_deployment(options: argparse.Namespace) -> Manifest | None:
    """The deployment whose manager started us; None if that has gone, its names removed.

    Another one of that name is none of our business: it has parts of its own.
    """
    try:
        manifest = read_manifest(options.name)
    except SegmentNotFoundError:
        return None
    except DeploymentEndedError:
        remove_dead_deployment(options.name)
        return None
    return manifest if manifest.deployment_id == options.supervised else None


def _await_deployment(options: argparse.Namespace, stop: threading.Event) -> Manifest | None:
    """Wait for the manifest, and say so if it takes a while. None: told to stop meanwhile.

    Raises SegmentNotFoundError when the time given is over.
    """
    if options.supervised is not None:
        return _own_deployment(options)
    deadline = None if options.timeout is None else time.monotonic() + options.timeout
    is_told = False
    while not stop.is_set():
        left_s = _SILENT_WAIT_S if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            return read_manifest(options.name, min(_SILENT_WAIT_S, left_s))
        except (SegmentNotFoundError, DeploymentEndedError):
            # by the clock: a dead manager's leftover is found at once, and waited for all the same
            if deadline is not None and time.monotonic() >= deadline:
                raise
            if not is_told:
                print(f"waiting for a manager of the deployment: name={options.name}", file=sys.stderr)
                is_told = True
            stop.wait(0.02)
    return None


def _run_scheduler(options: argparse.Namespace) -> int:
    _pin(options)
    stop = _stop_on_signals(options)
    manifest = _await_deployment(options, stop)
    if manifest is None:
        return 0
    # before it attaches: whoever sees a scheduler may send it requests
    randomness = random.Random(options.seed)  # noqa: S311 - it draws words
    engine = make_engine(options.engine, manifest, randomness=randomness, chunk=options.chunk)
    continues_prompt = CONTINUES_PROMPT[options.engine]
    with SchedulerPort.attach(options.name, timeout_s=1.0, continues_prompt=continues_prompt) as port:
        if options.supervised is not None and _own_deployment(options) is None:
            return 0
        try:
            run_engine(engine, port, should_stop=stop.is_set)
        except DeploymentEndedError as error:
            if not error.orderly:
                raise
    return 0


def _run_worker(options: argparse.Namespace) -> int:
    _pin(options)
    stop = _stop_on_signals(options)
    if _await_deployment(options, stop) is None:
        return 0
    ended_well = run_worker(options.name, options.shard, timeout_s=1.0, should_stop=stop.is_set)
    return 0 if ended_well else 1
