"""Nothing in a segment is believed: whatever is written into it, there is an error or no difference.

Each run has a process of its own, so that a crash is a failed test and not the end of all tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("what", "at_least"),
    [
        ("header while attached", 6000),
        ("header before attach", 6000),
        ("records while attached", 6000),
        ("records before attach", 6000),
    ],
)
def test_no_damaged_byte_makes_a_crash_a_hang_or_a_wrong_record(what, at_least, ring_name, tmp_path):
    """One faulty process must not take its neighbours down, nor put words in their mouths."""
    done = subprocess.run(
        [sys.executable, str(HERE / "ring_damage.py"), ring_name, what, str(tmp_path / "case")],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1])},
    )
    case = (tmp_path / "case").read_text() if (tmp_path / "case").exists() else "none"
    assert done.returncode == 0, f"last case: {case}\n{done.stderr}"
    assert int(done.stdout) >= at_least
