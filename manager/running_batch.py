"""The requests that a scheduler runs, kept from step to step as the columns that a step sends.

    running = port.running_batch()
    running.extend(arrivals.request_ids)             # rows n, n + 1, ... of the engine's batch
    running.step(token_ids)                          # one new id a row, wherever they lie
    running.step(token_ids, [Finished(3, FinishCode.LENGTH, 128)])
    running.remove(request_id)                       # aborted

A row is a request's place in the engine's own batch. Nothing is collected from request objects: a
step hands over the ids that the engine has computed, in that order, and who has finished. Rows of
requests that end are filled again as `RowOrder` says, so the engine does the same with its own
columns. Ids, shards and places are kept in C; what a request costs when it comes or goes does not
depend on how many run. Used by the port's thread.
"""

from __future__ import annotations

import enum
import itertools
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

import shmring
from manager._egress import RunningCore
from manager.arguments import as_bytes, integer, signed
from manager.batch_frame import batch_columns
from manager.columns import column
from manager.finish import FINISH_CODES, FinishCode, check_end

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    from numpy.typing import NDArray

    from manager._egress import Dealer
    from manager.extras import BatchExtras
    from manager.frame_cut import Columns, Frames


class RowOrder(enum.Enum):
    """What happens to the rows of others when a request leaves the batch."""

    SWAP_LAST = "swap last"
    """The last row moves into the gap; of several gaps, into the highest first."""
    CLOSE_UP = "close up"
    """The rows behind move up, as by np.delete. Costs a look at each of them."""


class Finished(NamedTuple):
    """One request that ended with this step, its last token included."""

    row: int
    code: int
    """A FinishCode, not NONE."""
    value: int = 0
    """What the code says it is."""
    details: bytes = b""
    """A msgpack map, for FinishCode.DETAILS."""


def _checked(end: Finished | tuple[int, int] | tuple[int, int, int]) -> Finished:
    """Refuse what cannot be here: further on it would cost the request. Numbers may be numpy's."""
    if not isinstance(end, tuple):
        raise TypeError(f"finished is a sequence of Finished: entry={end!r}, type={type(end).__name__}")
    row, code, value, details = end if isinstance(end, Finished) else Finished(*end)
    if code not in FINISH_CODES or code == FinishCode.NONE:
        raise ValueError(f"finish code is none of FinishCode: row={row}, code={code}")
    end = Finished(
        integer("row", row),
        integer("code", code),
        signed("value", value),
        as_bytes("details", details),
    )
    check_end(*end)
    return end


class PushLeft(Protocol):
    """Write the rows of these shards and the frames that go ahead of them, waiting for room."""

    def __call__(
        self, left: list[int], columns: Columns, timeout_s: float | None, ahead: dict[int, Frames], /
    ) -> None:
        """As SchedulerPort does it for `push_batch`; `columns` are those of a batch of all rows."""
        ...


def _token_column(token_ids: npt.ArrayLike) -> NDArray[np.int32]:
    return column("token_ids", token_ids, np.int32)


