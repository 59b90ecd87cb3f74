"""BATCH frames that a scheduler writes itself: what has no fixed size, and what is too long for a ring.

The common step goes from the engine's arrays into the rings in C; see `manager.running_batch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from manager import messages
from manager.frame_cut import halves

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from manager.frame_cut import Columns


def batch_columns(
    ids: NDArray[np.uint64],
    counts: NDArray[np.uint32],
    tokens: NDArray[np.int32],
    codes: NDArray[np.uint8] | None,
    values: NDArray[np.int64] | None,
    details: Sequence[bytes] | None,
) -> Columns:
    """The columns of `messages.BATCH`; codes None: nobody has finished."""
    lengths, packed = (None, None) if details is None else messages.pack_bytes(details)
    return (
        ids,
        counts,
        tokens,
        np.zeros(len(ids), np.uint8) if codes is None else codes,
        values,
        lengths,
        packed,
    )


def batch_parts(columns: Columns, length_max: int) -> Iterator[tuple[int, Columns]]:
    """Rows and columns of frames of at most `length_max` bytes each, which say the same in this order.

    A row's tokens are cut too, its finish told with the last. What cannot be cut comes as it is.
    """
    ids, _, tokens, *end = columns
    rows = len(np.asarray(ids))
    if messages.BATCH.payload_length(*columns) > length_max:
        if rows > 1:
            for _, half in halves(messages.BATCH, rows, columns):
                yield from batch_parts(half, length_max)
            return
        row = np.asarray(tokens)
        if len(row) > 1:
            middle = len(row) // 2
            first, rest = np.array([middle], np.uint32), np.array([len(row) - middle], np.uint32)
            yield from batch_parts(
                (ids, first, row[:middle], np.zeros(1, np.uint8), None, None, None), length_max
            )
            yield from batch_parts((ids, rest, row[middle:], *end), length_max)
            return
    yield rows, columns
