"""Log probabilities of the n-gram model, for requests that ask for them.

All are of the model's own distribution, before penalties, bias and cuts: what a request does to
its sampler does not change what the model finds likely. An id that is no candidate has
`ABSENT_LOG_PROBABILITY`, as the sampler takes it; so there are never more of the most likely ids
than candidates.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

from manager.engines.sampler import ABSENT_LOG_PROBABILITY
from manager.extras import BatchExtras, LogprobColumn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from manager.engines.ngram import NGramModel
    from manager.engines.sampler import Candidates
    from manager.extras import ExtrasAsked

#: Of one request, by field of BatchExtras: values and ids.
RequestLogprobs: TypeAlias = "dict[str, tuple[list[object], list[object]]]"


def of_token(candidates: Candidates, token_id: int, asked: ExtrasAsked) -> RequestLogprobs:
    """What is wanted to know of one new token, and of its place."""
    found: RequestLogprobs = {"output": ([_log_probability(candidates, token_id)], [token_id])}
    if asked.top_logprobs_num:
        values, ids = _top(candidates, asked.top_logprobs_num)
        found["output_top"] = [values], [ids]
    if asked.token_ids_logprob:
        values, ids = _of_ids(candidates, asked.token_ids_logprob)
        found["output_token_ids"] = [values], [ids]
    return found


def of_prompt(model: NGramModel, prompt_ids: Sequence[int], asked: ExtrasAsked) -> RequestLogprobs:
    """What is wanted to know of the prompt. Nothing stands before its first token, which has none."""
    start = asked.logprob_start_len
    if not 0 <= start < len(prompt_ids):
        return {}
    context = model.context(prompt_ids[:start])
    values: list[object] = []
    top: tuple[list[object], list[object]] = ([], [])
    named: tuple[list[object], list[object]] = ([], [])
    for place, token_id in enumerate(prompt_ids[start:], start):
        candidates = model.candidates(context)
        context = model.extended(context, token_id)
        values.append(_log_probability(candidates, token_id) if place else None)
        for family, (row, ids) in (
            (top, _top(candidates, asked.top_logprobs_num)),
            (named, _of_ids(candidates, asked.token_ids_logprob)),
        ):
            family[0].append(row if place else None)
            family[1].append(ids if place else None)
    found: RequestLogprobs = {"input": (values, list(prompt_ids[start:]))}
    if asked.top_logprobs_num:
        found["input_top"] = top
    if asked.token_ids_logprob:
        found["input_token_ids"] = named
    return found


def batch_extras(row_count: int, found: Mapping[int, RequestLogprobs]) -> BatchExtras:
    """The extras of a step, from those of its rows that have any."""
    columns: dict[str, Any] = {}
    for row, families in found.items():
        for field, (values, ids) in families.items():
            if field not in columns:
                columns[field] = LogprobColumn([None] * row_count, [None] * row_count)
            columns[field].values[row], columns[field].ids[row] = values, ids
    return BatchExtras(**columns)


def _log_probability(candidates: Candidates, token_id: int) -> float:
    try:
        weight = candidates.weights[candidates.ids.index(token_id)]
    except ValueError:
        return ABSENT_LOG_PROBABILITY
    return math.log(weight / candidates.total) if weight > 0 else ABSENT_LOG_PROBABILITY


def _top(candidates: Candidates, count: int) -> tuple[list[float], list[int]]:
    ids = list(candidates.ids[:count])
    return _logs(candidates.weights[:count], candidates.total), ids


def _logs(weights: Sequence[float], total: float) -> list[float]:
    return [math.log(weight / total) if weight > 0 else ABSENT_LOG_PROBABILITY for weight in weights]


def _of_ids(candidates: Candidates, token_ids: Sequence[int]) -> tuple[list[float], list[int]]:
    return [_log_probability(candidates, token_id) for token_id in token_ids], list(token_ids)
