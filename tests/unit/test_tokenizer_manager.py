"""The tokenizer manager, from a request to its end; the test plays the scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import numpy as np
import pytest
from manager_world import LENGTH, TOKENIZER, Client, Gate, World, run

import shmring
from manager import (
    ConfigError,
    DisconnectedError,
    FinishCode,
    GenerateRequest,
    InternalError,
    QueueFullError,
    Settings,
    TokenizerManager,
    UnavailableError,
    ValidationError,
    messages,
)
from manager.finish import FinishReason
from manager.inbox import Inbox
from manager.supervisor import Supervisor


def test_text_goes_in_and_comes_out(ring_name: str) -> None:
    """The first thing that anybody tries."""

    async def work() -> None:
        async with World(ring_name) as world:
            client = Client(world.manager, text="hello", rid="a")
            await world.arrive("a")
            world.push("a", "wor")
            await world.settle()
            assert client.text == "wor"
            world.push("a", "ld", LENGTH(5))
            await client.end()
            assert client.text == "world"
            assert client.reason == {"type": "length", "length": 5}
            last = client.pieces[-1]
            assert (last.rid, last.index, last.sample) == ("a", 0, 0)
            # "he" and "ll" are one id each
            assert (last.prompt_tokens, last.completion_tokens) == (3, 5)
            assert world.aborts == []
            assert world.is_empty()

    run(work())


def test_without_stream_there_is_one_answer(ring_name: str) -> None:
    """A client that did not ask for pieces gets the whole, with every id of it."""

    async def work() -> None:
        async with World(ring_name) as world:
            client = Client(world.manager, input_ids=[1, 2, 3], rid="a", stream=False)
            await world.arrive("a")
            for character in "hello":
                world.push("a", character)
                await world.settle()
            assert client.pieces == []
            world.push("a", [], LENGTH(5))
            await client.end()
            (piece,) = client.pieces
            assert piece.text == "hello"
            assert piece.output_ids == list(b"hello")
            assert piece.completion_tokens == 5

    run(work())


def test_a_rid_in_flight_is_refused_and_the_first_goes_on(ring_name: str) -> None:
    """The second would take the first's place: one hangs, and answers cross over."""

    async def work() -> None:
        async with World(ring_name) as world:
            first = Client(world.manager, text="one", rid="a")
            await world.arrive("a")
            second = await Client(world.manager, text="two", rid="a").end()
            assert isinstance(second.error, ValidationError)
            assert second.error.field == "rid"
            world.push("a", "hi")
            world.push("a", "!", LENGTH(3))
            assert (await first.end()).text == "hi!"
            assert world.is_empty()
            third = Client(world.manager, text="three", rid="a")
            world.requests.clear()
            await world.arrive("a")
            world.push("a", "again", LENGTH(5))
            assert (await third.end()).text == "again"

    run(work())


def test_of_a_hundred_racing_requests_of_one_rid_one_is_served(ring_name: str) -> None:
    """Retries of an impatient client come at the same moment."""

    async def work() -> None:
        async with World(ring_name) as world:
            clients = [Client(world.manager, text=f"number {i}", rid="a") for i in range(100)]
            await world.arrive("a")
            await world.settle()
            assert sum(client.is_done for client in clients) == 99
            world.push("a", "x", LENGTH(1))
            ends = [await client.end() for client in clients]
            assert [client.text for client in ends if client.error is None] == ["x"]
            assert all(isinstance(c.error, ValidationError) for c in ends if c.error is not None)
            assert world.is_empty()

    run(work())


