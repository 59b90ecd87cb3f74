"""Faults that users of LLM servers reported about a request's life, each a test named for it.

Others of their kind are where the part is tested: one rid twice in flight, a reader that never reads
and invalid requests in tests/unit/test_tokenizer_manager.py; ghosts, half characters of two requests
and columns that shift in test_shard.py and test_extras_frame.py; deaths, stops and idle deployments
in tests/processes.
"""

from __future__ import annotations

import logging
import random
import threading
from typing import TYPE_CHECKING, Any

import pytest
from manager_world import LENGTH, Client, World, run
from output_path import OutputPath

from manager import ValidationError, messages
from manager.finish import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def paths(ring_name: str) -> Iterator[Callable[..., OutputPath]]:
    made: list[OutputPath] = []

    def make(**settings: Any) -> OutputPath:
        made.append(OutputPath(ring_name, **settings))
        return made[-1]

    yield make
    for path in made:
        path.close()


def test_the_echo_of_an_abort_of_a_finished_request_takes_nothing_down(ring_name: str) -> None:
    """Abort and finish cross: one end is told, and what comes behind it is no news to anybody."""

    async def work() -> None:
        async with World(ring_name) as world:
            client = Client(world.manager, text="x", rid="a")
            await world.arrive("a")
            world.push("a", "h", FinishReason.stop(104))
            for shard in world._shards:
                shard.do_work(64)
            assert world.manager.abort("a") == 1  # the finish is on its way to us
            world.push("a", [], FinishReason.abort("aborted"))
            await client.end()
            assert world.manager.abort("a") == 0
            ends = [piece for piece in client.pieces if piece.finish_reason is not None]
            assert len(ends) + (client.error is not None) == 1
            await world.settle()
            assert world.is_empty()
            again = Client(world.manager, text="x", rid="b")
            await world.arrive("b")
            world.push("b", "ok", LENGTH(2))
            assert (await again.end()).text == "ok"

    run(work())


def test_a_finish_that_was_not_read_yet_is_not_undone_by_an_abort(ring_name: str) -> None:
    """The answer was there, whole, before the client changed its mind."""

    async def work() -> None:
        async with World(ring_name) as world:
            client = Client(world.manager, text="x", rid="a", stream=False)
            await world.arrive("a")
            world.push("a", "h", FinishReason.stop())
            while world.manager.in_flight_count:
                await world.settle()
            assert world.manager.abort("a") == 0
            assert (await client.end()).text == "h"
            assert client.reason == {"type": "stop"}
            assert world.aborts == []

    run(work())


def test_one_bad_request_in_a_step_does_not_end_the_others(ring_name: str) -> None:
    """A batch step that raised once left a dead worker behind, and a health that said "ok"."""

    async def work() -> None:
        async with World(ring_name, workers=1) as world:
            clients = {rid: Client(world.manager, text="x", rid=rid) for rid in ("a", "bad", "c")}
            await world.arrive("a", "bad", "c")
            ids = [world.requests[rid] for rid in ("a", "bad", "c")]
            with pytest.raises((TypeError, ValueError)):
                world.port.push_batch(ids, [1, 1, 1], [97, "not an id", 99])
            # nothing of that step was sent; the engine ends the one and goes on with the others
            world.port.push_error(world.requests["bad"], "no ids")
            egress = world.port._egress[0]
            truncated = bytes(20)
            assert egress.try_push(truncated, messages.EgressType.BATCH)
            assert egress.try_push(b"what is this", 0xEE)
            world.port.push_batch([], [], [])
            world.push("a", "a", LENGTH(1))
            world.push("c", "c", LENGTH(1))
            for client in clients.values():
                await client.end()
            assert (clients["a"].text, clients["c"].text) == ("a", "c")
            assert isinstance(clients["bad"].error, ValidationError)
            assert clients["bad"].text == ""
            assert world._shards[0].counters.rejected_frames == 2
            assert all(part.is_healthy for part in world.manager.health().values())
            await world.settle()
            assert world.is_empty()

    run(work())


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 8])
def test_chunks_of_a_request_stay_in_order_over_any_number_of_shards(paths: Any, shards: int) -> None:
    """Split over shards and put together again, each text is the one that was generated."""
    path = paths(shards=shards, ring_bytes=1 << 18)
    choice = random.Random(shards)
    requests = list(range(1, 65))
    path.register(*requests)
    left = dict.fromkeys(requests, 0)
    while left:
        rows = choice.choices(list(left), k=choice.randint(1, 40))  # a request may come up twice
        tokens = []
        kept = []
        for request_id in rows:
            if request_id in left:
                tokens.append([ord("0") + left[request_id] % 10])
                kept.append(request_id)
                left[request_id] += 1
                if left[request_id] == 50:
                    del left[request_id]
        path.push(kept, tokens, None)
        if choice.random() < 0.3:
            path.work()
    path.work()
    assert path.texts == dict.fromkeys(requests, "0123456789" * 5)
    for shard, worker in enumerate(path.shards):
        assert worker.counters.rows == 50 * sum(request_id % shards == shard for request_id in requests)


def test_ten_thousand_invalid_requests_leave_no_state_and_no_line(
    ring_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A client with a bug must fill neither our tables nor our disk."""

    async def work() -> None:
        async with World(ring_name) as world:
            caplog.clear()
            for number in range(10_000):
                outputs = world.manager.generate(
                    _request({"top_p": 2.0} if number % 2 else {"max_new_tokens": 8192})
                )
                with pytest.raises(ValidationError):
                    await anext(outputs)
            assert world.registered_count == 0
            assert world.is_empty()
            assert not caplog.records

    with caplog.at_level(logging.INFO):
        run(work())


def _request(params: dict[str, Any]) -> Any:
    from manager import GenerateRequest

    return GenerateRequest(input_ids=[1, 2, 3], sampling_params=params)


def test_an_idle_deployment_says_nothing(ring_name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Lines about nothing send somebody to look for a fault that is none."""

    async def work() -> None:
        async with World(ring_name) as world:
            caplog.clear()
            for _ in range(1200):  # ten minutes of looks
                world.manager._look_at_parts()
            await world.settle()
            assert not caplog.records

    with caplog.at_level(logging.DEBUG, logger="manager"):
        run(work())


def test_no_chunk_is_dropped_between_a_fast_engine_and_a_slow_manager(paths: Any) -> None:
    """A high-water mark that drops is an answer with a hole in it."""
    path = paths(ring_bytes=1 << 12)
    path.register(1)
    count = 20_000

    def engine() -> None:
        for number in range(count):
            path.port.push_batch([1], [1], [ord("a") + number % 26])

    pushing = threading.Thread(target=engine, daemon=True)
    pushing.start()
    text = ""
    while len(text) < count:
        # both rings are full nearly all the while
        path.shards[0].do_work(64)
        path.inboxes[0].do_work(3)
        text += path.texts.pop(1, "")
    pushing.join(20)
    assert text == "".join(chr(ord("a") + number % 26) for number in range(count))
    assert path.shards[0].counters.rows == count
