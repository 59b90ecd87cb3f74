"""A running batch at its edges: what it refuses, and a ring that is full or too small."""

from __future__ import annotations

import itertools
import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import shmring
from manager import BatchExtras, FinishCode, LogprobColumn, messages
from manager.config import Settings
from manager.deployment import Deployment, Facts, egress_name
from manager.running_batch import Finished, RowOrder
from manager.scheduler_port import SchedulerPort


class Site:
    """A port over two rings, and their other ends."""

    def __init__(self, name):
        self.rings = [shmring.create(f"{name}.{i}", 4096) for i in range(2)]
        self.ingress = shmring.create(f"{name}.in", 4096)
        # a deployment without a manager: the port needs its facts and its rings
        facts = SimpleNamespace(name=name, shards=2, vocab_size=1000, context_length=9, eos_token_ids=(0,))
        self.ingress_producer = self.ingress.producer()
        self.port = SchedulerPort(
            facts, self.ingress.consumer(), [ring.producer(takeover=True) for ring in self.rings]
        )
        self.workers = [ring.consumer() for ring in self.rings]

    def read(self, shard):
        """A shard's rows: (id, tokens, code, value, details)."""
        rows = []
        records = self.workers[shard].drain(1000)
        for record in records:
            frame = messages.BATCH.read(record)
            ends = np.cumsum(frame["token_counts"]).tolist()
            details = [b""] * frame.rows
            if "finish_details" in frame:
                details = messages.unpack_bytes(frame["finish_details_lengths"], frame["finish_details"])
            rows += zip(
                frame["request_ids"].tolist(),
                (part.tolist() for part in np.split(frame["token_ids"], ends[:-1])),
                frame["finish_codes"].tolist(),
                frame["finish_values"].tolist() or [0] * frame.rows,
                details,
                strict=True,
            )
        if records:
            self.workers[shard].release()
        return rows

    def close(self):
        self.port.close()
        for end in (self.ingress_producer, *self.workers, *self.rings, self.ingress):
            end.close()


@pytest.fixture
def site(ring_name):
    site = Site(ring_name)
    yield site
    site.close()


@pytest.fixture
def batch(site):
    batch = site.port.running_batch()
    batch.extend([10, 11, 12])
    return batch


def sent(site):
    return sorted(row for shard in range(2) for row in site.read(shard))


class Tensor:
    """What a CPU tensor offers to numpy."""

    def __init__(self, values):
        self.values = np.array(values)

    def __array__(self, dtype=None, copy=None):
        return self.values


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3],
        (1, 2, 3),
        [np.int64(1), 2, 3],
        np.array([1, 2, 3], np.int32),
        np.array([1, 2, 3], np.int64),
        np.array([1, 2, 3], np.uint16),
        np.array([1, 9, 2, 9, 3, 9], np.int32)[::2],
        np.array([1, 2, 3], ">i4"),
        memoryview(np.array([1, 2, 3], np.int32)),
        Tensor([1, 2, 3]),
    ],
)
def test_token_ids_are_taken_wherever_they_lie(tokens, site, batch):
    """An engine has them in an array, a tensor or a list, and should not have to convert."""
    batch.step(tokens)
    assert sent(site) == [(10, [1], 0, 0, b""), (11, [2], 0, 0, b""), (12, [3], 0, 0, b"")]


@pytest.mark.parametrize(
    ("tokens", "options", "text"),
    [
        ([1, 2], {}, "one token id for each"),
        ([1, 2, 3, 4], {}, "one token id for each"),
        (np.zeros((3, 1), np.int32), {}, "not flat"),
        ([1, 2, 2**31], {}, "does not fit"),
        (np.array([1, 2, 2**40]), {}, "does not fit"),
        ([1.0, 2.0, 3.0], {}, "no integers"),
        ([1, 2, 3], {"token_counts": [1, 1]}, "differ in length"),
        ([1, 2, 3], {"token_counts": [1, 1, 2]}, "disagree"),
        ([1, 2, 3], {"finished": [Finished(3, 1)]}, "no row and code"),
        ([1, 2, 3], {"finished": [Finished(-1, 1)]}, "a row twice, or none"),
        ([1, 2, 3], {"finished": [Finished(0, 1), Finished(0, 1)]}, "a row twice"),
        ([1, 2, 3], {"finished": [Finished(0, 0)]}, "none of FinishCode"),
        ([1, 2, 3], {"finished": [Finished(0, 256)]}, "none of FinishCode"),
        ([1, 2], {"finished": [Finished(0, 255, 0, b"\x80")]}, "do not fit the batch"),
        ([1, 2, 3], {"finished": [Finished(5, 255, 0, b"\x80")]}, "no row and code"),
    ],
)
def test_a_step_that_does_not_fit_is_refused_and_nothing_is_sent(tokens, options, text, site, batch):
    """Half a step would put every request behind it out of step."""
    with pytest.raises(ValueError, match=text):
        batch.step(tokens, **options)
    assert sent(site) == []
    assert len(batch) == 3
    batch.step([1, 2, 3])
    assert len(sent(site)) == 3


