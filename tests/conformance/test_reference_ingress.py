"""What SGLang's server promises about a request on its way in, row by row.

Where it registers a request first and takes that back when a check fails, here all checks come
first: of a request that is refused neither a worker nor the scheduler ever hears.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from manager_world import LENGTH, Client, World, run

import shmring
from manager import DisconnectedError, ValidationError
from manager.errors import TokenizeError

IDS = [1, 2, 3]


@dataclass
class Row:
    """One request at a deployment of its own."""

    settings: dict[str, Any]
    params: dict[str, Any]
    field: str | None = None
    """Of the refusal; None: it is let in."""
    words: tuple[str, ...] = ()
    """What the refusal must say."""
    max_new_tokens: int | None = 128
    """As the scheduler gets it."""
    ids: tuple[int, ...] = (1, 2, 3)
    """As above."""
    input_ids: Any = (1, 2, 3)
    rest: tuple[tuple[str, Any], ...] = ()
    """More fields of the request."""


TEN = {"context_length": 10}
ROWS = {
    "total_tokens_over_context_is_rejected": Row(
        TEN,
        {"max_new_tokens": 100},
        "max_new_tokens",
        ("total tokens=103", "input tokens=3", "completion tokens=100"),
    ),
    "total_tokens_that_fill_the_context_go_through_unchanged": Row(
        TEN, {"max_new_tokens": 7}, max_new_tokens=7
    ),
    "reserved_tokens_count_toward_the_limit": Row(
        TEN | {"reserved_tokens": 5}, {"max_new_tokens": 3}, "max_new_tokens", ("input tokens=8",)
    ),
    "auto_truncate_clamps": Row(
        TEN | {"allow_auto_truncate": True}, {"max_new_tokens": 100}, max_new_tokens=7
    ),
    "auto_truncate_leaves_alone_what_fits": Row(
        {"allow_auto_truncate": True}, {"max_new_tokens": 100}, max_new_tokens=100
    ),
    "auto_truncate_leaves_no_limit_alone": Row(
        {"context_length": 100, "allow_auto_truncate": True}, {"max_new_tokens": None}, max_new_tokens=None
    ),
    "input_length_is_checked_without_a_limit": Row(
        {"context_length": 3}, {"max_new_tokens": None}, "input_ids", ("context_length=3",)
    ),
    "input_length_is_checked_with_a_limit": Row(
        {"context_length": 3}, {"max_new_tokens": 1}, "input_ids", ("context_length=3",)
    ),
    "input_that_leaves_room_for_one_token": Row(
        {"context_length": 3},
        {"max_new_tokens": None},
        max_new_tokens=None,
        input_ids=[1, 2],
        ids=(1, 2),
    ),
    "input_that_fills_the_context_is_cut_if_it_may_be": Row(
        {"context_length": 3, "allow_auto_truncate": True}, {"max_new_tokens": None}, max_new_tokens=None
    ),
    "hidden_states_are_refused_where_there_are_none": Row(
        {},
        {},
        "return_hidden_states",
        ("hidden_states_enabled",),
        rest=(("return_hidden_states", True),),
    ),
    "hidden_states_not_asked_for": Row({}, {}, rest=(("return_hidden_states", False),)),
    "hidden_states_are_let_through_where_there_are_some": Row(
        {"hidden_states_enabled": True}, {}, rest=(("return_hidden_states", True),)
    ),
    "over_context_request_never_reaches_the_ring": Row(
        {"context_length": 4}, {"max_new_tokens": 64}, "max_new_tokens"
    ),
    "failure_before_registration_ids": Row({}, {}, "input_ids", input_ids=[2_000_000_000]),
    "failure_after_registration_in_the_reference": Row({}, {"top_p": 2.0}, "top_p"),
    "out_of_vocab_input_ids_rejected": Row({}, {}, "input_ids", input_ids=[1, 2_000_000_000]),
    "negative_input_ids_rejected": Row({}, {}, "input_ids", input_ids=[-1]),
    "logprob_token_ids_rejected": Row(
        {}, {}, "token_ids_logprob", rest=(("return_logprob", True), ("token_ids_logprob", [999_999]))
    ),
    "negative_logprob_token_ids_rejected": Row(
        {}, {}, "token_ids_logprob", rest=(("return_logprob", True), ("token_ids_logprob", [-1]))
    ),
    "min_new_tokens_above_the_clamped_limit_is_rejected": Row(
        TEN | {"allow_auto_truncate": True}, {"max_new_tokens": 100, "min_new_tokens": 8}, "min_new_tokens"
    ),
    "admitted_request_keeps_registration": Row({}, {}),
}


@pytest.mark.parametrize("row", ROWS)
def test_row_of_the_checks(ring_name: str, row: str) -> None:
    """Refused with the field and the numbers, unknown to everybody; or let in as it came."""
    case = ROWS[row]

    async def work() -> None:
        async with World(ring_name, **case.settings) as world:
            before = shmring.read_statistics(f"{ring_name}.ingress").producer.position
            client = Client(
                world.manager,
                input_ids=list(case.input_ids),
                rid="a",
                sampling_params=case.params,
                **dict(case.rest),
            )
            if case.field is None:
                arrivals = await world.next_arrivals()
                await world.settle()
                limit = int(arrivals.sampling["max_new_tokens"][0])
                assert limit == (-1 if case.max_new_tokens is None else case.max_new_tokens)
                assert tuple(arrivals.prompt_ids.tolist()) == case.ids
                assert (world.registered_count, world.open_count) == (1, 1)
                world.push("a", "x", LENGTH(1))
                assert (await client.end()).text == "x"
            else:
                await client.end()
                assert isinstance(client.error, ValidationError)
                assert (client.error.status, client.error.field) == (400, case.field)
                for words in case.words:
                    assert words in str(client.error)
                await world.settle()
                assert world.registered_count == 0
                assert shmring.read_statistics(f"{ring_name}.ingress").producer.position == before
            assert world.aborts == []
            assert world.is_empty()

    run(work())


@pytest.mark.parametrize("source", ["the reader leaves", "the client aborts", "a worker finds the end"])
def test_every_abort_source_deregisters_and_stops_the_scheduler(ring_name: str, source: str) -> None:
    """One of them forgotten is a zombie in the scheduler, or an entry that nobody ever removes."""

    async def work() -> None:
        async with World(ring_name) as world:
            client = Client(world.manager, text="x", rid="a", sampling_params={"stop": ["STOP"]})
            await world.arrive("a")
            await world.settle()
            assert world.open_count == 1
            if source == "the reader leaves":
                await client.leave()
            elif source == "the client aborts":
                assert world.manager.abort("a") == 1
                assert isinstance((await client.end()).error, DisconnectedError)
            else:
                world.push("a", "STOP")
                assert (await client.end()).error is None
            await world.settle()
            assert world.aborts == [world.requests["a"]]
            assert world.is_empty()

    run(work())


class FixedTokenizer:
    """Encodes everything to the same ids, or fails."""

    def __init__(self, ids: list[int] | None) -> None:
        self._ids = ids

    def encode(self, texts: list[str]) -> list[Any]:
        if self._ids is None:
            raise TokenizeError("tokenizer failed: why=broken")
        return [np.array(self._ids, np.int32) for _ in texts]


@pytest.mark.parametrize(
    ("ids", "status", "field"),
    [(None, 500, None), ([1, 278], 400, "input_ids"), ([-1], 400, "input_ids"), ([], 400, "text")],
    ids=["tokenize_failure", "id_above_the_vocabulary", "negative_id", "no_ids"],
)
def test_what_a_tokenizer_gives_is_checked_and_a_bad_answer_leaves_nothing(
    ring_name: str, ids: list[int] | None, status: int, field: str | None
) -> None:
    """An id without a row in the model ends the scheduler, whoever made it up."""

    async def work() -> None:
        async with World(ring_name) as world:
            live = Client(world.manager, input_ids=IDS, rid="live")
            await world.arrive("live")
            world.manager._intake._tokenizer = FixedTokenizer(ids)  # type: ignore[assignment]
            client = await Client(world.manager, text="x", rid="a").end()
            assert client.error.status == status
            assert getattr(client.error, "field", None) == field
            await world.settle()
            assert (world.registered_count, set(world.requests)) == (1, {"live"})
            world.push("live", "x", LENGTH(1))
            assert (await live.end()).text == "x"
            assert world.aborts == []
            assert world.is_empty()

    run(work())


def test_a_request_cancelled_before_it_is_taken_up_is_never_driven(ring_name: str) -> None:
    """The client went away between its call and our first look at it."""

    async def work() -> None:
        async with World(ring_name) as world:
            await Client(world.manager, text="x", rid="a").leave()
            await world.settle()
            assert (world.registered_count, world.requests, world.aborts) == (0, {}, [])
            assert world.is_empty()

    run(work())


RIDS = [
    "r",
    "",
    "x_0",
    "0123456789abcdef" * 2,
    "abc#0123456789abcdef",
    "#0123456789abcdef",
    "réq-π-🎉",
    "x" * 128,
]


@pytest.mark.parametrize("rid", RIDS)
def test_client_facing_round_trips_whatever_the_client_sent(ring_name: str, rid: str) -> None:
    """The client and the logs know a request by the client's word, all other parts by a number of ours."""

    async def work() -> None:
        async with World(ring_name) as world:
            numbers = []
            for _ in range(2):
                client = Client(world.manager, text="x", rid=rid)
                arrivals = await world.next_arrivals()
                assert arrivals.rids == [rid]
                world.push(rid, "x", LENGTH(1))
                await client.end()
                assert [piece.rid for piece in client.pieces] == [rid]
                numbers += arrivals.request_ids.tolist()
            assert len(set(numbers)) == 2

    run(work())


def test_client_facing_leaves_minted_rids_alone(ring_name: str) -> None:
    """What was made up here is what the client aborts by."""

    async def work() -> None:
        async with World(ring_name) as world:
            client = Client(world.manager, text="x")
            [rid] = (await world.next_arrivals()).rids
            assert len(rid) == 32
            assert int(rid, 16) >= 0
            assert rid == rid.lower()
            world.push(rid, "x", LENGTH(1))
            await client.end()
            assert [piece.rid for piece in client.pieces] == [rid]

    run(work())
