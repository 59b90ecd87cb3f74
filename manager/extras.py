"""What a request may ask for beside its tokens: log probabilities and hidden states.

An engine fills `BatchExtras` for a step, one entry a request; a caller gets `Logprobs`. Between
them everything is columns of families: flat ones with a value and an id a position, ragged ones
with several a position. Pure: no ring is known here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

#: One row of REQUEST: what a request wants of its scheduler beside tokens.
OPTIONS_DTYPE: Final = np.dtype(
    [
        ("logprob_start_len", "<i4"),
        ("top_logprobs_num", "<i4"),
        ("return_logprob", "?"),
        ("return_hidden_states", "?"),
    ],
    align=True,
)


@dataclass(frozen=True)
class ExtrasAsked:
    """What a request wants beside its tokens; the defaults want nothing."""

    return_logprob: bool = False
    """Without it the other fields about log probabilities are as here."""
    return_hidden_states: bool = False
    logprob_start_len: int = -1
    """First prompt position with log probabilities; -1: none of the prompt."""
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] = ()
    logprob_texts: bool = False
    """Whether log probabilities come with the texts of their ids: the worker's business alone."""

    def to_row(self) -> tuple[int, int, bool, bool]:
        """One row of OPTIONS_DTYPE."""
        return (
            self.logprob_start_len,
            self.top_logprobs_num,
            self.return_logprob,
            self.return_hidden_states,
        )

    @classmethod
    def of_row(cls, row: tuple[int, int, bool, bool], token_ids_logprob: Sequence[int]) -> ExtrasAsked:
        """Build from a row of OPTIONS_DTYPE as a tuple, and the ids that travel beside it."""
        start, top, return_logprob, return_hidden_states = row
        return cls(return_logprob, return_hidden_states, start, top, tuple(token_ids_logprob))


NOTHING_ASKED: Final = ExtrasAsked()

#: By their columns' names: a value and an id a position.
FLAT_FAMILIES: Final = ("out_lp", "in_lp")
#: By their columns' names: any number of values and ids a position.
RAGGED_FAMILIES: Final = ("out_top", "in_top", "out_tid", "in_tid")
#: The fields of `BatchExtras` and of `Logprobs` that they stand for.
FIELDS: Final = {
    "out_lp": "output",
    "in_lp": "input",
    "out_top": "output_top",
    "in_top": "input_top",
    "out_tid": "output_token_ids",
    "in_tid": "input_token_ids",
}


@dataclass(frozen=True)
class LogprobColumn:
    """One family of a step: each request's log probabilities and the ids they belong to.

    Both have one entry a request of the batch, None for a request without. An entry is, for a flat
    family, a list or array of numbers; for a ragged one, a list of such, None for an empty position.
    """

    values: Sequence[Any]
    ids: Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class BatchExtras:
    """What a step brings beside tokens; None: the family is in nobody's interest."""

    output: LogprobColumn | None = None
    """Of the new tokens: one value and id a token."""
    input: LogprobColumn | None = None
    """Of the prompt, from the request's `logprob_start_len` on. A first value of None, as the first
    token of a prompt has it, becomes NaN; NaN is "no log probability", and its id stays."""
    output_top: LogprobColumn | None = None
    """The most likely ids at each new token's place."""
    input_top: LogprobColumn | None = None
    output_token_ids: LogprobColumn | None = None
    """The ids that the request named, at each new token's place."""
    input_token_ids: LogprobColumn | None = None
    hidden_states: Sequence[Any] | None = None
    """One entry a request: a list of rows of numbers, of whatever shape; a row is sent flat."""


#: (log probability, token id, its text): None for no log probability, and for a text not asked for.
Logprob: TypeAlias = "tuple[float | None, int, str | None]"


@dataclass(frozen=True, kw_only=True)
class Logprobs:
    """Log probabilities of one piece of a request's output.

    Those of the output belong to the tokens of this piece; those of the input come once, with the
    first piece. Ragged families have a list a position, None where a position has none.
    """

    output: list[Logprob] = field(default_factory=list)
    input: list[Logprob] = field(default_factory=list)
    output_top: list[list[Logprob] | None] = field(default_factory=list)
    input_top: list[list[Logprob] | None] = field(default_factory=list)
    output_token_ids: list[list[Logprob] | None] = field(default_factory=list)
    input_token_ids: list[list[Logprob] | None] = field(default_factory=list)


@dataclass(frozen=True)
class Extras:
    """What came for one request at once."""

    logprobs: Logprobs
    hidden_states: list[NDArray[np.float32]]


class PendingExtras:
    """What has come for a request and was not handed over yet.

    Output families pile up, as output does. Input families are those of the first step that brings
    them, and of several rows of hidden states the last ones count.
    """

    def __init__(self) -> None:
        self._staged: list[Extras] = []
        self._set_once: set[str] = set()
        self._merged: dict[str, list[Any]] = {}
        self._hidden_states: list[NDArray[np.float32]] = []

    def stage(self, extras: Extras) -> None:
        """Keep what belongs to the tokens that come next. One step may bring several pieces."""
        self._staged.append(extras)

    def merge(self) -> None:
        """The tokens have come."""
        if not self._staged:
            return
        step: dict[str, list[Any]] = {}
        hidden_states: list[NDArray[np.float32]] = []
        for extras in self._staged:
            for name in FIELDS.values():
                entries = getattr(extras.logprobs, name)
                if entries:
                    step.setdefault(name, []).extend(entries)
            hidden_states += extras.hidden_states
        self._staged.clear()
        for name, entries in step.items():
            if name.startswith("input"):
                if name in self._set_once:
                    continue
                self._set_once.add(name)
            self._merged.setdefault(name, []).extend(entries)
        self._hidden_states = hidden_states or self._hidden_states

    def take(self) -> tuple[Logprobs | None, list[NDArray[np.float32]] | None]:
        """Hand over what was merged; None for nothing."""
        merged, self._merged = self._merged, {}
        hidden_states, self._hidden_states = self._hidden_states, []
        return (Logprobs(**merged) if merged else None), hidden_states or None