def test_a_rid_is_free_the_moment_its_finish_is_read(ring_name: str) -> None:
    """A client that asks again at once, as retrying clients do, must not be refused."""

    async def work() -> None:
        async with World(ring_name) as world:
            for round_ in range(100):
                outputs = world.manager.generate(GenerateRequest(text="x", rid="a", stream=True))
                first = asyncio.ensure_future(anext(outputs))
                world.requests.clear()
                await world.arrive("a")
                if round_ % 3 == 0:
                    world.push("a", "y", LENGTH(1))
                elif round_ % 3 == 1:
                    world.port.push_error(world.requests["a"], "no")
                else:
                    world.manager.abort("a")
                await world.settle()
                await asyncio.wait([first])
                # it is not even left yet
                again = asyncio.ensure_future(
                    anext(world.manager.generate(GenerateRequest(text="x", rid="a", stream=True)))
                )
                world.requests.clear()
                await world.arrive("a")
                await outputs.aclose()  # must not take the other's place away
                world.push("a", "z", LENGTH(1))
                await world.settle()
                assert (await again).text == "z"
                with contextlib.suppress(ValidationError, DisconnectedError):
                    first.result()
            assert world.is_empty()

    run(work())


@pytest.mark.parametrize("way", ["abort", "leave"])
def test_a_request_aborted_while_it_is_tokenized_is_never_sent(ring_name: str, way: str) -> None:
    """It would run to its last token for nobody, and its abort would have come before it."""

    async def work() -> None:
        async with World(ring_name) as world:
            gate = Gate(world.manager)
            clients = [Client(world.manager, text="long", rid="a"), Client(world.manager, text="b", rid="b")]
            await gate.wait()
            if way == "abort":
                assert world.manager.abort("a") == 1
                assert world.manager.abort("a") == 0
            else:
                await clients[0].leave()
            # the rid is free at once
            third = Client(world.manager, input_ids=[1, 2], rid="a")
            await world.arrive("a")
            gate.open()
            await world.arrive("b")
            await clients[0].end()
            assert isinstance(
                clients[0].error, DisconnectedError if way == "abort" else asyncio.CancelledError
            )
            assert len(world.requests) == 2
            assert world.aborts == []
            world.push("b", "x", LENGTH(1))
            world.push("a", "y", LENGTH(1))
            assert (await clients[1].end()).text == "x"
            assert (await third.end()).text == "y"
            await world.settle()
            assert world.is_empty()

    run(work())


def test_a_batch_aborted_while_it_is_tokenized_is_never_sent(ring_name: str) -> None:
    """All of its children, by the name that the client gave."""

    async def work() -> None:
        async with World(ring_name) as world:
            gate = Gate(world.manager)
            client = Client(world.manager, text=["one", "two"], rid="a")
            await gate.wait()
            assert world.manager.abort("a") == 2
            gate.open()
            await client.end()
            await world.settle()
            assert world.requests == {}
            assert all(isinstance(piece.error, DisconnectedError) for piece in client.pieces)
            assert client.error is None or isinstance(client.error, DisconnectedError)
            assert world.is_empty()

    run(work())


@pytest.mark.parametrize("moment", ["queued", "streaming", "finished, not read", "ended", "twice"])
def test_an_abort_at_any_moment_gives_one_end(ring_name: str, moment: str) -> None:
    """An abort that crosses the finish: a KeyError there once took whole servers down."""

    async def work() -> None:
        async with World(ring_name) as world:
            outputs = world.manager.generate(GenerateRequest(text="x", rid="a", stream=True))
            first = asyncio.ensure_future(anext(outputs))
            await world.arrive("a")
            request_id = world.requests["a"]
            if moment == "queued":
                assert world.manager.abort("a") == 1
            elif moment in ("streaming", "twice"):
                world.push("a", "hi")
                await world.settle()
                assert world.manager.abort("a") == 1
                if moment == "twice":
                    assert world.manager.abort("a") == 0
            else:
                world.push("a", "hi", LENGTH(2))
                await world.settle()
                if moment == "ended":
                    assert (await first).text == "hi"
                    with pytest.raises(StopAsyncIteration):
                        await anext(outputs)
                assert world.manager.abort("a") == 0
            await world.settle()
            # its echo, late chunks, a second finish and an error: all no news
            world.push("a", "late")
            world.push("a", "", FinishReason.abort())
            world.port.push_error(request_id, "late")
            await world.settle()
            if moment in ("queued", "streaming", "twice"):
                assert world.aborts == [request_id]
                if moment != "queued":
                    assert (await first).text == "hi"
                    first = asyncio.ensure_future(anext(outputs))
                with pytest.raises(DisconnectedError, match="rid=a"):
                    await first
            elif moment == "finished, not read":
                assert (await first).finish_reason is not None
                assert world.aborts == []
                with pytest.raises(StopAsyncIteration):
                    await anext(outputs)
            await outputs.aclose()
            await world.settle()
            assert world.is_empty()

    run(work())


