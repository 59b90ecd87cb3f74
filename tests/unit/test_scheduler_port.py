"""The scheduler's port against rings that the test fills and empties."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmring
from manager import DeploymentEndedError, FinishCode, SchedulerPort, Settings, messages
from manager.deployment import Deployment, Facts, egress_name, ingress_name
from manager.outbox import Dispatch, Outbox
from manager.sampling import NormalizedSampling, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator


class Site:
    """A deployment whose manager and workers are the test."""

    def __init__(self, name: str, *, shards: int = 1, egress_bytes: int = 1 << 16) -> None:
        self.name = name
        settings = Settings(
            name=name,
            workers=shards,
            context_length=2048,
            ingress_capacity_bytes=1 << 16,
            egress_capacity_bytes=egress_bytes,
            register_capacity_bytes=1 << 16,
            reply_capacity_bytes=4096,
        )
        self.deployment = Deployment(settings, Facts(1000, (0,), None))
        self.ingress = self.deployment.ring(ingress_name(name)).producer(takeover=True)
        registers = [self.deployment.ring(f"{name}.register.{i}").producer() for i in range(shards)]
        self.outbox = Outbox(self.ingress, registers)
        self.port = SchedulerPort.attach(name)
        self.workers = [
            self.deployment.ring(egress_name(name, i)).consumer(takeover=True, poison=True)
            for i in range(shards)
        ]

    def send(self, request_id: int, prompt: int = 3, **params: Any) -> None:
        prompt_ids = np.arange(request_id, request_id + prompt, dtype=np.int32)
        sampling = NormalizedSampling.of(
            SamplingParams.from_mapping(params), vocab_size=1000, has_tokenizer=True
        )
        self.outbox.send(Dispatch(request_id, f"rid {request_id}", prompt_ids, prompt_ids[-4:], sampling))

    def read(self, shard: int, limit: int = 1000) -> list[tuple[int, list[int], int, int, bytes, int]]:
        """Rows of the batches in a shard's ring: (id, tokens, code, value, details, flags)."""
        rows = []
        records = self.workers[shard].drain(limit)
        for record in records:
            assert record.type == messages.EgressType.BATCH
            frame = messages.BATCH.read(record)
            starts = np.concatenate([[0], np.cumsum(frame["token_counts"])]).astype(int)
            details = [b""] * frame.rows
            if "finish_details" in frame:
                details = messages.unpack_bytes(frame["finish_details_lengths"], frame["finish_details"])
            values = frame["finish_values"].tolist() or [0] * frame.rows
            rows += [
                (
                    int(frame["request_ids"][i]),
                    frame["token_ids"][starts[i] : starts[i + 1]].tolist(),
                    int(frame["finish_codes"][i]),
                    values[i],
                    details[i],
                    record.flags,
                )
                for i in range(frame.rows)
            ]
        if records:
            self.workers[shard].release()
        return rows

    def errors(self, shard: int = 0) -> list[tuple[int, str]]:
        found = []
        records = self.workers[shard].drain(1000)
        for record in records:
            assert record.type == messages.EgressType.ERROR
            frame = messages.ERROR.read(record)
            texts = messages.unpack_bytes(frame["messages_lengths"], frame["messages"])
            found += list(zip(frame["request_ids"].tolist(), (t.decode() for t in texts), strict=True))
        if records:
            self.workers[shard].release()
        return found

    def die(self) -> None:
        """Drop the manager's locks as SIGKILL does."""
        for end in (self.ingress, *self.outbox._registers):
            end._attachment.mapping.handle.close()
        for segment in (*self.deployment._rings.values(), self.deployment._manifest):
            segment._segment._handle.close()

    def close(self) -> None:
        self.port.close()
        with contextlib.suppress(shmring.RingClosedError):
            self.outbox.close()
        for worker in self.workers:
            worker.close()
        self.deployment.close()


@pytest.fixture
def sites(ring_name: str) -> Iterator[Any]:
    made: list[Site] = []

    def make(**options: Any) -> Site:
        made.append(Site(f"{ring_name}.{len(made)}", **options))
        return made[-1]

    yield make
    for site in made:
        site.close()


@pytest.fixture
def site(sites: Any) -> Site:
    return sites()


