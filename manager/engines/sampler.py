"""Draws one request's tokens from sparse candidates. Pure: its random numbers are its own.

A request's tokens depend on its prompt, its parameters and its seed alone, whatever else runs in
the batch: every sampler has a generator of its own and takes one number a token.

The order of operations, as in SGLang and vLLM:

1. repetition penalty (ids of prompt and output), frequency and presence penalties (output only),
   on the log-probabilities: a model of counts has no logits. They are never positive, so the
   repetition penalty multiplies.
2. logit_bias, added. An id that is no candidate starts from `ABSENT_LOG_PROBABILITY` if its bias
   is positive, so that +100 forces any id.
3. Until `min_new_tokens` are out, ids that would end the request are masked.
4. temperature: log-probabilities divided by it, then normalized.
5. top_k, top_p and min_p, all three measured on that one normalized distribution and not on what
   the one before left over (SGLang's joint filter). The best candidate always stays.
6. One number from the generator picks among what is left.

Greedy is top_k 1 (a temperature of 0 is taken as that). Of equal candidates the model's first wins.
"""

from __future__ import annotations

import math
import random
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate
from operator import neg
from typing import TYPE_CHECKING

from manager.finish import FinishCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

TOP_K_ALL = 1 << 30
NO_LIMIT = -1
_SEED_MASK = (1 << 64) - 1
# About 1e-7: less likely than anything a text of 10^5 tokens can show.
ABSENT_LOG_PROBABILITY = -16.0


@dataclass(slots=True)
class Candidates:
    """Next ids and their weights, the heaviest first. A probability is a share of the `total`.

    Never changed once made. A model keeps tens of thousands of them, hence tuples of ints and arrays:
    the garbage collector need not walk them, which cost a quarter of the speed with lists.
    """

    ids: Sequence[int]
    weights: Sequence[float]
    cumulative: Sequence[float]  # cumulative[i]: sum of weights[: i + 1]

    @property
    def total(self) -> float:
        """The sum of the weights."""
        return self.cumulative[-1]

    @classmethod
    def from_weights(cls, weights: Mapping[int, float]) -> Candidates:
        """Sort; of equal weights the first stays first. At least one; none negative, and not all 0."""
        ids = sorted(weights, key=weights.__getitem__, reverse=True)
        ranked = array("d", [weights[token_id] for token_id in ids])
        return cls(tuple(ids), ranked, array("d", accumulate(ranked)))


