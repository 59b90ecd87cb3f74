"""The benchmarks' programs still run: every cell that needs nothing from outside, as short as can be.

What they measure is not looked at: this machine may be busy.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize("kinds", ["records,batches,pingpong", "steps,paced", "busy", "engine,parked,wake"])
def test_every_cell_of_ours_is_measured(kinds, tmp_path):
    out = tmp_path / "results.json"
    done = run("benchmarks/run.py", "--ours", "--seconds", "0.01", "--only", kinds, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr
    measured = json.loads(out.read_text())["results"]
    assert {key.split("|")[0] for key in measured} == set(kinds.split(","))
    for key, (found,) in measured.items():
        assert all(value >= 0 for value in found.values()), key
        assert any(value > 0 for name, value in found.items() if name != "machine_busy"), key


def test_a_table_of_each_kind_is_printed(tmp_path):
    out = tmp_path / "results.json"
    done = run("benchmarks/run.py", "--ours", "--seconds", "0.01", "--only", "steps", "--out", out)
    assert "### Decode steps a second" in done.stdout, done.stderr
    assert "| shmring block frame |" in done.stdout


def test_detokenizing_is_compared():
    done = run("benchmarks/detokenize.py", "--rounds", "1", "--tokens", "256")
    assert done.returncode == 0, done.stderr
    assert "times stream" in done.stdout
    assert "worker 2: ready" in done.stdout