@pytest.mark.parametrize("bad", [0, -1, 2**64])
def test_a_request_id_is_a_number_that_somebody_has(bad, batch):
    """Zero marks an empty place."""
    with pytest.raises(ValueError, match="request"):
        batch.add(bad)
    assert 0 not in batch


@pytest.mark.parametrize("bad", ["1", 1.0, None])
def test_a_request_id_is_an_int(bad, batch):
    """Not something that looks like one."""
    with pytest.raises(TypeError):
        batch.add(bad)


def test_who_finished_leaves_the_batch_after_the_step(site, batch):
    """Its last token goes with its end; its row is filled by the last."""
    batch.step([1, 2, 3], [Finished(0, FinishCode.STOP_TOKEN, 1)])
    assert sent(site) == [(10, [1], 2, 1, b""), (11, [2], 0, 0, b""), (12, [3], 0, 0, b"")]
    assert batch.request_ids.tolist() == [12, 11]
    batch.step([4, 5])
    assert sent(site) == [(11, [5], 0, 0, b""), (12, [4], 0, 0, b"")]


def test_rows_close_up_where_the_engines_do(site):
    """As np.delete leaves them."""
    batch = site.port.running_batch(RowOrder.CLOSE_UP)
    batch.extend([10, 11, 12, 13])
    batch.step([1, 2, 3, 4], [Finished(2, FinishCode.STOP), Finished(0, FinishCode.STOP)])
    assert batch.request_ids.tolist() == [11, 13]
    assert batch.remove(11) == 0
    assert batch.row_of(13) == 0
    sent(site)


def test_details_travel_with_their_row(site, batch):
    """A reason that no code stands for is told whole."""
    batch.step([1, 2, 3], [Finished(1, FinishCode.DETAILS, 0, b"\x81\xa1a\x01"), Finished(2, 1)])
    assert sent(site) == [
        (10, [1], 0, 0, b""),
        (11, [2], 255, 0, b"\x81\xa1a\x01"),
        (12, [3], 1, 0, b""),
    ]
    assert batch.request_ids.tolist() == [10]


def test_an_empty_batch_sends_nothing(site):
    """An engine that has nothing to do may step all the same."""
    batch = site.port.running_batch()
    batch.step([])
    batch.extend([1])
    batch.clear()
    batch.step(np.empty(0, np.int32))
    assert sent(site) == []


@pytest.mark.parametrize("rows", [[0, 1], [0, 1, 1], [0, 1, 3], [0, 1, 2, 2]])
def test_an_order_names_every_row_once(rows, batch):
    """A request that is lost on the way would wait for ever."""
    with pytest.raises(ValueError, match="no order of the batch"):
        batch.reorder(rows)


def test_a_step_waits_for_the_shard_that_is_full_and_serves_the_others_at_once(site, batch):
    """One slow worker is not everybody's."""
    producer = site.port._egress[0]
    while producer.try_append(b"x" * 100):
        pass
    while producer.try_append(b""):
        pass
    producer.publish()
    thread = threading.Thread(target=lambda: batch.step([1, 2, 3], [Finished(2, FinishCode.STOP)]))
    thread.start()
    assert site.workers[1].wait_until_readable(10)
    assert [row[0] for row in site.read(1)] == [11]
    records = site.workers[0].drain(1000)
    assert len(records) > 30
    site.workers[0].release()
    thread.join(10)
    assert sorted((row[0], row[2]) for row in site.read(0)) == [(10, 0), (12, 1)]
    assert batch.request_ids.tolist() == [10, 11]


def test_a_step_that_waits_too_long_says_so(site, batch):
    """An engine may rather stop than wait for a worker for ever."""
    producer = site.port._egress[0]
    while producer.try_append(b""):
        pass
    producer.publish()
    with pytest.raises(TimeoutError):
        batch.step([1, 2, 3], timeout_s=0.01)