def test_a_drain_brings_requests_as_columns(site: Site) -> None:
    """What an engine author builds on: aligned columns, each request's values in its row."""
    site.send(7, prompt=2, temperature=0.5, stop_token_ids=[4, 5])
    site.send(8, prompt=3, regex="a+")
    assert site.port.wait(1.0)
    arrivals = site.port.drain()
    assert len(arrivals) == 2
    assert arrivals.request_ids.tolist() == [7, 8]
    assert arrivals.prompt_counts.tolist() == [2, 3]
    assert arrivals.prompt_ids.tolist() == [7, 8, 8, 9, 10]
    assert arrivals.sampling["temperature"].tolist() == [0.5, 1.0]
    assert arrivals.stop_token_counts.tolist() == [2, 0]
    assert arrivals.stop_token_ids.tolist() == [4, 5]
    assert arrivals.extras[0] == b""
    assert arrivals.extras[1] != b""
    assert arrivals.rids == ["rid 7", "rid 8"]
    assert len(site.port.drain()) == 0
    # copies: an engine keeps them for as long as it likes
    arrivals.prompt_ids[:] = -1


@pytest.mark.parametrize("max_requests", [1, 2, 7, 64, 256, 1000])
def test_no_more_requests_than_asked_for_are_drained(site: Site, max_requests: int) -> None:
    """An engine that has room for n must not be given n + 1: it has nowhere to put it."""
    for request_id in range(1, 101):
        site.send(request_id)
        if request_id % 3 == 0:
            site.outbox.abort(request_id)
    seen: list[int] = []
    aborts: list[int] = []
    while len(seen) < 100:
        arrivals = site.port.drain(max_requests)
        assert len(arrivals) == min(max_requests, 100 - len(seen))
        seen += arrivals.request_ids.tolist()
        aborts += arrivals.aborts.tolist()
        # an abort never comes before its request
        assert set(aborts) <= set(seen)
    aborts += site.port.drain(max_requests).aborts.tolist()
    assert seen == list(range(1, 101))
    assert aborts == list(range(3, 101, 3))


def test_aborts_come_without_requests(site: Site) -> None:
    """An idle engine must hear of aborts too."""
    for request_id in (5, 2**64 - 1):
        site.outbox.abort(request_id)
    arrivals = site.port.drain(1)
    assert arrivals.aborts.tolist() == [5, 2**64 - 1]
    assert len(arrivals) == 0


def test_questions_come_and_answers_go(sites: Any) -> None:
    """Control requests share the rings, and find their shard by their id."""
    site = sites(shards=2)
    assert messages.CONTROL.push(
        site.ingress, 2, np.array([4, 5], np.uint64), *messages.pack_bytes([b"state?", b""])
    )
    controls = site.port.drain().controls
    assert [(c.control_id, c.payload) for c in controls] == [(4, b"state?"), (5, b"")]
    site.port.push_result(5, b"fine")
    assert site.workers[0].drain(1) == []
    record = site.workers[1].drain(1)[0]
    assert record.type == messages.EgressType.RESULT
    assert messages.RESULT.read(record)["payloads"].tobytes() == b"fine"
    site.workers[1].release()


