"""Which of the names in shared memory a command is about."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from shmring.cli.units import escaped
from shmring.errors import LayoutMismatchError, SegmentNotFoundError
from shmring.layout import Kind, check_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shmring.ring import SegmentInfo

_NAMES_IN_HINT_MAX = 4


def is_under(name: str, prefix: str) -> bool:
    """Tell whether `name` is `prefix` itself or belongs to the deployment of that name."""
    return name == prefix or name.startswith(f"{prefix}.")


def select(infos: Sequence[SegmentInfo], prefix: str | None) -> list[SegmentInfo]:
    """Those under `prefix`. Raises SegmentNotFoundError where there are none; all, without a prefix."""
    if prefix is None:
        return list(infos)
    check_name(prefix)
    found = [info for info in infos if is_under(info.name, prefix)]
    if not found:
        raise not_found(prefix, (info.name for info in infos))
    return found


def not_found(name: str, names: Iterable[str]) -> SegmentNotFoundError:
    """Say that there is no such name, and what may have been meant."""
    return SegmentNotFoundError(f"no ring of that name: name={name}{_hint(name, names)}", name=name)


def no_ring(name: str, names: Iterable[str]) -> LayoutMismatchError:
    """Say that the name is a blob's; a deployment's manifest has rings beside it."""
    text = f"a blob, not a ring: name={name}{_hint(name, names)}"
    return LayoutMismatchError(text, expected=Kind.RING, found=Kind.BLOB)


def _hint(name: str, names: Iterable[str]) -> str:
    others = [escaped(other) for other in names if other != name]
    meant = [other for other in others if is_under(other, name)] or difflib.get_close_matches(name, others)
    if not meant:
        return ""
    more = ", ..." if len(meant) > _NAMES_IN_HINT_MAX else ""
    return f" (there is {', '.join(meant[:_NAMES_IN_HINT_MAX])}{more})"
