"""A running batch sends what push_batch would send, whoever comes and goes, and in whatever order."""

from __future__ import annotations

import itertools
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import shmring
from manager import FinishCode, messages
from manager.running_batch import Finished, RowOrder
from manager.scheduler_port import SchedulerPort

if TYPE_CHECKING:
    from collections.abc import Sequence

_names = itertools.count()

#: A row as a worker sees it: id, tokens, code, value, details.
Row = tuple[int, list[int], int, int, bytes]


class Bench:
    """A port over rings of its own, and their other ends."""

    def __init__(self, shards: int, egress_bytes: int = 1 << 16) -> None:
        name = f"running-{os.getpid()}-{next(_names)}"
        self.rings = [shmring.create(f"{name}.{i}", egress_bytes) for i in range(shards)]
        self.ingress = shmring.create(f"{name}.in", 4096)
        self.consumers = [ring.consumer() for ring in self.rings]
        # a deployment without a manager: the port needs its facts and its rings
        manifest: Any = SimpleNamespace(
            name=name, shards=shards, vocab_size=1000, context_length=100, eos_token_ids=(0,)
        )
        self.port = SchedulerPort(
            manifest, self.ingress.consumer(), [ring.producer(takeover=True) for ring in self.rings]
        )

    def read(self) -> list[list[Row]]:
        """Each shard's rows, in the order of their ids."""
        return [sorted(self._read(consumer)) for consumer in self.consumers]

    def _read(self, consumer: shmring.Consumer) -> list[Row]:
        rows: list[Row] = []
        records = consumer.drain(1000)
        for record in records:
            frame = messages.BATCH.read(record)
            ends = np.cumsum(frame["token_counts"], dtype=np.int64).tolist()
            starts = [0, *ends[:-1]]
            details = [b""] * frame.rows
            if "finish_details" in frame:
                details = messages.unpack_bytes(frame["finish_details_lengths"], frame["finish_details"])
            values = frame["finish_values"].tolist() or [0] * frame.rows
            tokens = frame["token_ids"].tolist()
            codes, ids = frame["finish_codes"].tolist(), frame["request_ids"].tolist()
            rows += [
                (ids[i], tokens[starts[i] : ends[i]], codes[i], values[i], details[i])
                for i in range(frame.rows)
            ]
        if records:
            consumer.release()
        return rows

    def close(self) -> None:
        self.port.close()
        for end in (*self.consumers, *self.rings, self.ingress):
            end.close()


ids = st.one_of(st.integers(1, 40), st.integers(2**63, 2**64 - 1))
int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
#: A code, a value and details, as go together.
ends = st.one_of(
    st.tuples(st.sampled_from([FinishCode.STOP, FinishCode.ABORT]), st.just(0), st.just(b"")),
    st.tuples(st.sampled_from([FinishCode.STOP_TOKEN, FinishCode.LENGTH]), int64, st.just(b"")),
    st.tuples(st.just(FinishCode.DETAILS), st.just(0), st.sampled_from([b"\x80", b"\x81\xa1a\x01"])),
)
HOW = [
    lambda t: np.array(t, np.int32),
    lambda t: np.array(t, np.int64),
    lambda t: np.array(t, ">i4"),
    lambda t: np.repeat(np.array(t, np.int64), 2)[::2],
    list,
    tuple,
    lambda t: memoryview(np.array(t, np.int32)),
]


