"""The n-gram model as an engine: text that reads like the book's, at the speed of a ring.

A request is a packed context and a sampler. What a request gets does not depend on its
neighbours in the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from manager.engines.constraints import refuse_constraints, refuse_hidden_states
from manager.engines.engine import Admitted, StepOutput, new_token_limit
from manager.engines.logprobs import RequestLogprobs, batch_extras, of_prompt, of_token
from manager.engines.ngram import ORDER, NGramModel
from manager.engines.sampler import Sampler, SamplingParams
from manager.errors import ConfigError, ValidationError
from manager.finish import FinishCode

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from manager.extras import ExtrasAsked


_REAL_PARAMETERS = (
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


@dataclass(slots=True)
class _Running:
    request_id: int
    context: int
    sampler: Sampler
    asked: ExtrasAsked
    said: RequestLogprobs
    """Of the prompt, until the next step."""


class NGramEngine:
    """A running batch of the n-gram model, one token of each a step."""

    def __init__(
        self,
        *,
        vocab_size: int,
        context_length: int,
        eos_token_ids: Sequence[int],
        randomness: random.Random,
        model: NGramModel | None = None,
    ) -> None:
        """Build the model, unless one is given. `randomness` gives a seed to requests without one.

        Raises `ConfigError` if the deployment's tokenizer is not the model's.
        """
        self._model = model = NGramModel.load() if model is None else model
        if vocab_size != model.vocab_size:
            raise ConfigError(
                "the n-gram engine speaks its own tokenizer only (manager.engines.corpus.TOKENIZER_PATH): "
                f"vocab_size={vocab_size}, expected={model.vocab_size}",
                setting="tokenizer",
            )
        self._context_length = context_length
        self._eos_token_ids = frozenset(eos_token_ids)
        self._randomness = randomness
        self._running: list[_Running] = []
        # requests of no new tokens, and what they asked of the prompt: one row each, with the next step
        self._without_tokens: list[tuple[int, RequestLogprobs]] = []

    @property
    def running_count(self) -> int:
        """Requests admitted and neither finished nor dropped."""
        return len(self._running) + len(self._without_tokens)

    def admit(self, request: Admitted) -> None:
        """Start a request with the next step.

        Raises `ValidationError` for constrained decoding, and for numbers that are none: they come
        from another process, and one NaN must not end the step for all.
        """
        refuse_constraints(request.extras, engine="ngram")
        refuse_hidden_states(request.asked, engine="ngram")
        row = request.sampling
        limit = new_token_limit(len(request.prompt_ids), int(row["max_new_tokens"]), self._context_length)
        if limit == 0:
            self._without_tokens.append((request.request_id, self._of_prompt(request)))
            return
        for name in _REAL_PARAMETERS:
            if not math.isfinite(row[name]):
                raise ValidationError(f"not a finite number: {name}={row[name]}", field=name)
        ending_ids = set(request.stop_token_ids.tolist())
        if not row["ignore_eos"]:
            ending_ids |= self._eos_token_ids
        params = SamplingParams(
            temperature=float(row["temperature"]),
            top_k=int(row["top_k"]),
            top_p=float(row["top_p"]),
            min_p=float(row["min_p"]),
            frequency_penalty=float(row["frequency_penalty"]),
            presence_penalty=float(row["presence_penalty"]),
            repetition_penalty=float(row["repetition_penalty"]),
            logit_bias=self._logit_bias(request),
            max_new_tokens=limit,
            min_new_tokens=int(row["min_new_tokens"]),
            ending_ids=frozenset(ending_ids),
        )
        seed = int(row["sampling_seed"]) if row["has_seed"] else self._randomness.getrandbits(64)
        # Long prompts are common and repetition penalties are not.
        prompt_ids = request.prompt_ids.tolist() if params.repetition_penalty != 1.0 else ()
        self._running.append(
            _Running(
                request.request_id,
                self._model.context(request.prompt_ids[1 - ORDER :].tolist()),
                Sampler(params, seed=seed, prompt_ids=prompt_ids),
                request.asked,
                self._of_prompt(request),
            )
        )

    def _of_prompt(self, request: Admitted) -> RequestLogprobs:
        """Walk the whole prompt where that is asked: some microseconds a token, and the step waits."""
        if not request.asked.return_logprob or request.asked.logprob_start_len < 0:
            return {}
        return of_prompt(self._model, request.prompt_ids.tolist(), request.asked)

    def drop(self, request_ids: NDArray[np.uint64]) -> None:
        """Forget these requests; unknown ones are passed over."""
        dropped = set(request_ids.tolist())
        self._running = [run for run in self._running if run.request_id not in dropped]
        self._without_tokens = [one for one in self._without_tokens if one[0] not in dropped]

    def step(self) -> StepOutput:
        """Draw one token for every running request."""
        model = self._model
        candidates, extended, reserve = model.candidates, model.extended, model.unigrams
        running = self._running
        token_ids: list[int] = []
        codes: list[int] = []
        values: list[int] = []
        said: dict[int, RequestLogprobs] = {}
        for row, run in enumerate(running):
            after = candidates(run.context)
            token_id, code, value = run.sampler.draw(after, reserve)
            if run.asked.return_logprob:
                said[row] = {**run.said, **of_token(after, token_id, run.asked)}
                run.said = {}
            run.context = extended(run.context, token_id)
            token_ids.append(token_id)
            codes.append(code)
            values.append(value)
        request_ids = [run.request_id for run in running]
        counts = np.ones(self.running_count, np.uint32)
        if self._without_tokens:
            counts[len(running) :] = 0
            request_ids += [request_id for request_id, _ in self._without_tokens]
            said.update(
                (row, of_its_prompt)
                for row, (_, of_its_prompt) in enumerate(self._without_tokens, len(running))
                if of_its_prompt
            )
            codes += [FinishCode.LENGTH] * len(self._without_tokens)
            values += [0] * len(self._without_tokens)
            self._without_tokens = []
        if any(codes):
            self._running = [run for run, code in zip(running, codes, strict=False) if not code]
        return StepOutput(
            request_ids=np.array(request_ids, np.uint64),
            token_counts=counts,
            token_ids=np.array(token_ids, np.int32),
            finish_codes=np.array(codes, np.uint8),
            finish_values=np.array(values, np.int64),
            extras=batch_extras(len(request_ids), said) if said else None,
        )

    def _logit_bias(self, request: Admitted) -> dict[int, float]:
        """Read the bias by id. On the wire the ids are strings, as JSON has them."""
        bias = request.extras.get("logit_bias") or {}
        try:
            by_id = {int(token_id): float(value) for token_id, value in bias.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise ValidationError(
                f"logit_bias is no map of ids to numbers: {error}", field="logit_bias"
            ) from None
        for token_id, value in by_id.items():
            if not (0 <= token_id < self._model.vocab_size and math.isfinite(value)):
                raise ValidationError(
                    f"logit_bias out of range: token_id={token_id}, bias={value}, "
                    f"vocab_size={self._model.vocab_size}",
                    field="logit_bias",
                )
        return by_id
