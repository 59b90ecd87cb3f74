"""Which core each part gets: pure, so that it can be looked at before anything is pinned."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger(__name__)


def assign_cores(labels: Sequence[str], cores: Sequence[int] | None) -> dict[str, int]:
    """One core a part, in order; nobody gets any where there are fewer cores than parts.

    Half of the parts pinned would be worse than none: the free ones land on the pinned ones' cores.
    """
    if cores is None:
        return {}
    if len(cores) < len(labels):
        log.warning("nothing is pinned: cores=%d, parts=%d", len(cores), len(labels))
        return {}
    return dict(zip(labels, cores, strict=False))