def test_a_damaged_record_is_answered_and_the_others_are_served(site: Site) -> None:
    """One record that cannot be read must neither stop the engine nor leave its client waiting."""
    site.send(1)
    ids = np.array([2, 3], np.uint64)
    assert messages.ABORT.push(site.ingress, 2, ids, flags=0)
    bench = shmring.create(f"{site.name}.copy", 4096)
    with bench, bench.producer() as producer, bench.consumer() as consumer:
        messages.ABORT.push(producer, 2, ids)
        frame = consumer.try_pop()
    assert frame is not None
    assert site.ingress.try_push(frame, messages.IngressType.REQUEST)  # ids, and nothing of a request
    for kind in (0, 9, 255, messages.IngressType.REQUEST, messages.IngressType.CONTROL):
        assert site.ingress.try_push(b"junk", kind)
        assert site.ingress.try_push(b"", kind)
    site.send(4)
    arrivals = site.port.drain()
    assert arrivals.request_ids.tolist() == [1, 4]
    assert arrivals.aborts.tolist() == [2, 3]
    errors = site.errors()
    assert [request_id for request_id, _ in errors] == [2, 3]
    assert all(text.startswith("invalid request: ") for _, text in errors)
    assert len(site.port.drain()) == 0
    site.send(5)
    assert site.port.drain().request_ids.tolist() == [5]


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 8])
def test_a_batch_is_split_by_shard_and_keeps_each_requests_order(sites: Any, shards: int) -> None:
    """Order within a request is the text; a request that changes its shard is a stranger there."""
    site = sites(shards=shards)
    rng = np.random.default_rng(shards)
    chunks = [(request_id, step) for request_id in range(1, 65) for step in range(50)]
    order = rng.permutation(len(chunks))
    next_step: dict[int, int] = defaultdict(int)
    sent = [chunks[index][0] for index in order.tolist()]
    seen: dict[int, list[int]] = defaultdict(list)
    shard_of_request: dict[int, int] = {}
    for start in range(0, len(sent), 100):
        ids = np.array(sent[start : start + 100], np.uint64)
        tokens = []
        for request_id in ids.tolist():
            tokens.append(next_step[request_id])
            next_step[request_id] += 1
        site.port.push_batch(ids, np.ones(len(ids), np.uint32), np.array(tokens, np.int32))
        for shard in range(shards):
            for request_id, row, code, _, _, _ in site.read(shard):
                assert shard_of_request.setdefault(request_id, shard) == shard == request_id % shards
                assert code == FinishCode.NONE
                seen[request_id] += row
    assert seen == {request_id: list(range(50)) for request_id in range(1, 65)}


@pytest.mark.parametrize("shards", [1, 3])
def test_rows_of_all_lengths_keep_their_columns(sites: Any, shards: int) -> None:
    """Empty rows, long rows and ends with details side by side: nothing is shifted to a neighbour."""
    site = sites(shards=shards)
    n = 60
    ids = np.arange(1, n + 1, dtype=np.uint64)
    counts = (np.arange(n) * 7 % 5).astype(np.uint32)
    tokens = np.repeat(np.arange(1, n + 1), counts).astype(np.int32)
    codes = np.where(np.arange(n) % 4 == 0, FinishCode.LENGTH, FinishCode.NONE).astype(np.uint8)
    codes[5] = FinishCode.DETAILS
    values = np.where(codes == FinishCode.LENGTH, np.arange(n), 0).astype(np.int64)
    details = [b"\x80" if code == FinishCode.DETAILS else b"" for code in codes]
    site.port.push_batch(ids, counts, tokens, codes, values, details)
    rows = {row[0]: row[1:] for shard in range(shards) for row in site.read(shard)}
    assert rows == {
        i + 1: ([i + 1] * int(counts[i]), int(codes[i]), int(values[i]), details[i], 0) for i in range(n)
    }


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        (([1, 2], [1], [5]), "differ in length"),
        (([1], [2], [5]), "disagree"),
        (([1], [1], []), "disagree"),
        (([1], [1], [5], [0, 0]), "differ in length"),
        (([1], [1], [5], [0], [0, 0]), "differ in length"),
        (([1], [1], [5], [0], [0], [b"", b""]), "differ in length"),
        (([[1]], [1], [5]), "request_ids"),
        (([-1], [1], [5]), "request_ids"),
        (([1], [-1], [5]), "token_counts"),
        (([1], [1], [2**31]), "token_ids"),
        (([1], [1], [5.0]), "token_ids"),
        (([1.5], [1], [5]), "request_ids"),
        (([1], [1], [5], [256]), "finish_codes"),
        (([1], [1], [5], [True]), "finish_codes"),
        (([1], [1], [5], [3], [2**63]), "finish_values"),
        ((["1"], [1], [5]), "request_ids"),
        (([2**64], [1], [5]), "request_ids"),
        (([None], [1], [5]), "request_ids"),
    ],
)
def test_columns_that_cannot_be_are_refused_before_anything_is_sent(
    site: Site, columns: tuple[Any, ...], what: str
) -> None:
    """A wrapped id or a shifted column would be somebody else's text."""
    with pytest.raises(ValueError, match=what):
        site.port.push_batch(*columns)
    assert site.read(0) == []


