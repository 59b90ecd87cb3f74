"""Seeds of the simulations: two hundred, or the one that failed.

MANAGER_SIMULATION_SEED=17 pytest tests/simulation                                only that one
MANAGER_SIMULATION_FIRST=200 MANAGER_SIMULATION_COUNT=5000 pytest tests/simulation     others, and more

A seed that failed prints the command that runs it again.
"""

from __future__ import annotations

import os

import pytest

COUNT_DEFAULT = 200

pytest.register_assert_rewrite("clients", "fragile_parts", "world")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that takes a `seed` once a seed."""
    if "seed" not in metafunc.fixturenames:
        return
    chosen = os.environ.get("MANAGER_SIMULATION_SEED")
    first = int(os.environ.get("MANAGER_SIMULATION_FIRST", "0"))
    count = int(os.environ.get("MANAGER_SIMULATION_COUNT", COUNT_DEFAULT))
    metafunc.parametrize("seed", [int(chosen)] if chosen else range(first, first + count))


@pytest.fixture(autouse=True)
def _replay_command(request: pytest.FixtureRequest) -> None:
    """Print how to run a seed alone; pytest shows it where the test has failed."""
    if "seed" in request.fixturenames:
        seed = request.getfixturevalue("seed")
        print(f"replay: MANAGER_SIMULATION_SEED={seed} python -m pytest '{request.node.nodeid}'")
