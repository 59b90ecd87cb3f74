"""An echo that does what a request tells it to: log probabilities, refusals, odd ends, no end at all.

What it is told is in the request's `custom_params`, so each request brings its own script, also to
the successor of a scheduler that died. What it says of a token depends on the request's salt, so
that nobody can be given another's without somebody seeing it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from manager.engines.echo import EchoEngine
from manager.engines.logprobs import batch_extras
from manager.errors import ValidationError
from manager.extras import NOTHING_ASKED
from manager.finish import FinishCode
from manager.scheduler_port import SchedulerPort

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from manager.engines.engine import Admitted, StepOutput
    from manager.extras import ExtrasAsked


class KilledError(Exception):
    """The part is dead from here on."""


def output_logprob(salt: int, position: int, token_id: int) -> float:
    """Of the token at a position of the output. Exact in 32 bits."""
    return -(salt + position + token_id / 512)


def input_logprob(salt: int, position: int, token_id: int) -> float:
    """Of the token at a position of the prompt. Exact in 32 bits."""
    return -(salt + position + token_id / 512) - 0.0625 / 64


@dataclass
class _Script:
    """One running request."""

    prompt: list[int]
    asked: ExtrasAsked
    salt: int
    holds: bool
    ending: dict[str, Any] | None
    said: int = 0
    """Tokens so far."""


class ScriptedEngine:
    """The engine. `holds`: a request stays when it has said all, until somebody aborts it."""

    def __init__(self, *, context_length: int, chunk: int) -> None:
        self._echo = EchoEngine(context_length=context_length, chunk=chunk)
        self._scripts: dict[int, _Script] = {}
        self._held: set[int] = set()
        self.endings: dict[int, bytes] = {}
        """Of the step just made: finish details by request."""

    @property
    def running_count(self) -> int:
        return self._echo.running_count + len(self._held)

    def admit(self, request: Admitted) -> None:
        told = request.extras.get("custom_params") or {}
        if told.get("refused"):
            raise ValidationError("this engine does not serve it", field="custom_params")
        echoed = {name: value for name, value in request.extras.items() if name != "custom_params"}
        self._echo.admit(dataclasses.replace(request, asked=NOTHING_ASKED, extras=echoed))
        self._scripts[request.request_id] = _Script(
            request.prompt_ids.tolist(),
            request.asked,
            told.get("salt", 0),
            told.get("holds", False),
            told.get("ending"),
        )

    def drop(self, request_ids: np.ndarray[Any, Any]) -> None:
        self._echo.drop(request_ids)
        self._held.difference_update(request_ids.tolist())
        for request_id in request_ids.tolist():
            self._scripts.pop(request_id, None)

    def step(self) -> StepOutput:
        output = self._echo.step()
        self.endings = {}
        said: dict[int, Any] = {}
        start = 0
        counts = output.token_counts.tolist()
        for row, (request_id, count) in enumerate(zip(output.request_ids.tolist(), counts, strict=True)):
            script = self._scripts[request_id]
            token_ids = output.token_ids[start : start + count].tolist()
            start += count
            if script.asked.return_logprob:
                said[row] = _logprobs(script, token_ids)
            script.said += count
            code = int(output.finish_codes[row])
            if not code:
                continue
            if script.holds:
                output.finish_codes[row] = output.finish_values[row] = 0
                self._held.add(request_id)
                continue
            if script.ending is not None and code == FinishCode.STOP:
                output.finish_codes[row] = FinishCode.DETAILS
                self.endings[request_id] = msgspec.msgpack.encode(script.ending)
            del self._scripts[request_id]
        extras = batch_extras(len(output.request_ids), said) if said else None
        return dataclasses.replace(output, extras=extras)


def _logprobs(script: _Script, token_ids: list[int]) -> dict[str, Any]:
    asked, salt = script.asked, script.salt
    found: dict[str, Any] = {}
    start = asked.logprob_start_len
    if script.said == 0 and 0 <= start < len(script.prompt):
        positions = range(start, len(script.prompt))
        values = [None if i == 0 else input_logprob(salt, i, script.prompt[i]) for i in positions]
        found["input"] = values, script.prompt[start:]
    if not token_ids:
        return found
    places = list(enumerate(token_ids, script.said))
    own = [output_logprob(salt, *place) for place in places]
    found["output"] = own, token_ids
    if asked.top_logprobs_num:
        count = range(asked.top_logprobs_num)
        found["output_top"] = [[value - i for i in count] for value in own], [list(count) for _ in own]
    if asked.token_ids_logprob:
        named = list(asked.token_ids_logprob)
        values = [[output_logprob(salt, position, i) for i in named] for position, _ in places]
        found["output_token_ids"] = values, [named for _ in own]
    return found


class ScriptedPort(SchedulerPort):
    """A port that lets the others work where the real one sleeps, and may die there."""

    let_others_work: Callable[[], None]
    gives_up: Callable[[], bool]
    """Whether nobody can make room now, so that waiting would be for ever."""
    engine: ScriptedEngine

    def push_batch(
        self, request_ids: Any, token_counts: Any, token_ids: Any, *ends: Any, **more: Any
    ) -> None:
        endings = self.engine.endings
        if endings:
            more["finish_details"] = [endings.get(request_id, b"") for request_id in request_ids.tolist()]
        super().push_batch(request_ids, token_counts, token_ids, *ends, **more)

    def _wait_for_room(self, _producer: Any, _length: int, again: Callable[[], bool], _timeout: Any) -> None:
        for _ in range(20_000):
            self.let_others_work()
            if again():
                return
            if self.gives_up():
                raise KilledError
        raise AssertionError("an egress ring stays full for ever")
