"""EXTRAS frames: made of what an engine fills in, given texts by a worker, read by the manager.

Invariant: a row has in every family that it has exactly as many values as ids. What is wrong with
what an engine gives is found before anything is sent, and named by family and request; what is
wrong with a frame, before any of its rows is handed on. Every step is linear in what it carries.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from manager import messages
from manager.columns import column
from manager.errors import CodecError
from manager.extras import FIELDS, RAGGED_FAMILIES, BatchExtras, Extras, LogprobColumn, Logprobs
from manager.frame_cut import select_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from numpy.typing import NDArray

    from manager.extras import Logprob
    from shmring import ColumnData, Frame

    Columns = tuple[ColumnData, ...]
    #: BatchDecoder.decode_each
    DecodeEach = Callable[[NDArray[np.int32]], tuple[NDArray[np.uint8], NDArray[np.uint32]]]

_HIDDEN: Final = "hidden"


def encode(request_ids: NDArray[np.uint64], extras: BatchExtras) -> Columns | None:
    """The columns of those requests that have any; None: nobody has. Raises ValueError, TypeError."""
    if not isinstance(extras, BatchExtras):
        raise TypeError(f"extras are no BatchExtras: type={type(extras).__name__}")
    named: dict[str, NDArray[Any]] = {}
    for family, field in FIELDS.items():
        given: LogprobColumn | None = getattr(extras, field)
        if given is not None:
            if not isinstance(given, LogprobColumn):
                raise TypeError(f"extras are no LogprobColumn: family={field}, type={type(given).__name__}")
            named |= _family(family, field, given, request_ids)
    if extras.hidden_states is not None:
        named |= _hidden(extras.hidden_states, request_ids)
    has_any = np.zeros(len(request_ids), bool)
    for family in (*FIELDS, _HIDDEN):
        counts = named.get(f"{family}_counts")
        if counts is None:
            continue
        if counts.any():
            has_any |= counts > 0
        else:  # as if it had not been given
            for part in ("counts", "lengths", "values", "ids"):
                named.pop(f"{family}_{part}", None)
    if not has_any.any():
        return None
    named["request_ids"] = request_ids
    columns = tuple(named.get(name) for name in messages.EXTRAS.names)
    return select_rows(messages.EXTRAS, columns, has_any)


def _family(
    family: str, field: str, given: LogprobColumn, request_ids: NDArray[np.uint64]
) -> dict[str, NDArray[Any]]:
    if not len(given.values) == len(given.ids) == len(request_ids):
        raise ValueError(
            f"extras have not one entry a request: family={field}, values={len(given.values)}, "
            f"ids={len(given.ids)}, requests={len(request_ids)}"
        )
    try:
        return _at_once(family, given)
    except (TypeError, ValueError):
        return _row_by_row(family, field, given, request_ids)


def _at_once(family: str, given: LogprobColumn) -> dict[str, NDArray[Any]]:
    """The family of all requests in a few calls, if there is nothing to be said of any of them."""
    values, ids = given.values, given.ids
    counts = list(map(_length, values))
    is_same = counts == list(map(_length, ids))
    made: dict[str, NDArray[Any]] = {f"{family}_counts": np.array(counts, np.uint32)}
    if family in RAGGED_FAMILIES:
        values, ids = _joined(values), _joined(ids)
        lengths = list(map(_length, values))
        is_same = is_same and lengths == list(map(_length, ids))
        made[f"{family}_lengths"] = np.array(lengths, np.uint32)
    if not is_same:
        raise ValueError("values and ids differ in length")
    made[f"{family}_values"] = _floats(_joined(values), first_may_be_none=False)
    made[f"{family}_ids"] = column("ids", _joined(ids), np.int32)
    return made


def _row_by_row(
    family: str, field: str, given: LogprobColumn, request_ids: NDArray[np.uint64]
) -> dict[str, NDArray[Any]]:
    """As at once, some times slower: it takes a None at the start of a prompt, and names what is wrong."""
    counts = np.zeros(len(request_ids), np.uint32)
    parts = []
    for row, (values, ids) in enumerate(zip(given.values, given.ids, strict=True)):
        if values is None and ids is None:
            continue
        try:
            counts[row] = _same_length("entries", values, ids)
            if counts[row]:
                parts.append(_row(family, values, ids))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"extras cannot be sent: family={field}, request_id={request_ids[row]}, why={error}"
            ) from error
    made = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}
    return made | {f"{family}_counts": counts}


def _row(family: str, values: Any, ids: Any) -> dict[str, NDArray[Any]]:  # noqa: ANN401 - any sequences
    made: dict[str, NDArray[Any]] = {}
    if family in RAGGED_FAMILIES:
        lengths = [_same_length("values", *pair) for pair in zip(values, ids, strict=True)]
        made[f"{family}_lengths"] = np.array(lengths, np.uint32)
        values, ids = _joined(values), _joined(ids)
    made[f"{family}_values"] = _floats(values, first_may_be_none=family == "in_lp")
    made[f"{family}_ids"] = column("ids", ids, np.int32)
    return made


def _hidden(given: Sequence[Any], request_ids: NDArray[np.uint64]) -> dict[str, NDArray[Any]]:
    field = "hidden_states"
    if len(given) != len(request_ids):
        raise ValueError(
            f"extras have not one entry a request: family={field}, entries={len(given)}, "
            f"requests={len(request_ids)}"
        )
    counts = np.zeros(len(request_ids), np.uint32)
    rows: list[NDArray[np.float32]] = []
    for row, states in enumerate(given):
        if states is None:
            continue
        try:
            rows += [np.asarray(state, np.float32).ravel() for state in states]
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"extras cannot be sent: family={field}, request_id={request_ids[row]}, why={error}"
            ) from error
        counts[row] = len(states)
    return {
        "hidden_counts": counts,
        "hidden_lengths": np.array([len(state) for state in rows], np.uint32),
        "hidden_values": np.concatenate([np.empty(0, np.float32), *rows]),
    }


def _length(sequence: Any) -> int:  # noqa: ANN401 - any sequence, or None
    return 0 if sequence is None else len(sequence)


def _same_length(what: str, values: Any, ids: Any) -> int:  # noqa: ANN401 - as above
    length, id_count = _length(values), _length(ids)
    if length != id_count:
        raise ValueError(f"values and ids differ in length: {what}={length}, ids={id_count}")
    return length


def _joined(positions: Iterable[Any]) -> list[Any]:
    return list(itertools.chain.from_iterable(p for p in positions if p is not None))


def _floats(values: Any, *, first_may_be_none: bool) -> NDArray[np.float32]:  # noqa: ANN401 - as above
    if isinstance(values, (list, tuple)):
        if first_may_be_none and values and values[0] is None:
            values = [np.nan, *values[1:]]
        if None in values:  # numpy would make it NaN and say nothing
            raise ValueError("a value is None")
    array = np.asarray(values, np.float32)
    if array.ndim != 1:
        raise ValueError(f"values are not flat: shape={array.shape}")
    return array


def answered(
    frame: Frame,
    is_known: Callable[[int], bool],
    wants_texts: Collection[int],
    decode_each: DecodeEach | None,
) -> tuple[int, Columns]:
    """A worker's answer to an EXTRAS frame: the rows of requests that are known, with their texts.

    `wants_texts`: of the requests, those whose ids are to have texts. Raises CodecError.
    """
    _check_families(frame)
    request_ids = frame["request_ids"].tolist()
    kept = np.fromiter(map(is_known, request_ids), bool, len(request_ids))
    # a frame is no dict
    columns = tuple(frame[name] if name in frame else None for name in messages.EXTRAS.names)  # noqa: SIM401
    # copied here, for the answer may wait longer than the ring keeps the record
    named: dict[str, Any] = dict(
        zip(messages.EXTRAS.names, select_rows(messages.EXTRAS, columns, kept), strict=True)
    )
    has_texts = np.fromiter(
        (decode_each is not None and i in wants_texts for i in named["request_ids"].tolist()),
        bool,
        int(kept.sum()),
    )
    named["has_texts"] = has_texts
    if decode_each is not None and has_texts.any():
        for family in FIELDS:
            if named[f"{family}_counts"] is None:
                continue
            wanted = np.repeat(has_texts, named[f"{family}_counts"])
            if family in RAGGED_FAMILIES:
                wanted = np.repeat(wanted, named[f"{family}_lengths"])
            text, lengths = decode_each(named[f"{family}_ids"][wanted])
            all_lengths = np.zeros(len(wanted), np.uint32)
            all_lengths[wanted] = lengths
            named[f"{family}_texts_lengths"], named[f"{family}_texts"] = all_lengths, text
    return len(has_texts), tuple(named.get(name) for name in messages.REPLY_EXTRAS.names)


def decode(frame: Frame) -> list[tuple[int, Extras]]:
    """A worker's answer, row by row. Raises CodecError before any of it is handed over."""
    _check_families(frame)
    has_texts = frame["has_texts"]
    rows: list[dict[str, list[Any]]] = [{} for _ in range(frame.rows)]
    for family, field in FIELDS.items():
        if f"{family}_counts" not in frame:
            continue
        counts = frame[f"{family}_counts"]
        has_text = np.repeat(has_texts, counts)
        positions: list[Any]
        if family in RAGGED_FAMILIES:
            lengths = frame[f"{family}_lengths"]
            entries = _entries(frame, family, np.repeat(has_text, lengths))
            positions = [part or None for part in _split(entries, lengths.tolist())]
        else:
            positions = _entries(frame, family, has_text)
        for row, part in zip(rows, _split(positions, counts.tolist()), strict=True):
            if part:
                row[field] = part
    hidden: list[list[NDArray[np.float32]]] = [[]] * frame.rows
    if "hidden_counts" in frame:
        states = _split(frame["hidden_values"], frame["hidden_lengths"].tolist())
        # each with memory of its own: one that is kept must not keep all of them
        hidden = _split([state.copy() for state in states], frame["hidden_counts"].tolist())
    made = [Extras(Logprobs(**row), states) for row, states in zip(rows, hidden, strict=True)]
    return list(zip(frame["request_ids"].tolist(), made, strict=True))


