"""Log probabilities of a prompt begin inside of it, whatever way the prompt came."""

from __future__ import annotations

from typing import Any

import pytest
from manager_world import LENGTH, Client, World, run

from manager.errors import ValidationError
from manager.limits import check_logprob_start

#: "hello" is three ids to the tests' tokenizer.
TEXT: dict[str, Any] = {"text": "hello"}
IDS: dict[str, Any] = {"input_ids": [1, 2, 3]}
#: Of these the first eight are kept.
CUT: dict[str, Any] = {"input_ids": list(range(20))}
CUT_TEXT: dict[str, Any] = {"text": "0123456789" * 5}


@pytest.mark.parametrize(
    ("prompt", "count"),
    [(TEXT, 3), (IDS, 3), (CUT, 8), (CUT_TEXT, 8)],
    ids=["text", "ids", "cut", "cut text"],
)
def test_a_start_behind_the_prompt_is_refused(ring_name: str, prompt: dict[str, Any], count: int) -> None:
    """An engine that looks there reads what is not there, or takes an empty list for an answer."""

    async def work() -> None:
        async with World(ring_name, context_length=8, allow_auto_truncate=True) as world:

            def client(rid: str, start: int, *, return_logprob: bool = True) -> Client:
                return Client(
                    world.manager,
                    rid=rid,
                    return_logprob=return_logprob,
                    logprob_start_len=start,
                    sampling_params={"max_new_tokens": 1},
                    **prompt,
                )

            for start in (count, count + 1, 2**31 - 1):
                refused = await client("refused", start).end()
                assert isinstance(refused.error, ValidationError)
                assert refused.error.field == "logprob_start_len"
                assert f"value={start}, prompt tokens={count}" in str(refused.error)
            taken = [client("last", count - 1), client("first", 0), client("none", -1)]
            # without log probabilities it means nothing, as everything that belongs to them
            taken.append(client("unasked", count, return_logprob=False))
            await world.arrive("last", "first", "none", "unasked")
            assert "refused" not in world.requests
            for rid in ("last", "first", "none", "unasked"):
                world.push(rid, "x", LENGTH(1))
            for one in taken:
                assert (await one.end()).error is None
            await world.settle()
            assert world.is_empty()

    run(work())


def test_of_a_batch_only_the_prompt_that_is_too_short_is_refused(ring_name: str) -> None:
    """One start for prompts of different lengths fits some of them."""

    async def work() -> None:
        async with World(ring_name) as world:
            client = Client(
                world.manager,
                input_ids=[[1, 2, 3], [1]],
                rid=["long", "short"],
                return_logprob=True,
                logprob_start_len=2,
            )
            await world.arrive("long")
            world.push("long", "x", LENGTH(1))
            await client.end()
            errors = {piece.rid: piece.error for piece in client.pieces}
            assert errors["long"] is None
            assert isinstance(errors["short"], ValidationError)
            assert errors["short"].field == "logprob_start_len"
            assert set(world.requests) == {"long"}

    run(work())


@pytest.mark.parametrize(("start", "count"), [(-1, 1), (0, 1), (9, 10)])
def test_a_start_inside_the_prompt_is_taken(start: int, count: int) -> None:
    """The last token is one, and -1 is the way to say none."""
    check_logprob_start(start, count)