class RunningBatch:
    """Make it with `SchedulerPort.running_batch`. `len()` is the number of rows."""

    def __init__(
        self,
        dealer: Dealer,
        shards: int,
        order: RowOrder,
        push_left: PushLeft,
        deal_extras: Callable[[NDArray[np.uint64], BatchExtras], dict[int, Frames]],
    ) -> None:
        self.order = order
        self._shards = shards
        self._push_left = push_left
        self._deal_extras = deal_extras
        self._core = RunningCore(dealer, order is RowOrder.CLOSE_UP, _token_column)
        self._step = self._core.step
        #: add(request_id) -> int: the request takes the next row, which is returned. ValueError: it runs.
        self.add: Callable[[int], int] = self._core.add
        #: remove(request_id) -> int | None: the row that it had; None: it does not run.
        self.remove: Callable[[int], int | None] = self._core.remove
        #: row_of(request_id) -> int | None
        self.row_of: Callable[[int], int | None] = self._core.row_of

    def extend(self, request_ids: npt.ArrayLike) -> None:
        """Add all of them, in this order, or none: ValueError if one runs already or is there twice."""
        self._core.extend(column("request_ids", request_ids, np.uint64))

    def reorder(self, rows: npt.ArrayLike) -> None:
        """Let row i be what was row `rows[i]`, for an engine that sorts its batch. All rows, each once."""
        wanted = column("rows", rows, np.int64)
        if not np.array_equal(np.sort(wanted), np.arange(len(self))):
            raise ValueError(f"rows are no order of the batch: rows={len(wanted)}, running={len(self)}")
        ids = self.request_ids[wanted]
        self._core.clear()
        self._core.extend(ids)

    def clear(self) -> None:
        """Drop all requests without a word to anybody."""
        self._core.clear()

    @property
    def request_ids(self) -> NDArray[np.uint64]:
        """(n,) in the order of the rows; a copy."""
        return self._core.request_ids()

    def __len__(self) -> int:
        return len(self._core)

    def __contains__(self, request_id: int) -> bool:
        return self.row_of(request_id) is not None

    def step(
        self,
        token_ids: npt.ArrayLike,
        finished: Sequence[Finished | tuple[int, int] | tuple[int, int, int]] = (),
        *,
        token_counts: npt.ArrayLike | None = None,
        extras: BatchExtras | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Hand over one decode step: the new token ids, and who has finished; those leave the batch.

        token_ids: (n,) one id a row, or (sum of token_counts,) with token_counts (n,), 0 allowed, for
        steps of several. An int32 or int64 array and a list are taken as they are; anything else
        that numpy makes an array of, a tensor on the CPU for one, is converted. What a request ended
        with is part of its ids, as for `push_batch`. extras: log probabilities and hidden states, an
        entry a row in each family, None or empty for a request without; a step that has any is written
        shard by shard, as by `push_batch`. Waits while a worker's ring is full. Raises ValueError, with
        nothing sent; TimeoutError, DeploymentEndedError.
        """
        if timeout_s is not None:
            timeout_s = shmring.check_timeout(timeout_s)
        counts = None if token_counts is None else column("token_counts", token_counts, np.uint32)
        ahead = {} if extras is None else self._deal_extras(self.request_ids, extras)
        if not finished and not ahead:
            left = self._step(token_ids, counts, [])
            if left is not None:
                self._push_left(left, self._columns(token_ids, counts, []), timeout_s, ahead)
            return
        ends = [_checked(end) for end in finished]
        gone = _rows_of(ends, len(self)) if ends else None
        if ahead or any(end.details for end in ends):
            # rare, and what has no fixed size
            self._check_lengths(token_ids, counts)
            left = list(range(self._shards))
        else:
            left = self._step(token_ids, counts, ends)
        if left is not None:
            self._push_left(left, self._columns(token_ids, counts, ends), timeout_s, ahead)
        if gone is not None:
            self._core.remove_rows(gone)

    def _check_lengths(self, token_ids: npt.ArrayLike, counts: NDArray[np.uint32] | None) -> None:
        given, running = len(_token_column(token_ids)), len(self)
        wanted = running if counts is None else int(counts.sum(dtype=np.int64))
        if (counts is not None and len(counts) != running) or given != wanted:
            raise ValueError(f"token_ids do not fit the batch: token_ids={given}, wanted={wanted}")

    def _columns(
        self, token_ids: npt.ArrayLike, counts: NDArray[np.uint32] | None, ends: list[Finished]
    ) -> Columns:
        """The step as `push_batch` would be given it."""
        ids = self.request_ids
        codes, values = np.zeros(len(ids), np.uint8), np.zeros(len(ids), np.int64)
        details = [b""] * len(ids)
        for end in ends:
            codes[end.row], values[end.row], details[end.row] = end.code, end.value, end.details
        return batch_columns(
            ids,
            np.ones(len(ids), np.uint32) if counts is None else counts,
            _token_column(token_ids),
            codes if ends else None,
            values if ends else None,
            details if any(details) else None,
        )


def _rows_of(ends: list[Finished], running: int) -> NDArray[np.uint32]:
    rows = sorted(end.row for end in ends)
    if rows[-1] >= running:
        raise ValueError(f"finished names no row and code: row={rows[-1]}, running={running}")
    if rows[0] < 0 or any(a == b for a, b in itertools.pairwise(rows)):
        raise ValueError(f"finished names a row twice, or none: rows={rows}")
    return np.array(rows, np.uint32)


__all__ = ["FinishCode", "Finished", "RowOrder", "RunningBatch"]