def test_aborts_of_nobody_do_nothing(ring_name: str) -> None:
    """An empty rid that matched every request would abort them all."""

    async def work() -> None:
        async with World(ring_name) as world:
            client = Client(world.manager, text="x", rid="a")
            await world.arrive("a")
            for rid in ("", "b", "A", "a_0"):
                assert world.manager.abort(rid) == 0
            world.push("a", "x", LENGTH(1))
            assert (await client.end()).text == "x"
            assert world.aborts == []

    run(work())


def test_the_scheduler_is_told_when_the_reader_leaves(ring_name: str) -> None:
    """Clients close their browsers; without an abort the engine works on for nobody."""

    async def work() -> None:
        async with World(ring_name) as world:
            client = Client(world.manager, text="x", rid="a")
            await world.arrive("a")
            world.push("a", "hi")
            await world.settle()
            assert client.text == "hi"
            await client.leave()
            await world.settle()
            assert world.aborts == [world.requests["a"]]
            assert world.is_empty()

    run(work())


def test_a_reader_that_leaves_in_the_middle_of_a_batch_aborts_the_rest(ring_name: str) -> None:
    """What has ended needs no abort; what runs does, all of it."""

    async def work() -> None:
        async with World(ring_name) as world:
            client = Client(world.manager, text=["x", "y", "z"], rid="a")
            await world.arrive("a_0", "a_1", "a_2")
            world.push("a_0", "done", LENGTH(4))
            world.push("a_1", "half")
            await world.settle()
            await client.leave()
            await world.settle()
            assert sorted(world.aborts) == sorted([world.requests["a_1"], world.requests["a_2"]])
            assert world.is_empty()

    run(work())


def test_samples_are_aborted_together_by_the_clients_name_and_alone_by_their_own(ring_name: str) -> None:
    """The client knows one request, whatever became of it here."""

    async def work() -> None:
        async with World(ring_name) as world:
            client = Client(world.manager, text="x", rid="a", sampling_params={"n": 4})
            await world.arrive("a_0", "a_1", "a_2", "a_3")
            assert world.manager.abort("a_2") == 1
            world.push("a_0", "zero", LENGTH(4))
            await world.settle()
            assert world.manager.abort("a") == 2
            await client.end()
            await world.settle()
            assert client.error is None
            ends = {piece.sample: piece.error for piece in client.pieces if piece.error is not None}
            assert set(ends) == {1, 2, 3}
            assert all(isinstance(error, DisconnectedError) for error in ends.values())
            assert "".join(piece.text for piece in client.pieces if piece.sample == 0) == "zero"
            assert sorted(world.aborts) == sorted(world.requests[f"a_{i}"] for i in (1, 2, 3))
            assert world.is_empty()

    run(work())


