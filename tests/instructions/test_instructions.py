"""What a hot call costs in instructions: a figure that is the same on a busy machine.

The bounds are half as much again as what was counted on x86-64 (gcc 12, Python 3.11, numpy 2.4), so
another compiler or library passes, and a look-up, a copy or an object too much for each record
does not. Callgrind counts all that a call does, numpy and the allocator included.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("hot_calls.py")
CALLS = 2000

#: C function: (what the user calls, calls of it a turn, instructions counted)
COUNTED = {
    "producer_try_push": ("try_push, 64 bytes", 1, 216),
    "producer_push": ("push, 64 bytes", 1, 232),
    "producer_try_append": ("try_append, 64 bytes", 1, 142),
    "producer_publish": ("publish", 1, 95),
    "producer_push_many": ("push_many, 64 records of 64 bytes", 1, 7976),
    "consumer_try_pop": ("try_pop, 64 bytes", 1, 262),
    "consumer_pop": ("pop, 64 bytes", 1, 280),
    "consumer_pop_many": ("pop_many, 64 records of 64 bytes", 1, 10658),
    "consumer_drain": ("drain of one record, or of two in one of three", 6, 436),
    "consumer_release": ("release", 6, 81),
    "fast_layout_push": ("Schema.push, five columns of 256", 1, 2364),
    "layout_read": ("Schema.read, five columns of 256", 1, 1193),
    "frame_columns": ("Frame.columns, seven", 1, 3497),
    "dealer_deal": ("push_batch, 256 rows to four shards", 1, 15103),
    "running_step": ("RunningBatch.step, 256 rows to four shards", 1, 5107),
}


def why_not() -> str:
    if shutil.which("valgrind") is None or shutil.which("callgrind_annotate") is None:
        return "valgrind is not installed"
    if platform.machine() != "x86_64":
        return f"the counts are those of x86_64, not of {platform.machine()}"
    return ""


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    if reason := why_not():
        pytest.skip(reason)
    out = tmp_path_factory.mktemp("callgrind") / "out"
    run = subprocess.run(
        [
            "valgrind",
            "--tool=callgrind",
            f"--callgrind-out-file={out}",
            sys.executable,
            str(PROGRAM),
            str(CALLS),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    table = subprocess.run(
        ["callgrind_annotate", "--inclusive=yes", "--threshold=100", "--auto=no", str(out)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    found = re.findall(r"^\s*([\d,]+) \([^)]*\)\s+\S*?:(\w+)(?:'\d+)? \[", table, re.MULTILINE)
    return {function: int(count.replace(",", "")) for count, function in reversed(found)}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("function", COUNTED)
def test_a_hot_call_costs_no_more_than_it_did(function: str, counts: dict[str, float]) -> None:
    """Users pay it millions of times a second."""
    call, calls, counted = COUNTED[function]
    found = counts[function] / CALLS / calls
    print(f"{call}: {found:.0f} instructions")
    assert found <= counted * 1.5, f"{call}: counted={counted}, found={found:.0f}"
