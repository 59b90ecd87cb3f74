"""Clients of a simulated manager: what they ask for, what they must get, and a judge of what they got."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from scripted_engine import input_logprob, output_logprob
from tokenizers import Tokenizer

from manager import GenerateRequest, ManagerError, QueueFullError, ValidationError
from manager.errors import error_of_status

if TYPE_CHECKING:
    import random

    from manager import GenerateOutput, TokenizerManager

TOKENIZER_FILE: Final = Path(__file__).parents[1] / "data/detok/bytelevel_tiny.json"
TOKENIZER: Final = Tokenizer.from_file(str(TOKENIZER_FILE))
VOCAB_SIZE: Final = 278
CONTEXT_LENGTH: Final = 512

ALPHABET = ["a", "b", "S", "ST", "STOP", "TOP", " ", "\n", "é", "世", "工具", "😀", "👩‍💻", "\x00", "<|eos|>"]
STOPS = ["STOP", "TOP", "ab", "世", "\n\n", "😀a", "bSTOPb", "S"]
ENDINGS: list[dict[str, Any]] = [
    {"type": "abort"},
    {"type": "abort", "message": "no more", "status_code": 503, "err_type": None},
    {"type": "abort", "message": "never", "status_code": 400, "err_type": "Bad"},
    {"type": "abort", "message": None, "status_code": 500, "err_type": None},
    {"type": "tired", "since": [1, 2]},
]
#: What no deployment serves, and where it is found out: before anything else, or request by request.
BAD_REQUESTS: list[dict[str, Any]] = [
    {"text": ""},
    {"text": "a", "sampling_params": {"temperature": -1}},
    {"text": "a", "sampling_params": {"max_new_tokens": True}},
    {"text": "a", "sampling_params": {"n": 5000}},
    {"text": "a", "return_hidden_states": True},
    {"text": "a", "top_logprobs_num": VOCAB_SIZE + 1},
    {"input_ids": [1, VOCAB_SIZE]},
    {"input_ids": [1, -1]},
    {"input_ids": [1], "text": "a"},
]


@dataclass
class Wanted:
    """What one single request must become, if nobody ends it before."""

    prompt: list[int]
    ids: list[int]
    """Those that are shown."""
    engine_ids: list[int]
    """All that the engine gives."""
    text: str
    end: dict[str, Any] | None
    """None: it goes on until somebody ends it."""
    error: type[ManagerError] | None = None
    """With which it ends instead."""
    salt: int = 0
    logprobs: dict[str, Any] | None = None
    """What was asked for of them."""


@dataclass
class Single:
    """One single request: what has come of it."""

    wanted: Wanted
    is_accumulated: bool = False
    """Each piece is all so far."""
    text: str = ""
    ids: list[int] = field(default_factory=list)
    output_logprobs: list[Any] = field(default_factory=list)
    input_logprobs: list[Any] = field(default_factory=list)
    is_whole: bool = False
    error: ManagerError | None = None

    @property
    def has_ended(self) -> bool:
        return self.is_whole or self.error is not None

    def take(self, output: GenerateOutput) -> None:
        """Judge a piece."""
        wanted = self.wanted
        assert not self.has_ended, "a piece after the end"
        if self.is_accumulated:
            assert output.text.startswith(self.text), "text was taken back"
            self.text, self.ids, self.output_logprobs, self.input_logprobs = "", [], [], []
        self.text += output.text
        self.ids += output.output_ids
        assert wanted.text.startswith(self.text), "text of something else"
        assert wanted.ids[: len(self.ids)] == self.ids, "ids of something else"
        assert output.prompt_tokens in (0, len(wanted.prompt))
        self._take_logprobs(output)
        if output.error is not None:
            self.error = output.error
        elif output.finish_reason is not None:
            self.is_whole = True
            assert self.text == wanted.text, "the end of the text is missing"
            assert output.finish_reason.to_mapping() == wanted.end, "another end"
            assert wanted.error is None, "it should have failed"
            assert output.prompt_tokens == len(wanted.prompt)
            assert len(self.ids) <= output.completion_tokens <= len(wanted.engine_ids)
            if wanted.logprobs is not None and 0 <= wanted.logprobs["logprob_start_len"] < len(wanted.prompt):
                assert self.input_logprobs, "log probabilities of the prompt are missing"

    def _take_logprobs(self, output: GenerateOutput) -> None:
        wanted, said = self.wanted, output.logprobs
        assert output.hidden_states is None
        if wanted.logprobs is None:
            assert said is None, "log probabilities that nobody asked for"
            return
        asked, salt, start = wanted.logprobs, wanted.salt, len(self.output_logprobs)
        if said is not None:
            self.output_logprobs += said.output
            for position, (value, token_id, text) in enumerate(said.output, start):
                assert token_id == wanted.engine_ids[position], "log probability of another token"
                assert value == output_logprob(salt, position, token_id), "another's log probability"
                assert (text is not None) == asked["return_text_in_logprobs"]
            count = asked["top_logprobs_num"]
            assert len(said.output_top) == (len(said.output) if count else 0)
            for (value, _, _), top in zip(said.output, said.output_top, strict=False):
                assert value is not None
                assert [each[:2] for each in top or ()] == [(value - i, i) for i in range(count)]
            named = asked["token_ids_logprob"]
            assert len(said.output_token_ids) == (len(said.output) if named else 0)
            for position, entry in enumerate(said.output_token_ids, start):
                right = [(output_logprob(salt, position, i), i) for i in named or ()]
                assert [each[:2] for each in entry or ()] == right
            if said.input:
                assert not self.input_logprobs, "log probabilities of the prompt come twice"
                self.input_logprobs = said.input
                first = asked["logprob_start_len"]
                right = [
                    (input_logprob(salt, i, token_id) if i else None, token_id)
                    for i, token_id in enumerate(wanted.prompt[first:], first)
                ]
                assert [entry[:2] for entry in said.input] == right
        assert len(self.output_logprobs) >= len(self.ids), "tokens without their log probabilities"


class Client:
    """One call of `generate`, and a judge of all that comes of it."""

    def __init__(self, request: dict[str, Any], singles: dict[tuple[int, int], Wanted]) -> None:
        self.request = request
        is_accumulated = bool(request.get("accumulated") and request.get("stream"))
        self.singles = {key: Single(wanted, is_accumulated) for key, wanted in singles.items()}
        self.excuses: set[type[ManagerError]] = {QueueFullError}
        """Errors that something which happened to it accounts for."""
        self.is_patient = True
        """It does not go away by itself."""
        self.is_slow = False
        self.leaves_after: int | None = None
        """Pieces."""
        self.wanted_error: type[ManagerError] | None = None
        """Of the whole request."""
        self.end = ""
        self.problem: AssertionError | None = None
        self._next_piece = asyncio.Event()

    @property
    def rid(self) -> str | None:
        rid: str | None = self.request.get("rid")
        return rid

    @property
    def holds(self) -> bool:
        """Some of it goes on until somebody ends it."""
        return any(
            single.wanted.end is None and single.wanted.error is None and not single.has_ended
            for single in self.singles.values()
        )

    def read_on(self) -> None:
        """A slow reader takes the next piece."""
        self._next_piece.set()

    async def run(self, manager: TokenizerManager) -> None:
        """Read to the end. What is wrong is kept, for a task's exceptions are easily lost."""
        try:
            await self._read(manager)
            self._judge_end()
        except AssertionError as error:
            self.problem = error
        except asyncio.CancelledError:
            self.end = "cancelled"
            raise

    async def _read(self, manager: TokenizerManager) -> None:
        pieces = 0
        try:
            async with contextlib.aclosing(manager.generate(GenerateRequest(**self.request))) as outputs:
                async for output in outputs:
                    single = self.singles[output.index, output.sample]
                    single.take(output)
                    if single.error is not None:
                        self._judge_error(single.error, single.wanted)
                    pieces += 1
                    if pieces == self.leaves_after:
                        self.end = "left"
                        return
                    if self.is_slow:
                        self._next_piece.clear()
                        await self._next_piece.wait()
            self.end = "read to the end"
        except ManagerError as error:
            self.end = type(error).__name__
            open_ones = [single for single in self.singles.values() if not single.has_ended]
            for single in open_ones:
                single.error = error
                self._judge_error(error, single.wanted)
            if self.wanted_error is not None:
                self._judge_error(error, None)

    def _judge_error(self, error: ManagerError, wanted: Wanted | None) -> None:
        allowed = {*self.excuses, wanted.error if wanted is not None else None, self.wanted_error}
        assert type(error) in allowed, f"an error for no reason: {error!r}"

    def _judge_end(self) -> None:
        if self.end == "left":
            return
        assert self.wanted_error is None or self.end != "read to the end", "it should have been refused"
        assert all(single.has_ended for single in self.singles.values()), "a request without an end"


