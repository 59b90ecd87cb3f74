"""The echo engine, by itself."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from manager.engines.echo import EchoEngine
from manager.engines.engine import Admitted
from manager.errors import ConfigError, ValidationError
from manager.finish import FinishCode
from manager.sampling import SAMPLING_DTYPE


def request(request_id: int, prompt_ids, *, stop_token_ids=(), extras=None, **sampling: Any) -> Admitted:
    row = np.zeros(1, SAMPLING_DTYPE)
    row["max_new_tokens"] = -1
    for name, value in sampling.items():
        row[name] = value
    return Admitted(
        request_id, np.array(prompt_ids, np.int32), row[0], np.array(stop_token_ids, np.int32), extras or {}
    )


def run(engine: EchoEngine) -> dict[int, tuple[list[list[int]], FinishCode, int]]:
    """Step until nothing runs: by request, the tokens of each step, and how it finished."""
    steps: dict[int, list[list[int]]] = {}
    ends: dict[int, tuple[FinishCode, int]] = {}
    while engine.running_count:
        output = engine.step()
        token_ids = output.token_ids.tolist()
        for request_id, count, code, value in zip(
            output.request_ids.tolist(),
            output.token_counts.tolist(),
            output.finish_codes.tolist(),
            output.finish_values.tolist(),
            strict=True,
        ):
            assert request_id not in ends
            steps.setdefault(request_id, []).append(token_ids[:count])
            del token_ids[:count]
            if code:
                ends[request_id] = FinishCode(code), value
        assert not token_ids
    assert steps.keys() == ends.keys()
    return {request_id: (steps[request_id], *ends[request_id]) for request_id in steps}


def test_a_prompt_comes_back_one_token_a_step():
    engine = EchoEngine(context_length=100)
    engine.admit(request(7, [5, 0, 2_000_000_000]))
    assert run(engine) == {7: ([[5], [0], [2_000_000_000]], FinishCode.STOP, 0)}


def test_a_chunk_is_so_many_tokens_and_the_last_what_is_left():
    engine = EchoEngine(context_length=100, chunk=3)
    engine.admit(request(1, range(7)))
    engine.admit(request(2, range(10, 13)))
    assert run(engine) == {
        1: ([[0, 1, 2], [3, 4, 5], [6]], FinishCode.STOP, 0),
        2: ([[10, 11, 12]], FinishCode.STOP, 0),
    }


def test_an_empty_prompt_ends_at_once_with_no_token():
    engine = EchoEngine(context_length=100)
    engine.admit(request(1, []))
    engine.admit(request(2, [4]))
    assert run(engine) == {1: ([[]], FinishCode.STOP, 0), 2: ([[4]], FinishCode.STOP, 0)}


@pytest.mark.parametrize(("limit", "count"), [(0, 0), (2, 2), (5, 5)])
def test_the_limit_cuts_the_answer(limit: int, count: int):
    """Of a limit as long as the prompt nobody can tell whether there was more: LENGTH, as with a model."""
    engine = EchoEngine(context_length=100, chunk=10)
    engine.admit(request(1, range(5), max_new_tokens=limit))
    assert run(engine) == {1: ([list(range(count))], FinishCode.LENGTH, count)}


def test_the_context_holds_prompt_and_answer():
    """A client must not get more tokens than the deployment says it can hold."""
    engine = EchoEngine(context_length=8, chunk=10)
    engine.admit(request(1, range(5)))
    engine.admit(request(2, range(9)))
    assert run(engine) == {1: ([[0, 1, 2]], FinishCode.LENGTH, 3), 2: ([[]], FinishCode.LENGTH, 0)}


def test_a_stop_token_of_the_request_ends_it():
    engine = EchoEngine(context_length=100, chunk=10)
    engine.admit(request(1, [3, 9, 4, 9, 5], stop_token_ids=[9, 77]))
    engine.admit(request(2, [3, 9, 4, 9, 5], stop_token_ids=[9], min_new_tokens=2))
    engine.admit(request(3, [3, 9], stop_token_ids=[9], max_new_tokens=1))
    engine.admit(request(4, [3, 9], stop_token_ids=[9], min_new_tokens=5))
    assert run(engine) == {
        1: ([[3, 9]], FinishCode.STOP_TOKEN, 9),
        2: ([[3, 9, 4, 9]], FinishCode.STOP_TOKEN, 9),
        3: ([[3]], FinishCode.LENGTH, 1),
        4: ([[3, 9]], FinishCode.STOP, 0),
    }


def test_a_dropped_request_says_nothing_more_and_its_neighbours_go_on():
    engine = EchoEngine(context_length=100)
    for request_id in (1, 2, 3):
        engine.admit(request(request_id, [10 * request_id, 10 * request_id + 1]))
    assert engine.step().request_ids.tolist() == [1, 2, 3]
    engine.admit(request(4, [40]))
    engine.drop(np.array([2, 4, 99], np.uint64))
    assert engine.running_count == 2
    output = engine.step()
    assert output.request_ids.tolist() == [1, 3]
    assert output.token_ids.tolist() == [11, 31]
    assert engine.running_count == 0


@pytest.mark.parametrize("seed", range(6))
def test_every_prompt_comes_back_whatever_comes_and_goes(seed: int):
    """All prompts lie in one pool that moves and grows; mixing two up shows one user another's text."""
    dice = random.Random(seed)
    engine = EchoEngine(context_length=1 << 20, chunk=dice.choice([1, 3, 64]))
    prompts: dict[int, list[int]] = {}
    answers: dict[int, list[int]] = {}
    dropped: set[int] = set()
    for step in range(400):
        for _ in range(dice.randrange(4)):
            request_id = len(prompts) + 1
            prompts[request_id] = [dice.randrange(1 << 31) for _ in range(dice.choice([0, 1, 50, 700, 3001]))]
            answers[request_id] = []
            engine.admit(request(request_id, prompts[request_id]))
        if prompts and not step % 7:
            victim = dice.randrange(len(prompts)) + 1
            dropped.add(victim)
            engine.drop(np.array([victim], np.uint64))
        if engine.running_count:
            output = engine.step()
            ends = np.cumsum(output.token_counts).tolist()
            for request_id, count, end in zip(
                output.request_ids.tolist(), output.token_counts.tolist(), ends, strict=True
            ):
                answers[request_id] += output.token_ids[end - count : end].tolist()
    for request_id, (steps, _, _) in run(engine).items():
        answers[request_id] += [token_id for step_ids in steps for token_id in step_ids]
    for request_id, prompt in prompts.items():
        if request_id in dropped:
            assert prompt[: len(answers[request_id])] == answers[request_id]
        else:
            assert answers[request_id] == prompt


def test_a_step_has_the_types_of_the_batch_columns():
    """The port writes the columns as they are; another width would be another batch."""
    engine = EchoEngine(context_length=100)
    engine.admit(request((1 << 64) - 1, [5, 6]))
    output = engine.step()
    assert output.extras is None
    assert [column.dtype for name, column in vars(output).items() if name != "extras"] == [
        np.uint64,
        np.uint32,
        np.int32,
        np.uint8,
        np.int64,
    ]
    assert output.request_ids.tolist() == [(1 << 64) - 1]


def test_constrained_decoding_is_refused():
    """An echo that is asked for JSON and gives the prompt would look like a broken model."""
    engine = EchoEngine(context_length=100)
    with pytest.raises(ValidationError, match="json_schema") as caught:
        engine.admit(request(1, [5], extras={"json_schema": "{}"}))
    assert caught.value.field == "json_schema"
    assert engine.running_count == 0


@pytest.mark.parametrize("settings", [{"chunk": 0}, {"context_length": 0}])
def test_settings_that_leave_nothing_to_do_are_refused(settings: dict[str, int]):
    with pytest.raises(ConfigError):
        EchoEngine(**{"context_length": 10, **settings})
