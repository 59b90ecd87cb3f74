"""The echo: answers every request with its prompt's own token ids, for any tokenizer.

Text out equals text in, so it is the engine to test and to load a deployment with. A request
ends with STOP after the last id of its prompt, with LENGTH at its limit (also where both fall
together, as with a model whose next token would have been the end), and with STOP_TOKEN at one
of its own stop token ids once `min_new_tokens` are out. The tokenizer's eos ids are ids like
others: a prompt may contain them. A prompt of more than half the context comes back cut, for the
context holds prompt and answer.

How a request will end is known when it is admitted, so a step is a few numpy calls for the
whole batch. The prompts lie in one pool; a row says where its request reads next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from manager.engines.constraints import refuse_constraints, refuse_hidden_states
from manager.engines.engine import Admitted, StepOutput, new_token_limit
from manager.errors import ConfigError, ValidationError
from manager.finish import FinishCode

if TYPE_CHECKING:
    from numpy.typing import NDArray

# One running request. next and end: indices in the pool; end is where its last token was read.
_ROW_DTYPE = np.dtype(
    [
        ("request_id", np.uint64),
        ("next", np.int64),
        ("end", np.int64),
        ("finish_value", np.int64),
        ("finish_code", np.uint8),
    ],
    align=True,
)
_POOL_SIZE_MIN = 4096  # ids; 16 KiB


class EchoEngine:
    """A running batch of echoes; `chunk` tokens of each a step."""

    def __init__(self, *, context_length: int, chunk: int = 1) -> None:
        """Raise `ConfigError` for a chunk or a context that leaves nothing to do."""
        if chunk < 1:
            raise ConfigError(f"an echo gives at least one token a step: chunk={chunk}", setting="chunk")
        if context_length < 1:
            raise ConfigError(
                f"the context holds no token: context_length={context_length}", setting="context_length"
            )
        self._context_length = context_length
        self._chunk = chunk
        self._rows: NDArray[np.void] = np.empty(0, _ROW_DTYPE)
        self._admitted: list[tuple[int, int, int, int, int]] = []  # rows to be, until the next step
        self._pool: NDArray[np.int32] = np.empty(_POOL_SIZE_MIN, np.int32)
        self._pool_used = 0  # ids; all that live lie before

    @property
    def running_count(self) -> int:
        """Requests admitted and neither finished nor dropped."""
        return len(self._rows) + len(self._admitted)

    def admit(self, request: Admitted) -> None:
        """Start a request with the next step.

        Raises `ValidationError` for constrained decoding, and for log probabilities and hidden states.
        """
        refuse_constraints(request.extras, engine="echo")
        refuse_hidden_states(request.asked, engine="echo")
        if request.asked.return_logprob:
            raise ValidationError("an echo has no log probabilities: engine=echo", field="return_logprob")
        sampling = request.sampling
        prompt_count = len(request.prompt_ids)
        limit = new_token_limit(prompt_count, int(sampling["max_new_tokens"]), self._context_length)
        if limit <= prompt_count:
            count, code, value = limit, FinishCode.LENGTH, limit
        else:
            count, code, value = prompt_count, FinishCode.STOP, 0
        if len(request.stop_token_ids):
            first = int(sampling["min_new_tokens"])  # as many come before a stop token that counts
            stops = np.isin(request.prompt_ids[first:count], request.stop_token_ids)
            if stops.any():
                count = first + int(stops.argmax()) + 1
                code, value = FinishCode.STOP_TOKEN, int(request.prompt_ids[count - 1])
        begin = self._store(request.prompt_ids[:count])
        self._admitted.append((request.request_id, begin, begin + count, value, code))

    def drop(self, request_ids: NDArray[np.uint64]) -> None:
        """Forget these requests; unknown ones are passed over."""
        self._take_in_admitted()
        self._rows = self._rows[~np.isin(self._rows["request_id"], request_ids)]

    def step(self) -> StepOutput:
        """Give the next `chunk` tokens of every running request, or what is left of it."""
        self._take_in_admitted()
        rows = self._rows
        first = rows["next"]
        counts = np.minimum(rows["end"] - first, self._chunk)
        if self._chunk == 1 and counts.all():
            where = first
        else:
            # Row i reads first[i], first[i] + 1, ...: a running number, moved to where each row begins.
            begins = np.cumsum(counts) - counts
            where = np.repeat(first - begins, counts) + np.arange(counts.sum())
        token_ids = self._pool[where]
        first += counts  # a view: moves the rows
        finished = first == rows["end"]
        output = StepOutput(
            request_ids=rows["request_id"].copy(),
            token_counts=counts.astype(np.uint32),
            token_ids=token_ids,
            finish_codes=rows["finish_code"] * finished,
            finish_values=rows["finish_value"] * finished,
        )
        if finished.any():
            self._rows = rows[~finished]
        return output

    def _take_in_admitted(self) -> None:
        if self._admitted:
            self._rows = np.concatenate([self._rows, np.array(self._admitted, _ROW_DTYPE)])
            self._admitted.clear()

    def _store(self, ids: NDArray[np.int32]) -> int:
        """Put ids into the pool; where they begin."""
        if self._pool_used + len(ids) > len(self._pool):
            self._make_room(len(ids))
        begin = self._pool_used
        self._pool_used += len(ids)
        self._pool[begin : self._pool_used] = ids
        return begin

    def _make_room(self, count: int) -> None:
        """Move what is still to be said into a pool of twice the size that it and `count` ids need.

        Twice, so that the cost of moving is spread over as many ids as are moved.
        """
        self._take_in_admitted()
        rows = self._rows
        left = rows["end"] - rows["next"]
        live = int(left.sum())
        pool = np.empty(max(2 * (live + count), _POOL_SIZE_MIN), np.int32)
        begins = np.cumsum(left) - left
        pool[:live] = self._pool[np.repeat(rows["next"] - begins, left) + np.arange(live)]
        rows["next"] = begins
        rows["end"] = begins + left
        self._pool, self._pool_used = pool, live