def test_one_bad_item_of_a_batch_ends_alone(ring_name: str) -> None:
    """The scheduler refuses one: its neighbours have their answers, and it has its own error."""

    async def work() -> None:
        async with World(ring_name) as world:
            client = Client(world.manager, text=["x", "y", "z"], rid=["a", "b", "c"], stream=False)
            await world.arrive("a", "b", "c")
            world.port.push_error(world.requests["b"], "invalid request: bad field")
            world.push("a", "one", LENGTH(3))
            world.push("c", "three", LENGTH(5))
            await client.end()
            assert client.error is None
            by_index = {piece.index: piece for piece in client.pieces}
            assert by_index[0].text == "one"
            assert by_index[2].text == "three"
            assert isinstance(by_index[1].error, ValidationError)
            assert by_index[1].error.status == 400
            assert world.is_empty()

    run(work())


def test_more_requests_than_the_bound_are_refused_whole(ring_name: str) -> None:
    """A bound that is passed by batches is none; half a batch admitted is half a batch lost."""

    async def work() -> None:
        async with World(ring_name, requests_max=3) as world:
            clients = [Client(world.manager, text="x", rid=rid) for rid in ("a", "b")]
            await world.arrive("a", "b")
            refused = await Client(world.manager, text=["x", "y"], rid=["c", "d"]).end()
            assert isinstance(refused.error, QueueFullError)
            assert refused.error.status == 503
            third = Client(world.manager, text="x", rid="c")
            await world.arrive("c")
            assert isinstance((await Client(world.manager, text="x").end()).error, QueueFullError)
            for rid in ("a", "b", "c"):
                world.push(rid, "y", LENGTH(1))
            for client in (*clients, third):
                assert (await client.end()).text == "y"
            again = Client(world.manager, text=["x"] * 3, rid=["a", "b", "e"])
            world.requests.clear()
            await world.arrive("a", "b", "e")
            await again.leave()
            await world.settle()
            assert world.is_empty()

    run(work())


INVALID: dict[str, dict[str, Any]] = {
    "top_p": {"text": "x", "sampling_params": {"top_p": 2.0}},
    "max_new_tokens": {"text": "x", "sampling_params": {"max_new_tokens": 8192}},
    "input_ids": {"input_ids": [1, 278]},
    "text": {"text": ""},
    "rid": {"text": "x", "rid": "r" * 129},
    "stop_token_ids": {"text": "x", "sampling_params": {"stop_token_ids": [278]}},
    "sampling_params": {"text": ["x", "y"], "sampling_params": [{}]},
    "token_ids_logprob": {"text": "x", "token_ids_logprob": [999999]},
    "top_logprobs_num": {"text": "x", "return_logprob": True, "top_logprobs_num": 279},
    "return_hidden_states": {"text": "x", "return_hidden_states": True},
    "n": {"text": "x", "sampling_params": {"n": 0}},
}


@pytest.mark.parametrize("field", INVALID)
def test_an_invalid_request_leaves_nothing_anywhere(ring_name: str, field: str) -> None:
    """A request refused is a request that never was: no state, no record, no round trip."""

    async def work() -> None:
        async with World(ring_name) as world:
            live = Client(world.manager, text="x", rid="live")
            await world.arrive("live")
            before = shmring.read_statistics(f"{ring_name}.ingress").producer.position
            for _ in range(200):
                client = await Client(world.manager, **INVALID[field]).end()
                assert isinstance(client.error, ValidationError)
                assert client.error.status == 400
                assert client.error.field == field
            assert shmring.read_statistics(f"{ring_name}.ingress").producer.position == before
            assert world.manager.in_flight_count == 1
            assert set(world.manager._rids) == {"live"}
            world.push("live", "x", LENGTH(1))
            assert (await live.end()).text == "x"
            assert world.is_empty()

    run(work())


