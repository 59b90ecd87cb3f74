"""Seeds of the simulations: a hundred, or the one that failed.

MANAGER_SIMULATION_SEED=17 pytest tests/simulation      only that one
MANAGER_SIMULATION_COUNT=5000 pytest tests/simulation   more of them
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

COUNT_DEFAULT = 100


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that takes a `seed` once a seed."""
    if "seed" not in metafunc.fixturenames:
        return
    chosen = os.environ.get("MANAGER_SIMULATION_SEED")
    count = int(os.environ.get("MANAGER_SIMULATION_COUNT", COUNT_DEFAULT))
    metafunc.parametrize("seed", [int(chosen)] if chosen else range(count))
