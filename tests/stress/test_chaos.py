"""Ends killed at random moments lose nothing, and the program that shows it would see if they did."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shmring.testing import chaos

ROOT = Path(__file__).parents[2]
WATCHDOG_S = 900.0

pytestmark = pytest.mark.timeout(WATCHDOG_S + 60)


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: it forks, and pytest may have threads."""
    return subprocess.run(
        [sys.executable, "-m", "shmring.testing", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
        check=False,
    )


@pytest.mark.parametrize("seed", [11, 12])
def test_three_hundred_kills_lose_nothing(seed):
    """An engine is killed by somebody every day; a request must not vanish with it, or come out torn."""
    done = _run("chaos", "--kills", "150", "--seed", str(seed))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kills=15" in done.stdout  # a pair that dies together may be one more


def test_twenty_thousand_damaged_segments_bring_nothing_but_errors():
    """Anybody of the same user may write into the segment; a crash of ours would be his to choose."""
    done = _run("fuzz", "--count", "20000", "--seed", "20")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_time_limit_ends_the_run():
    """Somebody who has a minute wants a minute's worth."""
    done = _run("chaos", "--kills", "1000000", "--seed", "1", "--duration", "1")
    assert done.returncode == 0, done.stdout + done.stderr


def _skip_one(life, producer, number):
    producer.push(life._records.payload(number + 1))
    return number + 1


def _tear_one(life, producer, number):
    payload = bytearray(life._records.payload(number))
    payload[-1] ^= 1
    life._board[chaos.Word.PUBLISHING] = life._records.end(number)
    producer.push(payload)
    return number + 1


def _take_two(life, consumer, number):
    consumer.pop(0.05)
    consumer.pop(0.05)
    return number + 1


@pytest.mark.parametrize(
    ("way", "fault"),
    [("_push", _skip_one), ("_push", _tear_one), ("_pop", _take_two)],
    ids=["skipped", "torn", "taken"],
)
def test_chaos_sees_a_record_that_is_skipped_torn_or_taken_twice(monkeypatch, way, fault):
    """A judge that never finds anything would let every fault through."""
    monkeypatch.setattr(chaos._Life, way, fault)
    report = chaos.run(40, seed=5)
    assert report.failures
    assert "--seed 5" in report.text()