def test_columns_of_other_types_are_converted(site: Site) -> None:
    """Engines have lists, int64 tensors and foreign byte orders; values are what counts."""
    site.port.push_batch([1, 2], [1, 2], [5, 6, 7])
    site.port.push_batch(
        np.array([1, 2], ">i8"), np.array([1, 2], np.int64), np.array([5, 6, 7], np.int64), np.array([0, 1])
    )
    tokens = np.arange(10, dtype=np.int32)[5:8]
    site.port.push_batch(np.array([1, 0, 2], np.uint64)[::2], np.array([1, 2], np.uint32), tokens)
    assert site.read(0) == [
        row for code in (0, 1, 0) for row in ((1, [5], 0, 0, b"", 0), (2, [6, 7], code, 0, b"", 0))
    ]


def test_an_empty_batch_is_no_record(site: Site) -> None:
    """A step in which nobody said anything costs nobody anything."""
    site.port.push_batch([], [], [])
    assert site.workers[0].drain(10) == []


@pytest.mark.parametrize("shards", [1, 3])
def test_a_batch_larger_than_a_ring_goes_through_it(sites: Any, shards: int) -> None:
    """The size of a ring bounds what waits in it, not what an engine may do in one step."""
    site = sites(shards=shards, egress_bytes=4096)
    n = 3000
    ids = np.arange(1, n + 1, dtype=np.uint64)
    pushing = threading.Thread(
        target=lambda: site.port.push_batch(
            ids, np.full(n, 2, np.uint32), np.repeat(ids, 2).astype(np.int32), None, np.zeros(n, np.int64)
        )
    )
    pushing.start()
    rows = read_until_done(site, pushing)
    assert sorted(rows) == list(range(1, n + 1))
    assert all(tokens == [request_id] * 2 for request_id, tokens in rows.items())


def read_until_done(site: Site, pushing: threading.Thread) -> dict[int, list[int]]:
    """Read all shards until the pusher is through."""
    rows: dict[int, list[int]] = defaultdict(list)
    while True:
        is_last = not pushing.is_alive()
        for shard in range(site.port.shards):
            for request_id, tokens, _, _, _, _ in site.read(shard, limit=3):
                rows[request_id] += tokens
        if is_last and not any(worker.is_readable() for worker in site.workers):
            pushing.join()
            return rows


def test_one_row_larger_than_a_ring_goes_through_it(sites: Any) -> None:
    """A long chunk of one request is no reason to end the engine."""
    site = sites(egress_bytes=4096)
    tokens = np.arange(5000, dtype=np.int32)
    ends: list[int] = []
    pushing = threading.Thread(
        target=lambda: site.port.push_batch(
            [1, 2, 3], [1, 5000, 1], np.concatenate([[7], tokens, [8]]), [0, 3, 1], [0, 5000, 0]
        )
    )
    pushing.start()
    rows: dict[int, list[int]] = defaultdict(list)
    while pushing.is_alive() or site.workers[0].is_readable():
        for request_id, ids, code, value, _, _ in site.read(0, limit=1):
            assert request_id not in ends
            rows[request_id] += ids
            if code:
                ends.append(request_id)
                assert value == (5000 if request_id == 2 else 0)
    pushing.join()
    assert rows == {1: [7], 2: tokens.tolist(), 3: [8]}
    assert ends == [2, 3]


def test_an_error_longer_than_a_ring_is_cut_and_comes(sites: Any) -> None:
    """The client must hear of its end, if not of all of its reasons."""
    site = sites(egress_bytes=4096)
    site.port.push_error(1, "x" * 100_000)
    ((request_id, text),) = site.errors()
    assert request_id == 1
    assert 4000 < len(text) < 4096
    assert set(text) == {"x"}


def test_a_full_ring_is_waited_for(site: Site) -> None:
    """Output that was made is never dropped: the scheduler feels a slow worker, its client does not."""
    tokens = np.arange(3000, dtype=np.int32)
    pushing = threading.Thread(target=lambda: [site.port.push_batch([1], [3000], tokens) for _ in range(20)])
    pushing.start()
    while site.workers[0].statistics().producer.parks == 0:
        pass
    assert pushing.is_alive()
    rows = read_until_done(site, pushing)
    assert rows == {1: tokens.tolist() * 20}


