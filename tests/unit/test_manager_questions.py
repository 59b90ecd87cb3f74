"""What is asked of a manager beside generation: ids of a text, text of ids, words with the scheduler."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from manager_world import LENGTH, TOKENIZER, Client, World, run
from tokenizers import Tokenizer

import shmring
from manager import (
    DisconnectedError,
    InternalError,
    PartLostError,
    QueueFullError,
    UnavailableError,
    ValidationError,
)
from manager.deployment import register_name
from manager.questions import Questions

#: Special: what ends a text.
EOS = 272


def test_ids_come_back_as_text_and_the_scheduler_hears_nothing(ring_name: str) -> None:
    """Whoever has ids and wants their text needs no engine for it."""

    async def work() -> None:
        async with World(ring_name) as world:
            manager = world.manager
            ids = [*"grüße, 世界".encode(), EOS]
            texts = await asyncio.gather(
                *(manager.detokenize(ids) for _ in range(10)),
                manager.detokenize(np.array(ids)),
                manager.detokenize([]),
                manager.detokenize([104, 2**31 - 1, 105]),  # what no vocabulary has adds nothing
            )
            assert texts == ["grüße, 世界"] * 11 + ["", "hi"]
            shown = await manager.detokenize(ids, skip_special_tokens=False)
            assert shown == Tokenizer.from_file(str(TOKENIZER)).decode(ids, skip_special_tokens=False)
            await world.settle()
            assert world.requests == {}
            assert world.aborts == []
            assert world.is_empty()

    run(work())


@pytest.mark.parametrize(
    ("token_ids", "field", "options"),
    [
        ([1, -1], "token_ids", {}),
        ([1, 2**31], "token_ids", {}),
        ([1, True], "token_ids", {}),
        ([[1]], "token_ids", {}),
        ("12", "token_ids", {}),
        (None, "token_ids", {}),
        ([1], "skip_special_tokens", {"skip_special_tokens": 1}),
        ([1], "spaces_between_special_tokens", {"spaces_between_special_tokens": None}),
        ([1] * 300_000, "token_ids", {}),
    ],
)
def test_what_are_no_ids_is_refused_before_a_worker_hears_of_it(
    ring_name: str, token_ids: Any, field: str, options: dict[str, Any]
) -> None:
    """A negative id that is cast is another id, and its text somebody else's."""

    async def work() -> None:
        async with World(ring_name) as world:
            before = shmring.read_statistics(register_name(ring_name, 0)).producer.records
            with pytest.raises(ValidationError) as caught:
                await world.manager.detokenize(token_ids, **options)
            assert caught.value.field == field
            assert shmring.read_statistics(register_name(ring_name, 0)).producer.records == before
            assert len(world.manager._decodes) == 0

    run(work())


def test_texts_become_the_ids_of_prompts(ring_name: str) -> None:
    """Counted outside with another tokenizer, a prompt is too long when it arrives."""

    async def work() -> None:
        async with World(ring_name) as world:
            ids = await world.manager.tokenize("hello")
            client = Client(world.manager, text="hello", rid="a")
            await world.arrive("a")
            world.push("a", "x", LENGTH(1))
            await client.end()
            assert len(ids) == client.pieces[-1].prompt_tokens == 3
            assert await world.manager.detokenize(ids) == "hello"
            assert await world.manager.tokenize("") == []
            for text in (None, b"bytes", "x" * 1_000_000, "\ud800"):
                with pytest.raises(ValidationError) as caught:
                    await world.manager.tokenize(text)  # type: ignore[arg-type]
                assert caught.value.field == "text"

    run(work())


def test_without_a_tokenizer_both_are_refused(ring_name: str) -> None:
    """An empty answer would look like one."""

    async def work() -> None:
        async with World(ring_name, has_tokenizer=False, vocab_size=100) as world:
            with pytest.raises(ValidationError, match="token_ids needs a tokenizer"):
                await world.manager.detokenize([1])
            with pytest.raises(ValidationError, match="text needs a tokenizer"):
                await world.manager.tokenize("a")

    run(work())