def think_of_client(rng: random.Random, number: int, *, truncates: bool, may_hold: bool) -> Client:
    """Any request that can be written down, and a few that cannot be served.

    `may_hold`: also such that go on until somebody ends them.
    """
    if rng.random() < 0.04:
        client = Client(dict(rng.choice(BAD_REQUESTS)), {})
        client.wanted_error = ValidationError
        return client
    is_batch = rng.random() < 0.15
    count = rng.randint(1, 4) if is_batch else 1
    is_text = rng.random() < 0.6
    texts = [think_of_text(rng) for _ in range(count)]
    prompts = [TOKENIZER.encode(text).ids if is_text else list(text.encode()) for text in texts]
    params = [think_of_params(rng, number, ids, may_hold=may_hold) for ids in prompts]
    logprobs = think_of_logprobs(rng)
    request: dict[str, Any] = {
        "stream": rng.random() < 0.8,
        "rid": f"client-{number}",
        "text" if is_text else "input_ids": (texts if is_text else prompts)
        if is_batch
        else (texts if is_text else prompts)[0],
        "sampling_params": params if is_batch else params[0],
        **({} if logprobs is None else {"return_logprob": True, **logprobs}),
    }
    if rng.random() < 0.1:
        request["rid"] = None
    if rng.random() < 0.15:
        request["accumulated"] = True
    singles = {
        (index, sample): wanted_of(prompts[index], params[index], logprobs, truncates=truncates)
        for index in range(count)
        for sample in range(params[index]["n"])
    }
    client = Client(request, singles)
    client.is_slow = rng.random() < 0.2
    if rng.random() < 0.06:
        client.leaves_after = rng.randint(1, 5)
    return client