def test_a_wait_for_room_ends_by_its_time_out(site: Site) -> None:
    """An engine that gave a bound gets its thread back, and what was sent before is there."""
    tokens = np.arange(3000, dtype=np.int32)

    def fill() -> None:
        while True:
            site.port.push_batch([1], [3000], tokens, timeout_s=0.05)

    with pytest.raises(TimeoutError, match=r"timeout_s=0\.05"):
        fill()
    assert len(site.read(0)) == 5
    site.port.push_batch([1], [1], [9], timeout_s=0.05)
    assert site.read(0) == [(1, [9], 0, 0, b"", 0)]

    def fill_with_errors() -> None:
        while True:
            site.port.push_error(1, "x" * 10_000, timeout_s=0)

    with pytest.raises(TimeoutError):
        fill_with_errors()


@pytest.mark.parametrize("way", ["orderly", "killed"])
def test_a_manager_that_goes_is_told_apart_and_ends_every_wait(site: Site, way: str) -> None:
    """An engine that waits for a dead manager holds the GPU for nobody."""
    site.send(1)
    if way == "orderly":
        site.outbox.close()
    else:
        site.die()
    # what it left is still handed over
    assert site.port.wait(5)
    assert site.port.drain().request_ids.tolist() == [1]

    def again_and_again(act: Any) -> None:
        while True:
            act()

    for act in (
        lambda: (site.port.wait(0.3), site.port.drain()),
        site.port.drain,
        lambda: site.port.push_batch([1], [3000], np.arange(3000)),
        lambda: site.port.push_error(1, "x" * 10_000),
    ):
        with pytest.raises(DeploymentEndedError) as caught:
            again_and_again(act)
        assert caught.value.orderly is (way == "orderly")


def test_whoever_outlives_a_killed_manager_removes_its_names(site: Site) -> None:
    """After a kill nobody else is there to do it."""
    site.die()
    site.port.wait(5)
    with pytest.raises(DeploymentEndedError):
        site.port.drain()
    assert [info.name for info in shmring.list_rings() if info.name.startswith(site.name)] == []


def test_waiting_ends_by_its_time_out(site: Site) -> None:
    """Without a request the answer is no, in time."""
    assert site.port.wait(0) is False
    assert site.port.wait(0.01) is False
    site.send(1)
    assert site.port.wait(0) is True


def test_one_deployment_has_one_scheduler(site: Site) -> None:
    """Two would each take half of the requests, and both write to all workers."""
    text = f"the deployment has a scheduler already: name={site.name}, pid={os.getpid()}"
    with pytest.raises(shmring.RoleTakenError, match=text):
        SchedulerPort.attach(site.name)
    site.send(1)
    assert site.port.drain().request_ids.tolist() == [1]
    site.port.close()
    site.port.close()
    site.port = SchedulerPort.attach(site.name)
    site.send(2)
    assert site.port.drain().request_ids.tolist() == [2]


def test_a_port_that_cannot_attach_holds_nothing(site: Site) -> None:
    """The ends that it got before the one it did not get must be free again."""
    site.port.close()
    with (
        shmring.Producer.attach(egress_name(site.name, 0), takeover=True),
        pytest.raises(shmring.RoleTakenError),
    ):
        SchedulerPort.attach(site.name)
    site.port = SchedulerPort.attach(site.name)


def test_what_was_not_released_comes_again_to_the_next_scheduler(site: Site) -> None:
    """A scheduler that dies between drain and start must not take the request with it."""
    site.send(1)
    site.port._ingress.drain(1)
    for end in (site.port._ingress, *site.port._egress):
        end._attachment.mapping.handle.close()
    site.outbox.abort(1)
    site.port = SchedulerPort.attach(site.name)
    arrivals = site.port.drain()
    assert arrivals.request_ids.tolist() == [1]
    assert arrivals.aborts.tolist() == [1]


def test_a_fresh_text_is_marked(site: Site) -> None:
    """Whether output goes on where the prompt ended is the engine's to say, on every batch."""
    site.port.push_batch([1], [1], [5])
    site.port.close()
    site.port = SchedulerPort.attach(site.name, continues_prompt=False)
    site.port.push_batch([1], [1], [5])
    assert [row[5] for row in site.read(0)] == [0, int(messages.BatchFlag.FRESH_TEXT)]