def test_a_full_register_ring_refuses_both_or_takes_both(ring_name: str) -> None:
    """Half of it, a registration that nothing follows, would stay in the worker for good."""

    async def work() -> None:
        async with World(ring_name, register_capacity_bytes=4096, workers=1) as world:
            manager = world.manager
            world.is_paused = True
            asked = [asyncio.create_task(manager.detokenize([97] * 130)) for _ in range(40)]
            done, waiting = await asyncio.wait(asked, timeout=0.2)
            assert done
            assert waiting
            for task in done:
                assert isinstance(task.exception(), QueueFullError)
            world.is_paused = False
            assert await asyncio.gather(*waiting) == ["a" * 130] * len(waiting)
            assert await manager.detokenize([97, 98]) == "ab"
            assert world.is_empty()

    run(work())


def test_every_length_that_is_let_in_passes_at_every_place_of_the_ring(ring_name: str) -> None:
    """One that fits by its length and never by its place would be told "full" for ever."""

    async def work() -> None:
        async with World(ring_name, register_capacity_bytes=4096, workers=1) as world:
            with pytest.raises(ValidationError, match="max=") as caught:
                await world.manager.detokenize([97] * 10_000)
            longest = int(str(caught.value).rsplit("=", 1)[1])
            assert longest > 100
            for count in [longest] * 20 + list(range(longest - 20, longest + 1)):
                assert await world.manager.detokenize([97] * count) == "a" * count
            with pytest.raises(ValidationError, match="max="):
                await world.manager.detokenize([97] * (longest + 1))

    run(work())


def test_an_answer_that_does_not_come_in_time_is_unavailable_and_comes_to_nobody(ring_name: str) -> None:
    """A stopped worker must not hold its callers for ever, and what it says later is no news."""

    async def work() -> None:
        async with World(ring_name) as world:
            world.is_paused = True
            with pytest.raises(UnavailableError, match=r"worker \d did not answer"):
                await world.manager.detokenize([97], timeout_s=0.01)
            cancelled = asyncio.create_task(world.manager.detokenize([97]))
            await asyncio.sleep(0.01)
            cancelled.cancel()
            await asyncio.wait([cancelled])
            with pytest.raises(UnavailableError, match="scheduler did not answer"):
                await world.manager.ask_scheduler(b"?", timeout_s=0.01)
            world.is_paused = False
            await world.settle()
            assert len(world.manager._decodes) == len(world.manager._controls) == 0
            assert world.is_empty()

    run(work())


def test_closing_ends_what_was_asked(ring_name: str) -> None:
    """Whoever waits for an answer must not wait for its whole time when nobody is there any more."""

    async def work() -> None:
        async with World(ring_name) as world:
            world.is_paused = True
            asked = [
                asyncio.create_task(world.manager.detokenize([97], timeout_s=None)),
                asyncio.create_task(world.manager.ask_scheduler(b"?", timeout_s=None)),
            ]
            await asyncio.sleep(0.01)
            await world.manager.close()
            await asyncio.wait(asked, timeout=2)
            assert all(isinstance(task.exception(), DisconnectedError) for task in asked)
            with pytest.raises(UnavailableError, match="not running"):
                await world.manager.detokenize([97])
            with pytest.raises(UnavailableError, match="not running"):
                await world.manager.tokenize("a")

    run(work())


def test_a_broken_shard_ends_its_questions(ring_name: str) -> None:
    """Nothing can come from it any more."""

    async def work() -> None:
        async with World(ring_name, workers=1) as world:
            world.is_paused = True
            asked = asyncio.create_task(world.manager.detokenize([97]))
            await asyncio.sleep(0.01)
            world.manager._break(0, "on trial")
            await asyncio.wait([asked], timeout=2)
            assert isinstance(asked.exception(), InternalError)
            with pytest.raises(InternalError, match="on trial"):
                await world.manager.detokenize([97])

    run(work())


