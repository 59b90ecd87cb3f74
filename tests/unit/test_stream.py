"""The output of one request: one end, nothing lost, nothing piled up."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from manager.errors import DisconnectedError, InternalError, ManagerError
from manager.extras import Extras, Logprobs
from manager.finish import FinishReason
from manager.lifecycle import Event, IllegalTransitionError, State
from manager.request import GenerateRequest, fan_out
from manager.stream import RequestStream

if TYPE_CHECKING:
    from collections.abc import Coroutine

END = FinishReason.length(3)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 10))


def sent(*, stream: bool = True) -> RequestStream:
    """A request that is with the scheduler."""
    (single,) = fan_out(GenerateRequest(input_ids=[1], stream=stream))
    made = RequestStream(1, 0, single)
    for event in (
        Event.VALIDATED,
        Event.NEEDS_NORMALIZE,
        Event.ALREADY_TOKENIZED,
        Event.PRE_SEND_VALIDATED,
    ):
        made.move(event)
    return made


async def everything(stream: RequestStream) -> tuple[str, list[int], FinishReason | ManagerError]:
    """Read to the end."""
    text, ids = "", []
    while True:
        try:
            delta = await stream.take()
        except ManagerError as error:
            return text, ids, error
        text += delta.text
        ids += delta.token_ids
        if delta.finish_reason is not None:
            return text, ids, delta.finish_reason


def test_deltas_come_as_they_are_and_then_the_end() -> None:
    """A client that streams sees each piece once."""

    async def work() -> None:
        stream = sent()
        for piece, count in (("a", 1), ("b", 2)):
            stream.add(piece, [ord(piece)], 1, None)
            delta = await stream.take()
            assert (delta.text, delta.completion_count, delta.finish_reason) == (piece, count, None)
        stream.add("", [], 1, END)
        delta = await stream.take()
        assert (delta.text, delta.token_ids, delta.completion_count, delta.finish_reason) == ("", [], 3, END)
        assert stream.state is State.COMPLETED

    run(work())


def test_extras_wait_for_the_chunk_that_they_belong_to() -> None:
    """A reader that comes in between must not see the log probability of a token that it has not."""

    async def work() -> None:
        stream = sent()
        stream.add("a", [97], 1, None)
        stream.stage(Extras(Logprobs(output=[(-1.0, 98, None)]), []))
        first = await stream.take()
        assert (first.text, first.logprobs, first.hidden_states) == ("a", None, None)
        stream.add("b", [98], 1, END)
        second = await stream.take()
        assert (second.text, second.logprobs) == ("b", Logprobs(output=[(-1.0, 98, None)]))

    run(work())


def test_what_is_not_taken_is_merged() -> None:
    """A reader that falls behind costs no more than its text, however many pieces it came in."""

    async def work() -> None:
        stream = sent()
        for i in range(1000):
            stream.add(str(i), [i], 1, None)
        delta = await stream.take()
        assert delta.text == "".join(map(str, range(1000)))
        assert delta.token_ids == list(range(1000))
        assert delta.completion_count == 1000

    run(work())


def test_without_stream_nothing_comes_before_the_end() -> None:
    """A client that wants one answer is woken once."""

    async def work() -> None:
        stream = sent(stream=False)
        taking = asyncio.create_task(stream.take())
        for _ in range(5):
            stream.add("x", [1], 1, None)
            await asyncio.sleep(0)
            assert not taking.done()
        stream.add("y", [], 0, END)
        delta = await taking
        assert (delta.text, delta.completion_count, delta.finish_reason) == ("xxxxxy", 5, END)

    run(work())


@pytest.mark.parametrize("first", ["finish", "error"])
@pytest.mark.parametrize("is_taken", [True, False])
def test_the_first_end_counts_and_later_ones_are_no_news(first: str, is_taken: bool) -> None:
    """A finish that crosses an abort: one of them, whichever came first, and never both."""

    async def work() -> None:
        stream = sent()
        stream.add("a", [1], 1, None)
        if first == "finish":
            stream.add("b", [2], 1, END)
        else:
            assert stream.fail(DisconnectedError("first"))
        if is_taken:
            ends = [await everything(stream)]
        stream.add("late", [9], 1, END)
        stream.add("late", [9], 1, None)
        assert not stream.fail(InternalError("second"))
        if not is_taken:
            ends = [await everything(stream)]
        text, ids, end = ends[0]
        if first == "finish":
            assert (text, ids, end) == ("ab", [1, 2], END)
        else:
            assert (text, ids, str(end)) == ("a", [1], "first")
        assert stream.is_ended

    run(work())


def test_an_error_comes_behind_the_text_before_it_and_comes_again() -> None:
    """What the client was given it keeps; who asks once more is told the same."""

    async def work() -> None:
        stream = sent()
        stream.add("half", [1], 1, None)
        stream.fail(InternalError("broken"))
        assert (await stream.take()).text == "half"
        with pytest.raises(InternalError, match="broken"):
            await stream.take()

    run(work())


def test_an_error_before_anything_was_sent() -> None:
    """A request that fails its checks has no text and one error."""

    async def work() -> None:
        (single,) = fan_out(GenerateRequest(input_ids=[1]))
        stream = RequestStream(1, 0, single)
        stream.fail(InternalError("broken"))
        assert (await everything(stream))[:2] == ("", [])
        assert stream.state is State.FAILED

    run(work())


def test_a_chunk_before_the_request_was_sent_is_impossible() -> None:
    """It is another's, or a fault of ours: it must not become this one's text."""

    async def work() -> None:
        (single,) = fan_out(GenerateRequest(input_ids=[1]))
        stream = RequestStream(1, 0, single)
        with pytest.raises(IllegalTransitionError):
            stream.add("x", [1], 1, None)
        stream.fail(InternalError("broken"))
        assert (await everything(stream))[:2] == ("", [])

    run(work())


def test_a_taker_that_is_cancelled_takes_nothing() -> None:
    """A time-out around one read must not cost the text that came meanwhile."""

    async def work() -> None:
        stream = sent()
        taking = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        stream.add("x", [1], 1, None)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        stream.add("y", [2], 0, END)
        assert (await everything(stream))[0] == "xy"

    run(work())