def test_no_deployment_is_told_at_once(ring_name: str) -> None:
    """A wrong name must be an error, not a wait."""
    with pytest.raises(shmring.SegmentNotFoundError, match=f"no deployment of that name.* name={ring_name}"):
        SchedulerPort.attach(ring_name)
    with pytest.raises(shmring.SegmentNotFoundError):
        SchedulerPort.attach(ring_name, timeout_s=0.02)


@pytest.mark.parametrize("code", [5, 77, 254])
def test_a_finish_code_that_nobody_knows_is_refused_before_anything_is_sent(site: Site, code: int) -> None:
    """One wrong number would end every request of its step with an error."""
    with pytest.raises(ValueError, match=rf"row=1, code={code}"):
        site.port.push_batch([1, 2], [1, 1], [5, 6], [0, code], [0, 0])
    assert not site.workers[0].is_readable()


@pytest.mark.parametrize(
    ("code", "value", "details"),
    [(1, 7, None), (4, -1, None), (1, 0, b"\x80"), (255, 0, b"\xc1"), (255, 0, None), (255, 1, b"\x80")],
)
def test_an_end_that_no_worker_can_read_is_refused_before_anything_is_sent(
    site: Site, code: int, value: int, details: bytes | None
) -> None:
    """It would end every request of its step with an error."""
    packed = None if details is None else [b"", details]
    with pytest.raises(ValueError, match="row=1, why=finish"):
        site.port.push_batch([1, 2], [1, 1], [5, 6], [0, code], [0, value], packed)
    assert not site.workers[0].is_readable()


def test_an_answer_of_the_wrong_type_is_told_by_name(site: Site) -> None:
    """An engine author would have to guess which of the arguments is meant."""
    with pytest.raises(TypeError, match="message is a text: type=bytes"):
        site.port.push_error(1, b"no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="payload is bytes: type=str"):
        site.port.push_result(1, "no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="finish_details is bytes: type=str"):
        site.port.push_batch([1], [1], [5], [255], [0], ["no"])  # type: ignore[list-item]


@pytest.mark.parametrize("number", [-1, 2**64, np.int64(-1), 1.5, "1", None])
def test_an_id_that_is_none_is_told_by_name_and_ends_nobody(site: Site, number: Any) -> None:
    """Cast to 64 bits it would be the id of somebody else's request."""
    kind = ValueError if isinstance(number, (int, np.integer)) else TypeError
    with pytest.raises(kind, match=f"request_id.*{number}"):
        site.port.push_error(number, "no")
    with pytest.raises(kind, match=f"control_id.*{number}"):
        site.port.push_result(number, b"no")
    assert not any(worker.is_readable() for worker in site.workers)


def test_ids_of_numpy_are_ids(site: Site) -> None:
    """An engine takes them out of its columns."""
    site.port.push_error(np.uint64(2**64 - 2), "no")
    (record,) = site.workers[0].drain(10)
    assert messages.ERROR.read(record)["request_ids"].tolist() == [2**64 - 2]
    site.workers[0].release()


def test_timeouts_are_real_numbers_everywhere(site: Site) -> None:
    """NaN would wait for ever, and a float32 for seconds more or less."""
    port = site.port
    calls = [
        port.wait,
        lambda timeout: port.push_error(1, "no", timeout_s=timeout),
        lambda timeout: port.push_result(1, b"no", timeout_s=timeout),
        lambda timeout: port.push_batch([1], [1], [5], timeout_s=timeout),
        lambda timeout: port.running_batch().step([], timeout_s=timeout),
        lambda timeout: SchedulerPort.attach(f"{site.name}-none", timeout),
    ]
    for call in calls:
        for wrong, kind in ((math.nan, ValueError), (-1, ValueError), (True, TypeError), ("1", TypeError)):
            with pytest.raises(kind, match="timeout_s"):
                call(wrong)
    for right in (np.float32(0.001), np.int64(0)):
        assert not port.wait(right)
        port.push_error(1, "no", timeout_s=right)
        with pytest.raises(shmring.SegmentNotFoundError):
            SchedulerPort.attach(f"{site.name}-none", right)
