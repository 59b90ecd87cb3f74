"""Parts of a frame's columns: rows left out, and frames cut that would never fit a ring.

A row's part of a column is found level by level: of a flat column its item, of a ragged one as
many items as its part of the counts says. So one mask of rows is a mask of every column, at a
cost linear in the frame.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shmring import ColumnData, Schema

Columns: TypeAlias = "tuple[ColumnData, ...]"
#: Frames of one schema, in order: rows and columns of each.
Frames: TypeAlias = "Sequence[tuple[int, Columns]]"


def select_rows(schema: Schema, columns: Columns, rows: NDArray[np.bool_]) -> Columns:
    """(n,) bool: the rows that are kept."""
    return _select(schema, columns, rows, {})


def halves(schema: Schema, rows: int, columns: Columns) -> list[tuple[int, Columns]]:
    """Two frames with half of the rows each."""
    first = np.arange(rows) < rows // 2
    return [
        (rows // 2, select_rows(schema, columns, first)),
        (rows - rows // 2, select_rows(schema, columns, ~first)),
    ]


def halves_of_row(schema: Schema, columns: Columns) -> list[Columns]:
    """Cut the one row of a frame of families in two: families apart, or half of the only one's items.

    Each counts column that is flat begins a family, which may be absent. Empty: nothing to cut.
    """
    named: dict[str, Any] = dict(zip(schema.names, columns, strict=True))
    families = [
        name
        for name in dict.fromkeys(column.counts for column in schema.columns if column.counts is not None)
        if named[name] is not None and schema.columns[schema.indexes[name]].counts is None
    ]
    if len(families) > 1:
        kept = families[: len(families) // 2]
        return [
            _families(schema, named, kept),
            _families(schema, named, families[len(families) // 2 :]),
        ]
    if not families or int(named[families[0]][0]) < 2:
        return []
    (family,) = families
    count = int(named[family][0])
    parts = []
    for items in (np.arange(count) < count // 2, np.arange(count) >= count // 2):
        # what the counts count is chosen item by item, and the counts say how many were
        masks = {column.name: items for column in schema.columns if column.counts == family}
        part = dict(zip(schema.names, _select(schema, columns, np.ones(1, bool), masks), strict=True))
        part[family] = np.array([items.sum()], np.uint32)
        parts.append(tuple(part.values()))
    return parts


def _families(schema: Schema, named: dict[str, Any], kept: list[str]) -> Columns:
    """The columns of some families, and what belongs to none."""
    roots: dict[str, str | None] = {}
    for column in schema.columns:
        is_counts = any(other.counts == column.name for other in schema.columns)
        parent = column.counts
        roots[column.name] = column.name if parent is None and is_counts else parent and roots[parent]
    return tuple(named[name] if roots[name] is None or roots[name] in kept else None for name in schema.names)


def _select(
    schema: Schema, columns: Columns, rows: NDArray[np.bool_], masks: dict[str, NDArray[np.bool_]]
) -> Columns:
    """`masks`: of the columns for which they do not follow from the rows."""
    named: dict[str, Any] = dict(zip(schema.names, columns, strict=True))
    masks = dict(masks)
    part: list[ColumnData] = []
    for column in schema.columns:
        values = named[column.name]
        if values is None:
            part.append(None)
            continue
        if column.name not in masks:
            masks[column.name] = (
                rows if column.counts is None else np.repeat(masks[column.counts], named[column.counts])
            )
        part.append(values[masks[column.name]])
    return tuple(part)


def parts_that_fit(
    schema: Schema, rows: int, columns: Columns, length_max: int
) -> list[tuple[int, Columns]] | None:
    """A frame of families, cut until each part fits; rows go on in the next part. None: one never will."""
    if schema.payload_length(*columns) <= length_max:
        return [(rows, columns)]
    cut = (
        halves(schema, rows, columns) if rows > 1 else [(1, part) for part in halves_of_row(schema, columns)]
    )
    fitting: list[tuple[int, Columns]] = []
    for part in cut:
        parts = parts_that_fit(schema, *part, length_max)
        if parts is None:
            return None
        fitting += parts
    return fitting or None
