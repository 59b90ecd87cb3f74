"""What dead owners left behind, and `shmring sweep`, the only command that changes anything."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from shmring.cli.listing import room_bytes
from shmring.cli.units import escaped, format_bytes
from shmring.layout import NAME_PREFIX, Role
from shmring.ring import UNFINISHED_AGE_S, list_rings, sweep
from shmring.segment import SHM_FOLDER, Handle, is_temporary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmring.ring import SegmentInfo


def is_leftover(info: SegmentInfo) -> bool:
    """Tell whether a sweep would remove it: nobody holds the owner's lock, and nobody is at making it."""
    if info.owner_alive is not None:
        return not info.owner_alive
    path = SHM_FOLDER / f"{NAME_PREFIX}{info.name}"
    try:
        if is_temporary(info.name) and time.time() - path.lstat().st_ctime < UNFINISHED_AGE_S:
            return False
        # not through a mapping: what is damaged has none. A link is not followed, a pipe not waited for
        handle = Handle(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), info.name)
    except OSError:  # gone meanwhile, or another user's
        return False
    try:
        return not handle.is_held(Role.OWNER)
    except OSError:
        return False
    finally:
        handle.close()


def run_sweep(*, dry_run: bool) -> list[tuple[SegmentInfo, bool]]:
    """Each leftover, and whether it is removed now (in a dry run: would be tried)."""
    leftovers = [info for info in list_rings() if is_leftover(info)]
    if dry_run:
        return [(info, False) for info in leftovers]
    swept = set(sweep())
    return [(info, info.name in swept) for info in leftovers]


def sweep_lines(results: Sequence[tuple[SegmentInfo, bool]], *, dry_run: bool) -> list[str]:
    """One line for each leftover."""
    if not results:
        return ["nothing to remove"]
    lines = []
    for info, is_removed in results:
        verb = "would remove" if dry_run else "removed" if is_removed else "could not remove"
        owner = f", owner pid {info.statistics.owner_pid} gone" if info.statistics else ", nobody owns it"
        lines.append(f"{verb} {escaped(info.name)} ({info.kind}, {format_bytes(room_bytes(info))}{owner})")
    return lines


def sweep_json(results: Sequence[tuple[SegmentInfo, bool]], *, dry_run: bool) -> dict[str, Any]:
    """The same for programs."""
    return {
        "dry_run": dry_run,
        "leftovers": [
            {"name": info.name, "kind": info.kind, "size_bytes": info.size_bytes, "removed": is_removed}
            for info, is_removed in results
        ],
    }
