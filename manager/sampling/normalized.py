"""Sampling parameters that are ready for one deployment: checked against vocabulary and tokenizer.

This is the only form that travels. It can be made in one way, `NormalizedSampling.of`, so nothing
reaches a scheduler unchecked; making it again from its own parameters gives the same.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from manager import stop_regex
from manager.errors import ValidationError
from manager.sampling.params import PARAMETERS, TOP_K_ALL, SamplingParams
from manager.sampling.wire import DERIVED_COLUMNS, EXTRA_NAMES, SAMPLING_DTYPE, encode_extras

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# Below this a division by the temperature overflows float32 logits; SGLang's number.
GREEDY_TEMPERATURE: Final = 1e-6

# At most one of these can rule the output.
GRAMMARS: Final = ("json_schema", "regex", "ebnf", "structural_tag")

_COLUMN_NAMES: Final = SAMPLING_DTYPE.names or ()
_UNSET: Final = [0 if name in DERIVED_COLUMNS else PARAMETERS[name].unset for name in _COLUMN_NAMES]


def _getter(names: Iterable[str]) -> Callable[[NormalizedSampling], tuple[Any, ...]]:
    """Fetches parameters and derived values by name: the row of every request is made with it."""
    getter: Callable[[NormalizedSampling], tuple[Any, ...]] = attrgetter(
        *(f"params.{name}" if name in PARAMETERS else name for name in names)
    )
    return getter


_COLUMNS: Final = _getter(_COLUMN_NAMES)
_EXTRAS: Final = _getter(EXTRA_NAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalizedSampling:
    """Parameters whose every value an engine can use as it is."""

    params: SamplingParams
    """Greedy spelled as top_k 1, top_k -1 spelled out."""
    stop_strs: tuple[str, ...]
    stop_regex_strs: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    """Travels as a ragged int32 column."""
    stop_str_max_len: int
    """The longest stop string in bytes of UTF-8; a tokenizer may replace it by a count of tokens.

    Bytes and not characters: one character can be several tokens, never more than its bytes.
    """
    stop_regex_max_len: int
    """The longest text a stop regex can match, capped at 2^30."""

    @classmethod
    def of(cls, params: SamplingParams, *, vocab_size: int, has_tokenizer: bool) -> NormalizedSampling:
        """Normalize and verify. Raises ValidationError with the field's name."""
        changes: dict[str, Any] = {}
        if params.temperature < GREEDY_TEMPERATURE:
            changes = {"temperature": 1.0, "top_k": 1}
        elif params.top_k == -1:
            changes = {"top_k": TOP_K_ALL}
        if changes:
            params = dataclasses.replace(params, **changes)
        stop_strs = tuple(params.stop or ())
        stop_regex_strs = tuple(params.stop_regex or ())
        normalized = cls(
            params=params,
            stop_strs=stop_strs,
            stop_regex_strs=stop_regex_strs,
            stop_token_ids=tuple(params.stop_token_ids or ()),
            stop_str_max_len=max((len(text.encode()) for text in stop_strs), default=0),
            stop_regex_max_len=max((stop_regex.admit(text) for text in stop_regex_strs), default=0),
        )
        normalized.verify(vocab_size=vocab_size, has_tokenizer=has_tokenizer)
        return normalized

    def verify(self, *, vocab_size: int, has_tokenizer: bool) -> None:
        """Check what depends on the deployment, or on two fields at once."""
        params = self.params
        if not has_tokenizer:
            for field in ("stop", "stop_regex", "min_new_tokens"):
                if getattr(params, field):
                    raise ValidationError(f"{field} needs a tokenizer, and this server has none", field=field)
        limit = params.max_new_tokens
        if limit is not None and params.min_new_tokens > limit:
            raise ValidationError(
                "min_new_tokens is above max_new_tokens: "
                f"value={params.min_new_tokens}, max_new_tokens={limit}",
                field="min_new_tokens",
            )
        for field, token_ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", params.logit_bias or ()),
        ):
            outside = max((int(token_id) for token_id in token_ids), default=-1)
            if outside >= vocab_size:
                raise ValidationError(
                    f"{field} names a token outside of the vocabulary: "
                    f"value={outside}, allowed=0..{vocab_size - 1}",
                    field=field,
                )
        grammars = [name for name in GRAMMARS if getattr(params, name) is not None]
        if len(grammars) > 1:
            raise ValidationError(
                f"at most one of {', '.join(GRAMMARS)} can be set: set={', '.join(grammars)}",
                field=grammars[1],
            )

    def with_max_new_tokens(self, max_new_tokens: int | None) -> NormalizedSampling:
        """The same, with another limit. The caller answers for min_new_tokens."""
        return dataclasses.replace(
            self, params=dataclasses.replace(self.params, max_new_tokens=max_new_tokens)
        )

    @property
    def has_seed(self) -> bool:
        """Whether the client chose the seed; any int64 can be one, so none can say "unset"."""
        return self.params.sampling_seed is not None

    def to_row(self) -> tuple[float | int | bool, ...]:
        """One row of SAMPLING_DTYPE."""
        return tuple(
            unset if value is None else value for value, unset in zip(_COLUMNS(self), _UNSET, strict=True)
        )

    def extras(self) -> bytes:
        """What is rare and has no fixed shape, as msgpack; b"" when nothing is set."""
        return encode_extras(
            {name: value for name, value in zip(EXTRA_NAMES, _EXTRAS(self), strict=True) if value}
        )
