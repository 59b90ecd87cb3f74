"""What a reader gets: pieces with what is new, or with all of it so far."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from manager_world import LENGTH, Client, World, run

from manager.errors import InternalError, ValidationError
from manager.extras import Extras, Logprob, Logprobs
from manager.finish import FinishReason
from manager.lifecycle import Event
from manager.output import merged_outputs, outputs_of
from manager.request import GenerateRequest, fan_out
from manager.stream import RequestStream

if TYPE_CHECKING:
    from manager.output import GenerateOutput

END = FinishReason.length(3)


def sent(count: int = 1, **request: Any) -> list[RequestStream]:
    """Requests that are with the scheduler."""
    wanted = GenerateRequest(input_ids=[[1]] * count, stream=True, **request)
    streams = [RequestStream(number, 0, single) for number, single in enumerate(fan_out(wanted))]
    for stream in streams:
        for event in (
            Event.VALIDATED,
            Event.NEEDS_NORMALIZE,
            Event.ALREADY_TOKENIZED,
            Event.PRE_SEND_VALIDATED,
        ):
            stream.move(event)
    return streams


def test_accumulated_pieces_hold_everything_so_far() -> None:
    """A client that shows the last piece it got must not lose the ones before."""

    async def work() -> None:
        (stream,) = sent(accumulated=True)
        seen: list[GenerateOutput] = []
        outputs = outputs_of(stream)
        for text, ids, reason in (("a", [1], None), ("", [2], None), ("bc", [3, 4], None), ("d", [5], END)):
            stream.add(text, ids, len(ids), reason)
            seen.append(await anext(outputs))
        assert [piece.text for piece in seen] == ["a", "a", "abc", "abcd"]
        assert [piece.output_ids for piece in seen] == [[1], [1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5]]
        assert [piece.completion_tokens for piece in seen] == [1, 2, 4, 5]
        assert [piece.finish_reason for piece in seen] == [None, None, None, END]
        assert [piece async for piece in outputs] == []

    run(work())


def test_a_slow_reader_gets_one_piece_with_everything() -> None:
    """What it has not taken costs nothing, and is not there twice."""

    async def work() -> None:
        (stream,) = sent(accumulated=True)
        outputs = outputs_of(stream)
        stream.add("first ", [1], 1, None)
        assert (await anext(outputs)).text == "first "
        for number in range(1000):
            stream.add("x", [number], 1, None)
        stream.add("", [], 0, END)
        (piece,) = [piece async for piece in outputs]
        assert piece.text == "first " + "x" * 1000
        assert piece.output_ids == [1, *range(1000)]

    run(work())


def test_accumulated_log_probabilities_belong_to_all_ids() -> None:
    """One for each id of the piece, those of the prompt in each, and the hidden states that are newest."""

    def entry(token_id: int) -> Logprob:
        return (-1.0, token_id, None)

    async def work() -> None:
        (stream,) = sent(accumulated=True)
        outputs = outputs_of(stream)
        seen = []
        for number in (7, 8, 9):
            first = number == 7
            stream.stage(
                Extras(
                    Logprobs(
                        output=[entry(number)],
                        input=[entry(1)] if first else [],
                        output_top=[None if first else [entry(number), entry(5)]],
                    ),
                    [np.array([number], np.float32)] if number < 9 else [],
                )
            )
            stream.add("x", [number], 1, END if number == 9 else None)
            seen.append(await anext(outputs))
        for count, piece in enumerate(seen, start=1):
            assert piece.logprobs is not None
            assert piece.logprobs.output == [entry(number) for number in (7, 8, 9)[:count]]
            assert [token_id for _, token_id, _ in piece.logprobs.output] == piece.output_ids
            assert piece.logprobs.input == [entry(1)]
            assert len(piece.logprobs.output_top) == count
        states = [piece.hidden_states for piece in seen]
        assert [[row.tolist() for row in each or []] for each in states] == [[[7.0]], [[8.0]], [[8.0]]]

    run(work())


def test_a_piece_is_its_readers_own() -> None:
    """Whoever keeps or changes a piece must not find it, or the next one, changed."""

    async def work() -> None:
        (stream,) = sent(accumulated=True)
        outputs = outputs_of(stream)
        stream.stage(Extras(Logprobs(output=[(-1.0, 1, None)]), []))
        stream.add("a", [1], 1, None)
        first = await anext(outputs)
        stream.stage(Extras(Logprobs(output=[(-2.0, 2, None)]), []))
        stream.add("b", [2], 1, END)
        assert first.output_ids == [1]
        first.output_ids.clear()
        assert first.logprobs is not None
        first.logprobs.output.clear()
        second = await anext(outputs)
        assert second.output_ids == [1, 2]
        assert second.logprobs is not None
        assert len(second.logprobs.output) == 2

    run(work())


@pytest.mark.parametrize("accumulated", [False, True])
def test_requests_of_a_batch_do_not_mix_and_one_that_fails_keeps_what_it_had(accumulated: bool) -> None:
    """An error behind some text must not take the text away from whoever shows the last piece."""

    async def work() -> None:
        first, second = sent(2, accumulated=accumulated)
        outputs = merged_outputs([first, second])
        seen: dict[int, list[GenerateOutput]] = {0: [], 1: []}

        async def take() -> None:
            piece = await asyncio.wait_for(anext(outputs), 2)
            seen[piece.index].append(piece)

        for stream, text in ((first, "a"), (second, "x"), (first, "b"), (second, "y")):
            stream.add(text, [ord(text)], 1, None)
            await take()
        first.fail(InternalError("broken"))
        await take()
        second.add("z", [122], 1, END)
        await take()
        assert [piece async for piece in outputs] == []
        texts = [[piece.text for piece in seen[index]] for index in (0, 1)]
        if accumulated:
            assert texts == [["a", "ab", "ab"], ["x", "xy", "xyz"]]
        else:
            assert texts == [["a", "b", ""], ["x", "y", "z"]]
        assert isinstance(seen[0][-1].error, InternalError)
        assert seen[0][-1].completion_tokens == 2
        assert seen[1][-1].finish_reason == END

    run(work())


def test_the_setting_counts_where_the_request_does_not_say(ring_name: str) -> None:
    """An operator whose clients expect the one must not have to change them all."""

    async def work() -> None:
        async with World(ring_name, accumulated_output=True) as world:
            choices = {"a": None, "b": False, "c": True}
            clients = {
                rid: Client(world.manager, text="x", rid=rid, accumulated=choice)
                for rid, choice in choices.items()
            }
            clients["d"] = Client(world.manager, text="x", rid="d", stream=False, accumulated=True)
            await world.arrive(*clients)
            for text, reason in (("one ", None), ("two", LENGTH(7))):
                for rid in clients:
                    world.push(rid, text, reason)
                await world.settle()
            pieces = {
                rid: [piece.text for piece in (await client.end()).pieces] for rid, client in clients.items()
            }
            assert pieces == {
                "a": ["one ", "one two"],
                "b": ["one ", "two"],
                "c": ["one ", "one two"],
                "d": ["one two"],
            }

    run(work())


@pytest.mark.parametrize("value", [1, "yes", [True]])
def test_accumulated_is_true_or_false(value: Any) -> None:
    """For all prompts of a request alike, as `stream`."""
    with pytest.raises(ValidationError) as caught:
        fan_out(GenerateRequest(text="x", accumulated=value))
    assert caught.value.field == "accumulated"