def test_an_answer_that_cannot_be_read_is_an_error_of_whoever_asked(ring_name: str) -> None:
    """The scheduler is not told to stop what it never heard of."""

    async def work() -> None:
        async with World(ring_name, workers=1) as world:
            world.is_paused = True
            asked = asyncio.create_task(world.manager.detokenize([97]))
            await asyncio.sleep(0.01)
            (request_id,) = world.manager._decodes.put_to("worker 0")
            world.manager.on_abort_asked(request_id)
            world.manager.on_fail(request_id, InternalError("unreadable"))
            await asyncio.wait([asked], timeout=2)
            assert isinstance(asked.exception(), InternalError)
            world.is_paused = False
            await world.settle()
            assert world.aborts == []
            assert world.is_empty()

    run(work())


def test_a_question_that_no_ring_holds_is_refused_by_name(ring_name: str) -> None:
    """To the byte; an error of the ring would not say which ring, nor whose fault it is."""

    async def work() -> None:
        async with World(ring_name, ingress_capacity_bytes=8192, context_length=1000) as world:

            async def ask(payload: Any, timeout_s: Any = 0.01) -> None:
                await world.manager.ask_scheduler(payload, timeout_s)

            with pytest.raises(ValidationError, match="payload does not fit the ingress ring") as caught:
                await ask(bytes(10_000))
            assert caught.value.field == "payload"
            longest = int(str(caught.value).rsplit("=", 1)[1])
            with pytest.raises(UnavailableError, match="did not answer"):
                await ask(bytes(longest))
            world.drain()
            with pytest.raises(ValidationError, match=f"length={longest + 1}, max={longest}"):
                await ask(bytes(longest + 1))
            with pytest.raises(TypeError, match="payload is bytes: type=str"):
                await ask("text")

    run(work())


@pytest.mark.parametrize(
    ("timeout", "kind"), [(float("nan"), ValueError), (-1, ValueError), (True, TypeError), ("1", TypeError)]
)
def test_what_is_no_timeout_is_refused_at_every_call(ring_name: str, timeout: Any, kind: type) -> None:
    """In the event loop's own tables NaN would upset everybody's timers."""

    async def work() -> None:
        async with World(ring_name) as world:
            manager = world.manager
            for waiting in (
                manager.ask_scheduler(b"?", timeout),
                manager.detokenize([97], timeout_s=timeout),
                manager.probe(timeout),
                manager.wait_until_ready(timeout),
            ):
                with pytest.raises(kind, match="timeout_s"):
                    await waiting
            assert await manager.detokenize([97], timeout_s=np.float32(3)) == "a"  # type: ignore[arg-type]
            assert await manager.detokenize([97], timeout_s=float("inf")) == "a"
            assert await manager.wait_until_ready(np.int64(1))  # type: ignore[arg-type]

    run(work())


def test_questions_end_once_and_are_bounded() -> None:
    """Too many that wait are refused; a late or second answer changes nothing."""

    async def work() -> None:
        questions = Questions[str](2)
        asked = [asyncio.create_task(questions.ask(i, f"part {i}", lambda: None, None)) for i in (1, 2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="max=2"):
            await questions.ask(3, "part 3", lambda: None, None)
        questions.answer(3, "nobody waits")
        questions.answer(1, "a", is_last=False)
        questions.answer(1, "b")
        questions.answer(1, "c")
        questions.fail(1, InternalError("late"))
        assert questions.put_to("part 2") == [2]
        questions.fail(2, PartLostError("gone", part="part 2"))
        assert await asked[0] == ["a", "b"]
        with pytest.raises(PartLostError):
            await asked[1]
        assert len(questions) == 0

        def refuse() -> None:
            raise QueueFullError("no room")

        with pytest.raises(QueueFullError, match="no room"):
            await questions.ask(4, "part", refuse, None)
        assert len(questions) == 0

    run(work())
