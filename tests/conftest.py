"""Names for the rings of one test, and a look afterwards that nothing of them is left."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

SHM_FOLDER = Path("/dev/shm")
_numbers = itertools.count(1)


def _left_behind(name: str) -> list[str]:
    return sorted(p.name for p in SHM_FOLDER.iterdir() if p.name.startswith(f"shmring.{name}"))


def _unfinished_here() -> list[str]:
    """Segments under a temporary name that this very process has open: they belong to a test of ours."""
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor
            targets.append(str(link.readlink()))
    return sorted(t for t in targets if "shmring.~" in t and not t.endswith("(deleted)"))


@pytest.fixture
def ring_name() -> Iterator[str]:
    """Give a name that no other test uses; longer names may be built on it.

    A test that leaves a segment under it fails: whoever runs rings for months must not find
    /dev/shm full one day.
    """
    name = f"test-{os.getpid()}-{next(_numbers)}"
    yield name
    left = _left_behind(name)
    if left:
        gc.collect()  # ends and rings that a failed test dropped without closing
        left = _left_behind(name)
    for entry in left:
        (SHM_FOLDER / entry).unlink()
    assert not left, f"names left in {SHM_FOLDER}: {left}"
    assert not _unfinished_here()