def test_a_prompt_of_a_batch_that_is_too_long_ends_alone(ring_name: str) -> None:
    """Found out after tokenizing: its neighbours go on, and its own place is free again."""

    async def work() -> None:
        async with World(ring_name, context_length=32) as world:
            params = {"max_new_tokens": 4}
            client = Client(world.manager, text=["short", "x" * 40], rid=["a", "b"], sampling_params=params)
            await world.arrive("a")
            world.push("a", "y", LENGTH(1))
            await client.end()
            assert {piece.index: type(piece.error) for piece in client.pieces} == {
                0: type(None),
                1: ValidationError,
            }
            await world.settle()
            assert world.is_empty()
            assert set(world.requests) == {"a"}

    run(work())


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, ValidationError), (422, ValidationError), (499, DisconnectedError), (503, UnavailableError),
     (500, InternalError), (599, InternalError)],
)  # fmt: skip
def test_an_abort_with_a_status_is_an_error_behind_its_text(ring_name: str, status: int, kind: type) -> None:
    """It must never pass for a good end, and what came before it is the client's."""

    async def work() -> None:
        async with World(ring_name) as world:
            client = Client(world.manager, text="x", rid="a", sampling_params={"stop": ["END"]})
            await world.arrive("a")
            world.push("a", "x E")
            world.push("a", "N", FinishReason.abort("out of memory", status_code=status))
            await client.end()
            assert type(client.error) is kind
            assert str(client.error) == "out of memory"
            assert client.text == "x EN"
            await world.settle()
            assert world.is_empty()

    run(work())


def test_an_abort_without_a_status_is_an_ordinary_end(ring_name: str) -> None:
    """The scheduler's own way to say that it stopped here."""

    async def work() -> None:
        async with World(ring_name) as world:
            client = Client(world.manager, text="x", rid="a")
            await world.arrive("a")
            world.push("a", "half", FinishReason.abort())
            assert (await client.end()).error is None
            assert client.text == "half"
            assert client.reason == {"type": "abort"}

    run(work())


def test_a_reader_that_does_not_read_finds_all_of_it_later(ring_name: str) -> None:
    """A slow client costs its own text and no more, and holds nobody up."""

    async def work() -> None:
        async with World(ring_name) as world:
            outputs = world.manager.generate(GenerateRequest(text="x", rid="slow", stream=True))
            first = asyncio.ensure_future(anext(outputs))
            quick = Client(world.manager, text="x", rid="quick")
            await world.arrive("slow", "quick")
            world.push("slow", "0")
            await world.settle()
            assert (await first).text == "0"
            for i in range(1, 500):
                world.push("slow", f" {i}")
                world.push("quick", "q")
                if i % 20 == 0:
                    await world.settle()
            world.push("quick", "", LENGTH(499))
            assert len((await quick.end()).text) == 499
            world.push("slow", "", LENGTH(9))
            await world.settle()
            rest = [output async for output in outputs]
            assert len(rest) == 1
            assert rest[0].text == "".join(f" {i}" for i in range(1, 500))
            assert rest[0].finish_reason is not None

    run(work())


def test_a_stop_string_found_by_a_worker_stops_the_scheduler(ring_name: str) -> None:
    """The scheduler knows nothing of stop strings: without a word it goes on to its limit."""

    async def work() -> None:
        async with World(ring_name) as world:
            client = Client(world.manager, text="x", rid="a", sampling_params={"stop": ["STOP"]})
            await world.arrive("a")
            for piece in ("one S", "TO", "P two", " three"):
                world.push("a", piece)
            await client.end()
            await world.settle()
            assert client.text == "one "
            assert client.reason == {"type": "stop", "matched": "STOP"}
            assert world.aborts == [world.requests["a"]]
            assert world.is_empty()

    run(work())


def test_a_reply_that_cannot_be_read_leaves_nothing_in_the_worker(ring_name: str) -> None:
    """The worker takes its reply for read: without a word it keeps the request for ever."""

    async def work() -> None:
        async with World(ring_name, workers=1) as world:
            client = Client(world.manager, text="x", rid="a")
            await world.arrive("a")
            world.push("a", "hi")
            await world.settle()
            assert messages.TEXT.push(
                world._shards[0]._reply,
                1,
                np.array([world.requests["a"]], np.uint64),
                *messages.pack_bytes([b"\xff"]),
                np.zeros(1, np.uint32),
                np.empty(0, np.int32),
                np.zeros(1, np.uint32),
                np.zeros(1, np.uint8),
                None,
                None,
                None,
            )
            await client.end()
            assert client.text == "hi"
            assert isinstance(client.error, InternalError)
            await world.settle()
            assert world.aborts == [world.requests["a"]]
            assert world.is_empty()

    run(work())