def think_of_text(rng: random.Random) -> str:
    roll = rng.random()
    if roll < 0.03:
        return "".join(rng.choices(["a", "b", " "], k=rng.randint(440, 600)))
    return "".join(rng.choices(ALPHABET, k=rng.randint(1, 40)))


def think_of_params(rng: random.Random, number: int, ids: list[int], *, may_hold: bool) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_new_tokens": rng.choice([None, None, rng.randint(0, 60)]),
        "n": rng.choice([1] * 8 + [2, 3]),
        "no_stop_trim": rng.random() < 0.3,
        "skip_special_tokens": rng.random() < 0.5,
    }
    if rng.random() < 0.4:
        params["stop"] = rng.sample(STOPS, rng.randint(1, 3))
    if rng.random() < 0.2:
        params["stop_token_ids"] = rng.sample(range(VOCAB_SIZE), 3) + rng.sample(ids, 1)
    told: dict[str, Any] = {"salt": number % 4096}
    roll = rng.random()
    if roll < 0.12 and may_hold:
        told["holds"] = True
    elif 0.12 <= roll < 0.16:
        told["refused"] = True
    elif 0.16 <= roll < 0.24:
        told["ending"] = rng.choice(ENDINGS)
    params["custom_params"] = told
    return params


def think_of_logprobs(rng: random.Random) -> dict[str, Any] | None:
    if rng.random() < 0.7:
        return None
    return {
        "logprob_start_len": rng.choice([-1, -1, 0, 3]),
        "top_logprobs_num": rng.choice([0, 0, 2]),
        "token_ids_logprob": rng.choice([None, [5, 9]]),
        "return_text_in_logprobs": rng.random() < 0.5,
    }


def wanted_of(
    ids: list[int], params: dict[str, Any], logprobs: dict[str, Any] | None, *, truncates: bool
) -> Wanted:
    """What the engine and the manager must make of it, worked out in the plainest way."""
    told = params["custom_params"]
    most = params["max_new_tokens"]
    is_too_long = len(ids) >= CONTEXT_LENGTH or (most is not None and len(ids) + most > CONTEXT_LENGTH)
    if is_too_long and not truncates:
        return Wanted(ids, [], [], "", None, ValidationError)
    ids = ids[:CONTEXT_LENGTH]
    starts_behind = logprobs is not None and logprobs["logprob_start_len"] >= len(ids)
    if told.get("refused") or starts_behind:
        return Wanted(ids, [], [], "", None, ValidationError)
    limit = CONTEXT_LENGTH - len(ids)
    if most is not None:
        limit = min(limit, most)
    end: dict[str, Any] | None = {"type": "length", "length": limit}
    if limit > len(ids):
        end = told.get("ending", {"type": "stop"})
    shown = engine_ids = ids[:limit]
    for position, token in enumerate(shown):
        if token in params.get("stop_token_ids", ()):
            end = {"type": "stop", "matched": token}
            engine_ids = shown[: position + 1]
            is_trimmed = token != 0 and not params["no_stop_trim"]
            # the worker looks for the token that ended it, so one that ends nothing stays
            shown = engine_ids if told.get("holds") or not is_trimmed else shown[:position]
            break
    if told.get("holds"):
        end = None
    text = TOKENIZER.decode(shown, skip_special_tokens=params["skip_special_tokens"])
    for length in range(1, len(text) + 1):
        matched = next((stop for stop in params.get("stop", ()) if text[:length].endswith(stop)), None)
        if matched is not None:
            text = text[: length if params["no_stop_trim"] else length - len(matched)]
            end = {"type": "stop", "matched": matched}
            break
    error = None
    if end is not None and end.get("status_code") is not None:
        error = type(error_of_status(end["status_code"], ""))
    return Wanted(ids, shown, engine_ids, text, end, error, told["salt"], logprobs)
