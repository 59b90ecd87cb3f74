"""A batch cut into frames that fit says what it said in one piece, in the same order."""

from __future__ import annotations

import numpy as np
import pytest

from manager import FinishCode, messages
from manager.batch_frame import batch_columns, batch_parts


def batch(rows: int, tokens_max: int, *, has_ends: bool):
    rng = np.random.default_rng(rows * 1000 + tokens_max)
    counts = rng.integers(0, tokens_max + 1, rows).astype(np.uint32)
    codes = np.where(rng.random(rows) < 0.5, FinishCode.LENGTH, FinishCode.NONE).astype(np.uint8)
    codes[rng.random(rows) < 0.2] = FinishCode.DETAILS
    return batch_columns(
        np.arange(rows, dtype=np.uint64) + 7,
        counts,
        rng.integers(0, 1000, int(counts.sum())).astype(np.int32),
        codes if has_ends else None,
        rng.integers(0, 9, rows).astype(np.int64) if has_ends else None,
        [b"d" * int(n) if code == FinishCode.DETAILS else b"" for n, code in enumerate(codes)]
        if has_ends
        else None,
    )


def told(parts):
    """By request: its tokens, and how it ended."""
    tokens: dict[int, list[int]] = {}
    ends: dict[int, tuple[int, int, bytes]] = {}
    for rows, (ids, counts, flat, codes, values, lengths, details) in parts:
        assert rows == len(ids) == len(counts) == len(codes)
        stops = np.cumsum(counts)
        said = [b""] * rows if lengths is None else messages.unpack_bytes(lengths, details)
        for row, request_id in enumerate(ids.tolist()):
            assert request_id not in ends, "nothing comes behind an end"
            tokens.setdefault(request_id, []).extend(flat[stops[row] - counts[row] : stops[row]].tolist())
            if codes[row]:
                ends[request_id] = (int(codes[row]), 0 if values is None else int(values[row]), said[row])
    return tokens, ends


@pytest.mark.parametrize("has_ends", [False, True])
@pytest.mark.parametrize("length_max", [250, 300, 1000, 1 << 20])
@pytest.mark.parametrize(("rows", "tokens_max"), [(1, 1), (1, 900), (2, 3), (33, 1), (40, 200)])
def test_parts_fit_and_say_the_same(rows, tokens_max, length_max, has_ends):
    columns = batch(rows, tokens_max, has_ends=has_ends)
    parts = list(batch_parts(columns, length_max))
    assert told(parts) == told([(rows, columns)])
    assert all(messages.BATCH.payload_length(*part) <= length_max for _, part in parts)
    if length_max == 1 << 20:
        assert len(parts) == 1


def test_what_cannot_be_cut_comes_as_it_is():
    """The ring says then that it never fits."""
    columns = batch_columns(
        np.array([1], np.uint64), np.zeros(1, np.uint32), np.empty(0, np.int32), None, None, [b"x" * 500]
    )
    assert list(batch_parts(columns, 100)) == [(1, columns)]