def test_output_of_nobody_is_stopped_once(ring_name: str) -> None:
    """A scheduler that goes on with what nobody knows is told, and not once a chunk."""

    async def work() -> None:
        async with World(ring_name) as world:
            for _ in range(50):
                world.port.push_batch([12345], [1], [97])
                await world.settle()
            assert world.aborts == [12345]
            assert world.is_empty()

    run(work())


def test_a_full_ingress_ring_refuses_and_recovers(ring_name: str) -> None:
    """Overload is an answer of 503 now, not a queue without end; and it passes."""

    async def work() -> None:
        async with World(ring_name, context_length=512, ingress_capacity_bytes=8192) as world:
            clients: list[Client] = []
            while not any(client.is_done for client in clients):
                clients.append(Client(world.manager, text="word " * 10, rid=f"r{len(clients)}"))
                await asyncio.sleep(0.002)
                assert len(clients) < 1000
            sent = [client for client in clients if not client.is_done]
            for client in clients:
                if client.is_done:
                    assert isinstance(client.error, QueueFullError)
            assert len(sent) > 5
            # their readers go: more aborts than the ring has room for
            for client in sent:
                await client.leave()
            await world.settle()
            assert sorted(world.aborts) == sorted(world.requests.values())
            assert len(world.aborts) == len(sent)
            assert world.is_empty()
            again = Client(world.manager, text="x", rid="again")
            await world.arrive("again")
            world.push("again", "y", LENGTH(1))
            assert (await again.end()).text == "y"

    run(work())


def test_a_request_that_no_ring_can_hold_is_a_bad_request(ring_name: str) -> None:
    """A client that is told to try again later would try for ever."""

    async def work() -> None:
        async with World(ring_name, context_length=512, ingress_capacity_bytes=8192) as world:
            client = Client(world.manager, text="x", rid="a", sampling_params={"json_schema": "{" * 9000})
            assert isinstance((await client.end()).error, ValidationError)
            await world.settle()
            assert world.is_empty()

    run(work())


def test_closing_ends_requests_at_every_stage(ring_name: str) -> None:
    """A caller that waits for a request when the server ends must hear of it, as an error it knows."""

    async def work() -> None:
        async with World(ring_name) as world:
            streaming = Client(world.manager, text="x", rid="streaming")
            await world.arrive("streaming")
            world.push("streaming", "hi")
            await world.settle()
            gate = Gate(world.manager)
            # more than there are threads: some have not begun
            tokenizing = [Client(world.manager, text="x", rid=f"tokenizing-{i}") for i in range(6)]
            await gate.wait()
            closing = asyncio.create_task(world.manager.close())
            await asyncio.sleep(0.01)
            gate.open()
            await closing
            assert isinstance((await streaming.end()).error, DisconnectedError)
            assert streaming.text == "hi"
            for client in tokenizing:
                assert isinstance((await client.end()).error, (UnavailableError, DisconnectedError))
            late = await Client(world.manager, text="x").end()
            assert isinstance(late.error, UnavailableError)
            assert world.manager.in_flight_count == 0

    run(work())


def test_closing_twice_at_once_waits_for_the_end_both_times(ring_name: str) -> None:
    """Whoever awaits close() may tear down what the manager uses: it must be closed by then."""

    async def work() -> None:
        world = World(ring_name)
        async with world:
            first = asyncio.create_task(world.manager.close())
            await asyncio.sleep(0)
            await world.manager.close()
            assert shmring_names(ring_name) == []
            await first

    run(work())


