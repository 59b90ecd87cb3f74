"""Requests by the thousand through real processes, with random aborts: one end each, and nothing is kept.

MANAGER_LOAD_REQUESTS=100000 pytest tests/stress/test_many_requests.py      more of them
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import request_load

from manager import TokenizerManager
from manager.outbox import Outbox

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "request_load.py"
COUNT = int(os.environ.get("MANAGER_LOAD_REQUESTS", "1000"))
WATCHDOG_S = 120 + COUNT / 20

pytestmark = pytest.mark.timeout(WATCHDOG_S + 60)


@pytest.fixture(autouse=True)
def children_find_the_package(monkeypatch):
    """Wherever the test was started from."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.mark.parametrize(("engine", "workers"), [("echo", 4), ("ngram", 2)])
def test_aborts_at_random_moments_leave_nothing_behind_and_nobody_with_anothers_words(engine, workers):
    """A server runs for months: what is kept of one request in a thousand is found as a crash one night."""
    done = subprocess.run(
        [
            *(sys.executable, str(PROGRAM), "--requests", str(COUNT)),
            *("--workers", str(workers), "--engine", engine),
        ],
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


def load(name: str, engine: str = "echo") -> request_load.Load:
    """Run a small one in this process, with what the test has done to the manager."""
    small = request_load.Load(count=150, seed=3, engine=engine, workers=2, name=name)
    asyncio.run(asyncio.wait_for(small.run(), 100))
    return small


def _text_of_another(self: Any, request_id: int, text: str, *rest: Any) -> None:
    _on_text(self, request_id, text.replace("hill", "HILL"), *rest)


def _twice(self: Any, request_id: int, text: str, ids: list[int], count: int, reason: Any) -> None:
    _on_text(self, request_id, text, ids, count, None)
    _on_text(self, request_id, "" if reason else text, [], 0, reason)


_on_text = TokenizerManager.on_text


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ((TokenizerManager, "on_text", _text_of_another), "text or ids of something else"),
        ((TokenizerManager, "on_text", _twice), "text or ids of something else"),
        ((TokenizerManager, "_leave", lambda _self, _stream: None), "manager: requests"),
        ((Outbox, "deregister", lambda _self, _request_id: None), "open': "),
        ((request_load, "RSS_GROWTH_MAX", -1), "grew"),
    ],
    ids=["another's text", "text twice", "kept by the manager", "kept by a worker", "grown"],
)
def test_the_program_sees_what_goes_wrong(ring_name, monkeypatch, fault, problem):
    """A judge that never finds anything would let every fault through."""
    monkeypatch.setattr(*fault)
    monkeypatch.setattr(request_load, "QUIET_TIMEOUT_S", 0.2)
    failures = load(ring_name).failures
    assert any(problem in failure for failure in failures), failures


def test_log_probabilities_of_another_request_are_seen(ring_name, monkeypatch):
    """They look like any others, and nobody would ask."""
    on_extras = TokenizerManager.on_extras

    def mixed_up(self: Any, request_id: int, extras: Any) -> None:
        said = [(None if value is None else value - 1, *rest) for value, *rest in extras.logprobs.output]
        on_extras(
            self,
            request_id,
            dataclasses.replace(extras, logprobs=dataclasses.replace(extras.logprobs, output=said)),
        )

    monkeypatch.setattr(TokenizerManager, "on_extras", mixed_up)
    failures = load(ring_name, "ngram").failures
    assert any("log probabilities of something else" in failure for failure in failures), failures