def at_temperature(candidates: Candidates, temperature: float) -> Candidates:
    """The same ids in the same order, their probabilities to the power of 1 / temperature (> 0)."""
    best, exponent = candidates.weights[0], 1 / temperature
    # Relative to the best one, whose weight is 1 at every temperature: they cannot all vanish.
    weights = [(weight / best) ** exponent for weight in candidates.weights]
    return Candidates(candidates.ids, weights, list(accumulate(weights)))


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks of its sampler; the defaults change nothing."""

    temperature: float = 1.0
    top_k: int = TOP_K_ALL
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_new_tokens: int = NO_LIMIT  # at least 1; a request of none needs no sampler
    min_new_tokens: int = 0
    ending_ids: frozenset[int] = frozenset()  # stop token ids, and the eos ids unless they are ignored


class Sampler:
    """The tokens of one request."""

    def __init__(self, params: SamplingParams, *, seed: int, prompt_ids: Iterable[int] = ()) -> None:
        self._params = params
        # Random takes a number without its sign, so -1 and 1 would be one seed.
        self._random = random.Random(seed & _SEED_MASK).random  # noqa: S311 - a model's dice, no secret
        self._new_count = 0
        self._repeats = params.repetition_penalty != 1.0
        self._counts_output = bool(params.frequency_penalty or params.presence_penalty or self._repeats)
        self._output: Counter[int] = Counter()
        self._seen = set(prompt_ids) if self._repeats else set[int]()  # prompt and output
        self._greedy = params.top_k == 1 or params.temperature <= 0
        # Nothing but the cuts can change the order or the set of candidates.
        self._keeps_order = not (self._counts_output or params.logit_bias)
        self._cuts = params.top_k < TOP_K_ALL or params.top_p < 1 or params.min_p > 0

    def draw(self, candidates: Candidates, reserve: Candidates) -> tuple[int, FinishCode, int]:
        """Draw the next token; what it ends with (NONE goes on); the value that belongs to the code.

        `reserve` is used if all candidates are masked. If all of the reserve is masked too, the
        mask is given up and the request ends early: the alternative is one that never gets on.
        """
        params = self._params
        masked = params.ending_ids if self._new_count < params.min_new_tokens else frozenset[int]()
        if masked or not self._keeps_order:
            distribution = (
                self._adjusted(candidates, masked)
                or self._adjusted(reserve, masked)
                or self._adjusted(candidates, frozenset())
            )
            assert distribution is not None, "a model always has a candidate"
        elif params.temperature == 1.0 or self._greedy:
            distribution = candidates
        else:
            distribution = at_temperature(candidates, params.temperature)
        token_id = self._pick(distribution)
        self._new_count += 1
        if self._counts_output:
            self._output[token_id] += 1
            self._seen.add(token_id)
        if token_id in params.ending_ids:
            return token_id, FinishCode.STOP_TOKEN, token_id
        if self._new_count == params.max_new_tokens:
            return token_id, FinishCode.LENGTH, self._new_count
        return token_id, FinishCode.NONE, 0

    def _adjusted(self, candidates: Candidates, masked: frozenset[int]) -> Candidates | None:
        """Penalties, bias, mask and temperature; None if nothing is left."""
        params = self._params
        total = candidates.total
        logs = {
            token_id: math.log(weight / total)
            for token_id, weight in zip(candidates.ids, candidates.weights, strict=True)
            if weight > 0
        }
        if self._counts_output:
            self._penalize(logs)
        for token_id, bias in params.logit_bias.items():
            if token_id in logs:
                logs[token_id] += bias
            elif bias > 0:
                logs[token_id] = ABSENT_LOG_PROBABILITY + bias
        for token_id in masked:
            logs.pop(token_id, None)
        if not logs:
            return None
        best = max(logs.values())
        # The best one's weight is exactly 1, so no temperature can make all of them vanish. A greedy
        # request needs the order only.
        temperature = 1.0 if self._greedy else params.temperature
        return Candidates.from_weights(
            {token_id: math.exp((value - best) / temperature) for token_id, value in logs.items()}
        )

    def _penalize(self, logs: dict[int, float]) -> None:
        params = self._params
        # Over the candidates, which are few, and not over a prompt, which may be long.
        for token_id in logs:
            if self._repeats and token_id in self._seen:
                logs[token_id] *= params.repetition_penalty
            if token_id in self._output:
                logs[token_id] -= params.frequency_penalty * self._output[token_id] + params.presence_penalty

    def _pick(self, candidates: Candidates) -> int:
        """Cut, then draw."""
        if self._greedy:
            return candidates.ids[0]
        kept = self._kept_count(candidates) if self._cuts else len(candidates.ids)
        cumulative = candidates.cumulative
        # The last one kept is not looked at: rounding must not lead past it.
        return candidates.ids[bisect_right(cumulative, self._random() * cumulative[kept - 1], 0, kept - 1)]

    def _kept_count(self, candidates: Candidates) -> int:
        """How many of the best are left by top_k, top_p and min_p; at least 1."""
        params = self._params
        kept = min(params.top_k, len(candidates.ids))
        if params.top_p < 1:
            # The fewest whose probabilities reach top_p.
            kept = min(kept, bisect_left(candidates.cumulative, params.top_p * candidates.total) + 1)
        if params.min_p > 0:
            least = params.min_p * candidates.weights[0]
            kept = min(kept, bisect_right(candidates.weights, -least, key=neg))
        return max(kept, 1)