def _entries(frame: Frame, family: str, has_text: NDArray[np.bool_]) -> list[Logprob]:
    """A family's values with their ids and texts, flat."""
    values = frame[f"{family}_values"]
    numbers: list[float | None] = values.tolist()
    for place in np.flatnonzero(np.isnan(values)).tolist():
        numbers[place] = None
    texts: Iterable[str | None] = itertools.repeat(None, len(numbers))
    if f"{family}_texts" in frame:
        packed = messages.unpack_bytes(frame[f"{family}_texts_lengths"], frame[f"{family}_texts"])
        try:
            texts = [
                text.decode() if has else None for text, has in zip(packed, has_text.tolist(), strict=True)
            ]
        except UnicodeDecodeError as error:
            raise CodecError(f"text of an id is not UTF-8: family={FIELDS[family]}, why={error}") from error
    return list(zip(numbers, frame[f"{family}_ids"].tolist(), texts, strict=True))


def _split(items: Any, counts: list[int]) -> list[Any]:  # noqa: ANN401 - a list or an array
    ends = itertools.accumulate(counts)
    return [items[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _check_families(frame: Frame) -> None:
    """A family that is there in part cannot be read, whatever the schema says of each column."""
    for family in (*FIELDS, _HIDDEN):
        parts = ["counts", "values"]
        if family in RAGGED_FAMILIES or family == _HIDDEN:
            parts.append("lengths")
        if family != _HIDDEN:
            parts.append("ids")
        there = [f"{family}_{part}" in frame for part in parts]
        if any(there) != all(there):
            raise CodecError(f"extras family is there in part: family={FIELDS.get(family, 'hidden_states')}")
        if (f"{family}_texts" in frame) and not all(there):
            raise CodecError(f"texts have no ids: family={family}")