class Running(RuleBasedStateMachine):
    """The batch beside a plain list in the engine's order, and push_batch beside the step."""

    order = RowOrder.SWAP_LAST
    shards = 4

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(self.shards)
        self.batch = self.bench.port.running_batch(self.order)
        self.model: list[int] = []

    def drop(self, rows: Sequence[int]) -> None:
        """What an engine does with its own columns."""
        for row in sorted(rows, reverse=True):
            if self.order is RowOrder.CLOSE_UP:
                del self.model[row]
            else:
                last = self.model.pop()
                if row < len(self.model):
                    self.model[row] = last

    @rule(request_id=ids)
    def add(self, request_id: int) -> None:
        if request_id in self.model:
            with pytest.raises(ValueError, match="runs already"):
                self.batch.add(request_id)
        else:
            assert self.batch.add(request_id) == len(self.model)
            self.model.append(request_id)

    @rule(new=st.lists(ids, max_size=70))
    def extend(self, new: list[int]) -> None:
        if len({*new, *self.model}) < len(new) + len(self.model):
            with pytest.raises(ValueError, match="runs already"):
                self.batch.extend(new)
        else:
            self.batch.extend(np.array(new, np.uint64))
            self.model += new

    @rule(request_id=ids)
    def remove(self, request_id: int) -> None:
        row = self.model.index(request_id) if request_id in self.model else None
        assert self.batch.remove(request_id) == row
        if row is not None:
            self.drop([row])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        rows = data.draw(st.permutations(range(len(self.model))))
        self.batch.reorder(rows)
        self.model = [self.model[row] for row in rows]

    @rule(data=st.data(), how=st.sampled_from(HOW), has_counts=st.booleans())
    def step(self, data: st.DataObject, how: Any, has_counts: bool) -> None:
        n = len(self.model)
        each = st.lists(st.integers(0, 3), min_size=n, max_size=n)
        counts = data.draw(each) if has_counts else [1] * n
        tokens = data.draw(st.lists(int32, min_size=sum(counts), max_size=sum(counts)))
        rows = data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=5)) if n else []
        finished = [Finished(row, *data.draw(ends)) for row in rows]
        codes, values, details = np.zeros(n, np.uint8), np.zeros(n, np.int64), [b""] * n
        for row, code, value, detail in finished:
            codes[row], values[row], details[row] = code, value, detail
        self.bench.port.push_batch(
            np.array(self.model, np.uint64), np.array(counts, np.uint32), tokens, codes, values, details
        )
        wanted = self.bench.read()
        self.batch.step(how(tokens), finished, token_counts=counts if has_counts else None)
        assert self.bench.read() == wanted
        self.drop(rows)

    @invariant()
    def the_rows_are_the_engines(self) -> None:
        assert self.batch.request_ids.tolist() == self.model
        assert len(self.batch) == len(self.model)
        for row, request_id in enumerate(self.model[:5]):
            assert self.batch.row_of(request_id) == row

    def teardown(self) -> None:
        self.bench.close()


class ClosingUp(Running):
    order = RowOrder.CLOSE_UP
    shards = 3


class OneShard(Running):
    shards = 1


for _machine in (Running, ClosingUp, OneShard):
    _machine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestRunning = Running.TestCase
TestClosingUp = ClosingUp.TestCase
TestOneShard = OneShard.TestCase


@settings(max_examples=60, deadline=None)
@given(data=st.data(), shards=st.integers(1, 6))
def test_a_step_dealt_in_one_pass_is_a_step_pushed_shard_by_shard(data, shards):
    """A row that lands in another shard's ring is text that nobody gets."""
    n = data.draw(st.integers(0, 60))
    request_ids = data.draw(st.lists(ids, min_size=n, max_size=n))
    counts = data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
    tokens = data.draw(st.lists(int32, min_size=sum(counts), max_size=sum(counts)))
    fixed = [int(code) for code in FinishCode if code is not FinishCode.DETAILS]
    codes = data.draw(st.one_of(st.none(), st.lists(st.sampled_from(fixed), min_size=n, max_size=n)))
    values = data.draw(st.one_of(st.none(), st.lists(int64, min_size=n, max_size=n)))
    if codes and values:
        valueless = (FinishCode.STOP, FinishCode.ABORT)
        values = [0 if code in valueless else value for code, value in zip(codes, values, strict=True)]
    bench = Bench(shards)
    try:
        bench.port.push_batch(request_ids, counts, tokens, codes, values)
        dealt = bench.read()
        at = 0
        wanted: list[list[Row]] = [[] for _ in range(shards)]
        for i, request_id in enumerate(request_ids):
            row = (
                request_id,
                tokens[at : at + counts[i]],
                codes[i] if codes else 0,
                values[i] if values else 0,
                b"",
            )
            wanted[request_id % shards].append(row)
            at += counts[i]
        assert dealt == [sorted(rows) for rows in wanted]
    finally:
        bench.close()