def test_a_part_that_is_larger_than_its_ring_goes_in_pieces(site):
    """The smallest ring serves the largest batch."""
    batch = site.port.running_batch()
    batch.extend(np.arange(1, 1001, dtype=np.uint64))
    rows: list = []

    def read():
        while len(rows) < 1000:
            for shard in range(2):
                if site.workers[shard].wait_until_readable(0.05):
                    rows.extend(site.read(shard))

    thread = threading.Thread(target=read)
    thread.start()
    batch.step(np.arange(1000))
    thread.join(20)
    assert sorted((row[0], row[1]) for row in rows) == [(i + 1, [i]) for i in range(1000)]


def test_a_closed_port_says_so(site, batch):
    """The step after the end is an error, not a lost step."""
    site.port.close()
    with pytest.raises(ValueError, match="closed"):
        batch.step([1, 2, 3])


def test_fresh_text_is_said_with_every_step(ring_name):
    """The flag of the port is the flag of its batches."""
    settings = Settings(
        name=ring_name,
        workers=1,
        context_length=2048,
        ingress_capacity_bytes=1 << 16,
        egress_capacity_bytes=1 << 16,
        register_capacity_bytes=1 << 16,
        reply_capacity_bytes=4096,
    )
    deployment = Deployment(settings, Facts(1000, (0,), None))
    port = SchedulerPort.attach(ring_name, continues_prompt=False)
    consumer = deployment.ring(egress_name(ring_name, 0)).consumer(takeover=True)
    batch = port.running_batch()
    batch.add(1)
    batch.step([7])
    port.push_batch([1], [1], [7])
    assert [record.flags for record in consumer.drain(9)] == [1, 1]
    consumer.close()
    port.close()
    deployment.close()


@pytest.mark.parametrize("code", [0, 9, 254, 300])
def test_an_end_with_a_code_that_nobody_knows_leaves_the_batch_as_it_was(ring_name, code):
    """The request would leave the batch, and its client would be told of a malformed frame."""
    site = Site(ring_name)
    try:
        running = site.port.running_batch()
        running.extend([1, 2])
        with pytest.raises(ValueError, match=rf"row=0, code={code}"):
            running.step([5, 6], [Finished(0, code)])
        assert running.request_ids.tolist() == [1, 2]
        running.step([5, 6], [(1, FinishCode.STOP)])  # a plain tuple is as good
        assert running.request_ids.tolist() == [1]
    finally:
        site.close()


@pytest.mark.parametrize(
    ("end", "kind", "told"),
    [
        (Finished(0, FinishCode.STOP_TOKEN, 2**63), ValueError, f"value={2**63}"),
        (Finished(0, FinishCode.LENGTH, -(2**70)), ValueError, f"value={-(2**70)}"),
        (Finished(2**40, FinishCode.STOP), ValueError, f"row={2**40}, running=2"),
        (Finished(2, FinishCode.STOP), ValueError, "row=2, running=2"),
        (Finished(0, FinishCode.LENGTH, 1.5), TypeError, "value=1.5"),
        (Finished(0, FinishCode.LENGTH, None), TypeError, "value=None"),
        (Finished("0", FinishCode.STOP), TypeError, "row='0'"),
        (Finished(0, FinishCode.DETAILS, 0, "x"), TypeError, "details is bytes: type=str"),
        (Finished(0, FinishCode.DETAILS, 0, b"\xc1"), ValueError, "row=0, why=finish details are damaged"),
        (Finished(0, FinishCode.DETAILS), ValueError, "row=0, why=finish details are damaged"),
        (Finished(0, FinishCode.DETAILS, 7, b"\x80"), ValueError, "row=0, why=finish code carries no value"),
        (Finished(0, FinishCode.STOP, 7), ValueError, "row=0, why=finish code carries no value"),
        (Finished(0, FinishCode.STOP, 0, b"\x80"), ValueError, "row=0, why=finish code carries no details"),
    ],
)
def test_an_end_that_cannot_be_is_told_by_its_field_and_nothing_is_sent(site, end, kind, told):
    """An overflow somewhere in the midst of a step does not say which of its hundreds of numbers is meant."""
    batch = site.port.running_batch()
    batch.extend([2, 4])
    with pytest.raises(kind, match=re.escape(told)):
        batch.step([5, 6], [end])
    assert batch.request_ids.tolist() == [2, 4]
    assert site.read(0) == []


