"""Log probabilities and hidden states over random splits into chunks, steps, shards and ring sizes.

What an engine pushes with a chunk's tokens is what comes with that chunk, entry for entry, whatever
its neighbours want and however a frame had to be cut. A failing seed is in the test's name.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from output_path import OutputPath

from manager import BatchExtras, FinishCode, Finished, LogprobColumn, RowOrder
from manager.extras import FIELDS, PendingExtras

if TYPE_CHECKING:
    from collections.abc import Callable

    from manager.extras import Extras

FLAT = ("output", "input")
OUTPUTS = ("output", "output_top", "output_token_ids")
INPUTS = ("input", "input_top", "input_token_ids")
assert {*OUTPUTS, *INPUTS} == set(FIELDS.values())


@dataclass
class Chunk:
    """What one request gets in one step."""

    tokens: list[int]
    families: dict[str, list[Any]] = field(default_factory=dict)
    """By field: a (value, id) each place of a flat one, a list of such or None of a ragged one."""
    hidden: list[list[float]] = field(default_factory=list)


def number(choice: random.Random) -> float:
    """A value that float32 keeps as it is."""
    return float(np.float32(choice.uniform(-20, 0)))


def pair(choice: random.Random) -> tuple[float, int]:
    return number(choice), choice.randrange(128)


def places(choice: random.Random, family: str, count: int) -> list[Any]:
    """Entries of a family for so many places; the first of a prompt has no log probability."""
    if family in FLAT:
        entries: list[Any] = [pair(choice) for _ in range(count)]
        if family == "input" and choice.random() < 0.7:
            entries[0] = (None, entries[0][1])
        return entries
    return [[pair(choice) for _ in range(choice.randrange(5))] or None for _ in range(count)]


def chunks_of(choice: random.Random) -> list[Chunk]:
    """One request: its tokens cut into chunks at random, with what it wants beside them."""
    wanted = [family for family in FIELDS.values() if choice.random() < 0.4]
    width = choice.choice([0, 0, 1, 3, 17])
    made: list[Chunk] = []
    for position in range(choice.randint(1, 8)):
        tokens = [choice.randrange(32, 127) for _ in range(choice.choice([0, 1, 1, 1, 2, 5]))]
        chunk = Chunk(tokens)
        for family in wanted:
            count = len(tokens) if family in OUTPUTS else choice.choice([1, 40, 400]) if position == 0 else 0
            if count:
                chunk.families[family] = places(choice, family, count)
        if width:
            chunk.hidden = [[number(choice) for _ in range(width)] for _ in tokens]
        made.append(chunk)
    return made


def column_of(choice: random.Random, family: str, chunks: list[Chunk]) -> LogprobColumn | None:
    """A family of a step, as lists or as arrays, None or empty for who has none."""
    given = [chunk.families.get(family) for chunk in chunks]
    if not any(given):
        return choice.choice([None, LogprobColumn([None] * len(chunks), [None] * len(chunks))])
    empty = choice.choice([None, []])
    values: list[Any] = []
    ids: list[Any] = []
    for entries in given:
        if not entries:
            values.append(empty)
            ids.append(empty)
        elif family in FLAT:
            values.append([value for value, _ in entries])
            ids.append(np.array([token_id for _, token_id in entries], np.int32))
        else:
            values.append([entry and [value for value, _ in entry] for entry in entries])
            ids.append([entry and [token_id for _, token_id in entry] for entry in entries])
    return LogprobColumn(values, ids)


def extras_of(choice: random.Random, chunks: list[Chunk]) -> BatchExtras:
    columns = {family: column_of(choice, family, chunks) for family in FIELDS.values()}
    hidden = None
    if any(chunk.hidden for chunk in chunks):
        hidden = [np.array(chunk.hidden, np.float32) if chunk.hidden else None for chunk in chunks]
    return BatchExtras(**columns, hidden_states=hidden)


def with_texts(families: dict[str, list[Any]], *, has_texts: bool) -> dict[str, list[Any]]:
    """As a caller gets them. An id below 128 is that character's."""

    def entry(pair: tuple[float | None, int]) -> tuple[float | None, int, str | None]:
        return (*pair, chr(pair[1]) if has_texts else None)

    return {
        family: [
            entry(place) if family in FLAT else place and [entry(item) for item in place] for place in entries
        ]
        for family, entries in families.items()
    }


