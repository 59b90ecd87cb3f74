"""Faults that users of LLM servers reported about parameters: a table each, refused or normalized in time.

The tables are in tests/data/reported_parameters, each named for its fault. Every row goes through a
whole manager: of what is refused neither a worker nor the scheduler hears.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from manager_world import LENGTH, Client, World, run
from parameter_tables import meant

import shmring
from manager import SamplingParams, ValidationError
from manager.sampling import SAMPLING_DTYPE

TABLES = {
    path.stem: json.loads(path.read_text())
    for path in sorted((Path(__file__).parents[1] / "data/reported_parameters").glob("*.json"))
}
VOCABULARY = 278
PROMPT = list(range(10))


def test_the_tables_are_there() -> None:
    """Tables that are not found test nothing."""
    assert len(TABLES) == 10
    assert sum(len(table["rows"]) for table in TABLES.values()) >= 100


@pytest.mark.parametrize("fault", TABLES)
def test_the_fault_stays_away(ring_name: str, fault: str) -> None:
    """What gets past the door is met by an engine that trusts it."""

    async def work() -> None:
        async with World(ring_name, context_length=4096) as world:
            for number, row in enumerate(TABLES[fault]["rows"]):
                rid, params = f"r{number}", meant(row["params"])
                request: dict[str, Any] = {"input_ids": PROMPT, "rid": rid, **row.get("request", {})}
                if row["expect"] == "reject":
                    await check_refused(world, row["field"], request | {"sampling_params": params})
                else:
                    await check_admitted(world, row, request | {"sampling_params": params})
            assert world.aborts == []
            await world.settle()
            assert world.is_empty()

    run(work())


async def check_refused(world: World, field: str, request: dict[str, Any]) -> None:
    ingress = f"{world.port.name}.ingress"
    before = (shmring.read_statistics(ingress).producer.position, world.registered_count)
    client = await Client(world.manager, **request).end()
    assert isinstance(client.error, ValidationError), request
    assert (client.error.status, client.error.field) == (400, field)
    assert field in str(client.error)
    json.dumps(str(client.error), allow_nan=False).encode()
    assert (shmring.read_statistics(ingress).producer.position, world.registered_count) == before


async def check_admitted(world: World, row: dict[str, Any], request: dict[str, Any]) -> None:
    client = Client(world.manager, **request)
    arrivals = await world.next_arrivals()
    normalized = SamplingParams.from_mapping(request["sampling_params"]).normalize(
        vocab_size=VOCABULARY, has_tokenizer=True
    )
    for field, wanted in row.get("normalized", {}).items():
        value = getattr(normalized.params, field)
        assert (list(value) if isinstance(value, tuple) else value) == wanted
    assert arrivals.sampling[0] == np.array([normalized.to_row()], SAMPLING_DTYPE)[0]
    assert arrivals.extras == [normalized.extras()]
    assert tuple(arrivals.stop_token_ids.tolist()) == normalized.stop_token_ids
    world.push(request["rid"], "x", LENGTH(1))
    assert (await client.end()).error is None


WITHOUT_TOKENIZER = {
    "stop": ({"sampling_params": {"stop": ["."]}}, "stop"),
    "stop_regex": ({"sampling_params": {"stop_regex": r"\d"}}, "stop_regex"),
    "min_new_tokens": ({"sampling_params": {"min_new_tokens": 1}}, "min_new_tokens"),
    "text": ({"text": "x", "input_ids": None}, "input_ids"),
    "stop_token_ids": ({"sampling_params": {"stop_token_ids": [5]}}, None),
}


@pytest.mark.parametrize("case", WITHOUT_TOKENIZER)
def test_what_needs_a_tokenizer_never_matches_without_one(ring_name: str, case: str) -> None:
    """A stop that silently never fires is worse than a refusal at the door."""
    fields, field = WITHOUT_TOKENIZER[case]

    async def work() -> None:
        async with World(ring_name, has_tokenizer=False, tokenizer=None, vocab_size=VOCABULARY) as world:
            request = {"input_ids": PROMPT, "rid": "a", **fields}
            if field is None:
                await check_admitted(world, {}, request)
            else:
                await check_refused(world, field, request)

    run(work())