def test_what_takes_another_shape_than_asked_for_is_told_by_its_type(site, batch):
    """Unpacked or asked for its fields it would be an error of the batch's own insides."""
    tokens, ids = [5] * len(batch), batch.request_ids.tolist()
    with pytest.raises(TypeError, match="finished is a sequence of Finished: entry=0, type=int"):
        batch.step(tokens, Finished(0, FinishCode.STOP))
    with pytest.raises(TypeError, match="no BatchExtras: type=dict"):
        batch.step(tokens, extras={"output": None})
    with pytest.raises(TypeError, match="no LogprobColumn: family=output_top, type=list"):
        batch.step(tokens, extras=BatchExtras(output_top=[[-0.5]]))
    assert batch.request_ids.tolist() == ids
    assert site.read(0) == []


def test_numbers_of_numpy_are_numbers_of_an_end(site):
    """Rows come out of np.flatnonzero, and tokens out of a column."""
    batch = site.port.running_batch()
    batch.extend([2, 4])
    batch.step([5, 6], [Finished(np.int64(1), np.uint8(FinishCode.STOP_TOKEN), np.int32(6))])
    assert site.read(0) == [(2, [5], 0, 0, b""), (4, [6], int(FinishCode.STOP_TOKEN), 6, b"")]
    assert batch.request_ids.tolist() == [2]


def test_wrong_extras_are_named_and_nothing_is_sent(site, batch):
    extras = BatchExtras(output=LogprobColumn([[-0.5]], [[7]]))  # of one request, where three run
    with pytest.raises(ValueError, match="output"):
        batch.step([1, 2, 3], [Finished(0, FinishCode.LENGTH)], extras=extras)
    assert sent(site) == []
    assert len(batch) == 3


def test_extras_with_ids_that_do_not_fit_send_nothing(site, batch):
    extras = BatchExtras(output=LogprobColumn([[-0.5], None, None], [[7], None, None]))
    with pytest.raises(ValueError, match="token_ids"):
        batch.step([1, 2], extras=extras)
    assert [worker.drain(9) for worker in site.workers] == [[], []]


@pytest.mark.parametrize("row", [0, 1])
def test_details_that_fit_no_ring_send_nothing_of_their_step(site, batch, row):
    """Half of a step that is then repeated doubles tokens, and extras left behind join the next step."""
    details = b"\x81\xa1a\xc5\x20\x00" + bytes(0x2000)
    extras = BatchExtras(output=LogprobColumn([[-0.5]] * 3, [[7]] * 3))
    with pytest.raises(ValueError, match=f"request_id={10 + row}, length="):
        batch.step([1, 2, 3], [Finished(row, FinishCode.DETAILS, 0, details)], extras=extras)
    assert batch.request_ids.tolist() == [10, 11, 12]
    batch.step([4, 5, 6])
    assert [row[1] for row in sent(site)] == [[4], [5], [6]]  # reads BATCH records, and finds no others


def test_an_order_is_one_of_two(site):
    """Anything else would be taken for one of them, and rows would belong to others than the engine's."""
    with pytest.raises(TypeError, match="order is a RowOrder: order='close up'"):
        site.port.running_batch("close up")


def test_extras_go_ahead_of_the_rows_they_belong_to(site, batch):
    extras = BatchExtras(output=LogprobColumn([[-0.5], None, [-1.5]], [[1], None, [3]]))
    batch.step([1, 2, 3], [Finished(2, FinishCode.LENGTH)], extras=extras)
    found = {}
    for worker in site.workers:
        records = worker.drain(9)
        for ahead, behind in itertools.pairwise(records):
            if ahead.type == messages.EgressType.EXTRAS:
                assert behind.type == messages.EgressType.BATCH
                frame, rows = messages.EXTRAS.read(ahead), messages.BATCH.read(behind)["request_ids"].tolist()
                assert set(frame["request_ids"].tolist()) <= set(rows)
                found |= dict(
                    zip(frame["request_ids"].tolist(), frame["out_lp_values"].tolist(), strict=True)
                )
    assert found == {10: -0.5, 12: -1.5}
    assert batch.request_ids.tolist() == [10, 11]


def test_extras_of_nobody_cost_nothing(site, batch):
    batch.step([1, 2, 3], extras=BatchExtras(output=LogprobColumn([None] * 3, [None] * 3)))
    assert [row[1] for row in sent(site)] == [[1], [2], [3]]