class Reader(OutputPath):
    """Keeps what comes with each chunk, and reads each request as a slow client does."""

    def __init__(self, name: str, choice: random.Random, **settings: Any) -> None:
        super().__init__(name, **settings)
        self._choice = choice
        self._ahead: dict[int, list[Extras]] = defaultdict(list)
        self._pending: dict[int, PendingExtras] = defaultdict(PendingExtras)
        self.chunks: dict[int, list[tuple[str, dict[str, list[Any]], list[list[float]]]]] = defaultdict(list)
        self.read: dict[int, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
        self.last_hidden: dict[int, list[list[float]]] = {}

    def on_extras(self, request_id: int, extras: Extras) -> None:
        self._ahead[request_id].append(extras)
        self._pending[request_id].stage(extras)

    def on_text(self, request_id: int, text: str, *_: Any) -> None:
        families: dict[str, list[Any]] = defaultdict(list)
        hidden: list[list[float]] = []
        for extras in self._ahead.pop(request_id, []):
            for family in FIELDS.values():
                families[family] += getattr(extras.logprobs, family)
            hidden += [state.tolist() for state in extras.hidden_states]
        families = {family: entries for family, entries in families.items() if entries}
        self.chunks[request_id].append((text, families, hidden))
        self._pending[request_id].merge()
        if self._choice.random() < 0.3:
            self.take(request_id)

    def take(self, request_id: int) -> None:
        logprobs, hidden = self._pending[request_id].take()
        for family in FIELDS.values() if logprobs else ():
            self.read[request_id][family] += getattr(logprobs, family)
        if hidden is not None:
            self.last_hidden[request_id] = [state.tolist() for state in hidden]


def _push_batches(seed: float, path: OutputPath, requests: dict[int, list[Chunk]]) -> None:
    """Push every request's chunks in order, steps of any composition, waiting while a ring is full."""
    choice = random.Random(seed)
    left = {request_id: list(chunks) for request_id, chunks in requests.items()}
    while left:
        rows = choice.sample(list(left), choice.randint(1, len(left)))
        step = [left[request_id].pop(0) for request_id in rows]
        ended = [not left[request_id] for request_id in rows]
        path.port.push_batch(
            rows,
            [len(chunk.tokens) for chunk in step],
            [token for chunk in step for token in chunk.tokens],
            [FinishCode.LENGTH if is_last else FinishCode.NONE for is_last in ended],
            [0] * len(rows),
            extras=extras_of(choice, step),
            timeout_s=60,
        )
        for request_id, is_last in zip(rows, ended, strict=True):
            if is_last:
                del left[request_id]


def _step_a_running_batch(seed: float, path: OutputPath, requests: dict[int, list[Chunk]]) -> None:
    """The same with a batch that is kept: requests come at any step and leave with their last chunk."""
    choice = random.Random(seed)
    left = {request_id: list(chunks) for request_id, chunks in requests.items()}
    coming = choice.sample(list(left), len(left))
    running = path.port.running_batch(choice.choice(list(RowOrder)))
    while coming or len(running):
        arrivals = [coming.pop() for _ in range(choice.randint(0 if len(running) else 1, len(coming)))]
        running.extend(arrivals)
        rows = running.request_ids.tolist()
        step = [left[request_id].pop(0) for request_id in rows]
        ended = [row for row, request_id in enumerate(rows) if not left[request_id]]
        running.step(
            [token for chunk in step for token in chunk.tokens],
            [Finished(row, FinishCode.LENGTH) for row in choice.sample(ended, len(ended))],
            token_counts=[len(chunk.tokens) for chunk in step],
            extras=extras_of(choice, step),
            timeout_s=60,
        )


@pytest.mark.parametrize("engine", [_push_batches, _step_a_running_batch])
@pytest.mark.parametrize("shards", range(1, 9))
@pytest.mark.parametrize("seed", range(6))
def test_what_arrives_is_what_was_pushed(
    ring_name: str, seed: int, shards: int, engine: Callable[..., None]
) -> None:
    """A log probability beside another token than its own misleads whoever ranks by it."""
    choice = random.Random(1000 * shards + seed)
    path = Reader(ring_name, choice, shards=shards, ring_bytes=choice.choice([1 << 12, 1 << 13, 1 << 16]))
    try:
        requests = {request_id: chunks_of(choice) for request_id in range(1, choice.randint(2, 25))}
        texts = {request_id for request_id in requests if choice.random() < 0.5}
        for request_id in requests:
            path.register(request_id, texts=request_id in texts)
        thread = threading.Thread(target=engine, args=(choice.random(), path, requests), daemon=True)
        thread.start()
        while any(len(path.chunks[request_id]) < len(chunks) for request_id, chunks in requests.items()):
            path.work()
        thread.join(20)
        assert path.failed == {}
        assert path.aborts == []
        for request_id, chunks in requests.items():
            has_texts = request_id in texts
            assert path.chunks[request_id] == [
                (
                    "".join(map(chr, chunk.tokens)),
                    with_texts(chunk.families, has_texts=has_texts),
                    chunk.hidden,
                )
                for chunk in chunks
            ]
            path.take(request_id)
            everything: dict[str, list[Any]] = defaultdict(list)
            for chunk in chunks:
                for family, entries in with_texts(chunk.families, has_texts=has_texts).items():
                    everything[family] += entries
            assert {
                family: entries for family, entries in path.read[request_id].items() if entries
            } == everything
            newest = [chunk.hidden for chunk in chunks if chunk.hidden]
            assert path.last_hidden.get(request_id) == (newest[-1] if newest else None)
    finally:
        path.close()