def shmring_names(name: str) -> list[str]:
    return [info.name for info in shmring.list_rings() if info.name.startswith(name)]


def test_a_close_that_is_cancelled_leaves_nothing_all_the_same(
    ring_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C, or a time-out around the shutdown, is when clean-up matters most."""

    async def work() -> None:
        async with World(ring_name) as world:
            started, go_on = threading.Event(), threading.Event()

            def stop_slowly(_self: Supervisor, _timeout_s: float) -> None:
                started.set()
                assert go_on.wait(20)

            monkeypatch.setattr(Supervisor, "stop", stop_slowly)
            closing = asyncio.create_task(world.manager.close())
            while not started.is_set():
                await asyncio.sleep(0.001)
            closing.cancel()
            await asyncio.sleep(0.01)
            go_on.set()
            with contextlib.suppress(asyncio.CancelledError):
                await closing
            await world.manager.close()
            assert shmring_names(ring_name) == []

    run(work())


def test_waiting_for_parts_ends_when_the_manager_is_closed(ring_name: str) -> None:
    """A start-up that waits for a scheduler, and is told to stop, must stop."""

    async def work() -> None:
        manager = TokenizerManager(Settings(name=ring_name, tokenizer=TOKENIZER), start_workers=False)
        await manager.start()
        waiting = asyncio.create_task(manager.wait_until_ready())
        await asyncio.sleep(0.02)
        await manager.close()
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(waiting, 5)

    run(work())


@pytest.mark.parametrize("place", ["supervisor", "waiter", "ends"])
def test_a_start_that_fails_leaves_nothing(
    ring_name: str, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Out of processes or of threads: the names would be in use until the caller ends."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    async def work() -> None:
        if place == "supervisor":
            monkeypatch.setattr(Supervisor, "start", fail)
        elif place == "waiter":
            monkeypatch.setattr("manager.tokenizer_manager.AsyncWaiter", fail)
        else:
            monkeypatch.setattr(TokenizerManager, "_take_ends", fail)
        manager = TokenizerManager(Settings(name=ring_name, tokenizer=TOKENIZER))
        with pytest.raises(OSError, match="Resource"):
            async with manager:
                pytest.fail("it did not start")
        assert shmring_names(ring_name) == []
        await manager.close()

    run(work())


def test_a_start_that_cannot_be_is_told_and_leaves_nothing(ring_name: str) -> None:
    """Two deployments of one name; a vocabulary that is smaller than the tokenizer's."""

    async def work() -> None:
        async with World(ring_name):
            with pytest.raises(ConfigError, match="in use") as caught:
                await TokenizerManager(Settings(name=ring_name, tokenizer=TOKENIZER)).start()
            assert caught.value.setting == "name"
            with pytest.raises(ConfigError, match="tokenizer=278") as caught:
                await TokenizerManager(
                    Settings(name=f"{ring_name}.2", tokenizer=TOKENIZER, vocab_size=277)
                ).start()
            assert caught.value.setting == "vocab_size"
        assert shmring_names(ring_name) == []

    run(work())


def test_without_parts_a_request_is_unavailable(ring_name: str) -> None:
    """Nobody is there to serve it, so it must not wait."""

    async def work() -> None:
        manager = TokenizerManager(Settings(name=ring_name, tokenizer=TOKENIZER), start_workers=False)
        async with manager:
            assert manager.missing_parts() == ["scheduler", "worker 0"]
            assert not await manager.wait_until_ready(0.05)
            client = await Client(manager, text="x", rid="a").end()
            assert isinstance(client.error, UnavailableError)
            assert "part=scheduler" in str(client.error)
            assert manager.in_flight_count == 0

    run(work())


def test_before_the_start_and_after_the_end_no_part_is_there(ring_name: str) -> None:
    """A server is asked for its health while it starts, and while it ends."""

    def is_told_so(manager: TokenizerManager) -> bool:
        parts = ["scheduler", "worker 0", "worker 1"]
        health = manager.health()
        return manager.missing_parts() == list(health) == parts and not any(
            part.is_healthy or part.pulse_age_s is not None for part in health.values()
        )

    async def work() -> None:
        manager = TokenizerManager(Settings(name=ring_name, tokenizer=TOKENIZER, workers=2), engine="echo")
        assert is_told_so(manager)
        with pytest.raises(UnavailableError, match="state=new"):
            await manager.wait_until_ready(0)
        async with manager:
            await manager.wait_until_ready()
            assert manager.missing_parts() == []
            assert all(part.is_healthy for part in manager.health().values())
        assert is_told_so(manager)

    run(work())


def test_a_batch_of_four_thousand_costs_what_its_requests_cost(ring_name: str) -> None:
    """A wait over all of a batch for each of its pieces is quadratic: minutes for the largest."""

    async def work() -> None:
        count = 4000
        async with World(ring_name, egress_capacity_bytes=1 << 20) as world:
            client = Client(world.manager, input_ids=[[1, 2]] * count, rid="a")
            await world.arrive(f"a_{count - 1}")
            ids = [world.requests[f"a_{i}"] for i in range(count)]
            # one at a time: each piece wakes the batch
            for position, request_id in enumerate(ids):
                world.port.push_batch([request_id], [1], [97], [FinishCode.LENGTH], [1])
                if position % 40 == 0:
                    await world.settle()
            await client.end()
            assert sorted(piece.index for piece in client.pieces) == list(range(count))
            assert world.is_empty()

    run(work())


def test_ids_are_never_used_twice(ring_name: str) -> None:
    """A late chunk of an old request would be the text of a new one."""

    async def work() -> None:
        async with World(ring_name) as world:
            seen: set[int] = set()
            for i in range(50):
                client = Client(world.manager, text="x", rid=f"r{i}")
                await world.arrive(f"r{i}")
                assert world.requests[f"r{i}"] not in seen
                seen.add(world.requests[f"r{i}"])
                if i % 2:
                    await client.leave()
                else:
                    world.push(f"r{i}", "x", LENGTH(1))
                    await client.end()
            assert np.array(sorted(seen)).min() >= 1

    run(work())


@pytest.mark.parametrize("task", ["_look_at_parts", "do_work"])
def test_a_task_of_the_manager_that_fails_leaves_nobody_waiting(
    ring_name: str, task: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it was: a server that hangs is worse than one that says so."""

    async def work() -> None:
        async with World(ring_name, check_interval_s=0.01) as world:
            client = Client(world.manager, text="hello", rid="a")
            await world.arrive("a")

            def fail(*_: object) -> None:
                raise RuntimeError("of this test")

            if task == "do_work":
                monkeypatch.setattr(Inbox, "do_work", fail)
                world.push("a", "wor")
            else:
                monkeypatch.setattr(world.manager, task, fail)
            await client.end()
            assert isinstance(client.error, InternalError)
            assert "of this test" in str(client.error)
            if task == "_look_at_parts":  # of every shard: nobody would notice a death
                again = await Client(world.manager, text="hello").end()
                assert "of this test" in str(again.error)

    run(work())
    assert "of this test" in caplog.text


def test_a_manager_is_started_once(ring_name: str) -> None:
    async def work() -> None:
        async with World(ring_name) as world:
            with pytest.raises(RuntimeError, match="started once: state=running"):
                await world.manager.start()
            manager = world.manager
        with pytest.raises(RuntimeError, match="started once: state="):
            await manager.start()

    run(work())


def test_what_is_no_request_is_named(ring_name: str) -> None:
    async def work() -> None:
        async with World(ring_name) as world:
            with pytest.raises(TypeError, match="generate takes a GenerateRequest: type=dict"):
                await anext(world.manager.generate({"text": "a"}))

    run(work())
