"""The sampling parameters of a request: the one place where each is declared.

Default, type, bounds, wire column and documentation of a parameter are one declaration below;
everything else (checks, `SAMPLING_DTYPE`, the extras codec, the reference table) is derived.

A SamplingParams that exists is within the bounds of every single field. What needs the
vocabulary, the tokenizer or two fields at once waits for `NormalizedSampling`.

Names, defaults and bounds are those of SGLang's SamplingParams, so that its clients can stay as
they are; bounds it lacks are there because a larger value breaks an engine's int32 or float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from manager.errors import ValidationError
from manager.sampling.kinds import (
    FLOAT32_MAX,
    INT32_MAX,
    INT64_MAX,
    INT64_MIN,
    Flag,
    Grammar,
    Integer,
    JsonObject,
    JsonSchema,
    Kind,
    LogitBias,
    Number,
    RegexGrammar,
    Strings,
    TokenIds,
    shown,
    wrong_type,
)

if TYPE_CHECKING:
    from manager.sampling.normalized import NormalizedSampling

# "All of the vocabulary", for any vocabulary; SGLang's number, which engines compare with.
TOP_K_ALL: Final = 1 << 30

# Samples of one prompt. The bound of the OpenAI API. Each is a request of its own for the scheduler.
SAMPLES_MAX: Final = 128

# SGLang's server: every stop is looked for in the output of every step.
STOP_COUNT_MAX: Final = 32
STOP_REGEX_LENGTH_MAX: Final = 256

# A stream holds back what may be the beginning of a stop, so the longest one bounds the delay and
# the memory. SGLang has no bound; a page of text is not a stop.
STOP_LENGTH_MAX: Final = 4096


@dataclass(frozen=True)
class Parameter:
    """What the schema says of one field, apart from its name and default."""

    kind: Kind
    meaning: str
    optional: bool
    """Whether null is a value of its own. Elsewhere null means the default."""
    column: str | None
    """numpy type of its column, or None if it does not travel as a column."""
    unset: int
    """What the column holds for null."""
    extra: Any
    """Type in the extras map, or None if it does not travel there."""


def _parameter(
    default: object,
    kind: Kind,
    meaning: str,
    *,
    optional: bool = False,
    column: str | None = None,
    unset: int = 0,
    extra: Any = None,  # noqa: ANN401 -- a type expression
) -> Any:  # noqa: ANN401 -- stands where the field's default stands
    parameter = Parameter(kind, meaning, optional or default is None, column, unset, extra)
    return dataclasses.field(default=default, metadata={"parameter": parameter})


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Raises ValidationError, with the field's name."""

    max_new_tokens: int | None = _parameter(
        128,
        Integer(0, INT32_MAX),
        "Tokens to generate at most. Null: no limit but the context.",
        optional=True,
        column="<i8",
        unset=-1,
    )
    stop: str | Sequence[str] | None = _parameter(
        None, Strings(STOP_COUNT_MAX, STOP_LENGTH_MAX), "Texts that end the generation."
    )
    stop_token_ids: Sequence[int] | None = _parameter(None, TokenIds(), "Tokens that end the generation.")
    stop_regex: str | Sequence[str] | None = _parameter(
        None,
        Strings(STOP_COUNT_MAX, STOP_REGEX_LENGTH_MAX),
        "Regular expressions that end the generation; only those that cannot stall the server.",
    )
    temperature: float = _parameter(
        1.0,
        Number(0.0, FLOAT32_MAX),
        "Higher is more random. Below 1e-6 the likeliest token is taken.",
        column="<f8",
    )
    top_p: float = _parameter(
        1.0,
        Number(0.0, 1.0, low_included=False),
        "Sample from the likeliest tokens that together have this probability.",
        column="<f8",
    )
    top_k: int = _parameter(
        TOP_K_ALL,
        Integer(1, INT32_MAX, also=-1),
        "Sample from this many of the likeliest tokens. -1: all.",
        column="<i4",
    )
    min_p: float = _parameter(
        0.0, Number(0.0, 1.0), "Drop tokens less likely than this part of the likeliest.", column="<f8"
    )
    frequency_penalty: float = _parameter(
        0.0, Number(-2.0, 2.0), "Taken from a token's logit for each time it was generated.", column="<f8"
    )
    presence_penalty: float = _parameter(
        0.0, Number(-2.0, 2.0), "Taken from a token's logit once it was generated.", column="<f8"
    )
    repetition_penalty: float = _parameter(
        1.0,
        Number(0.0, 2.0, low_included=False),
        "Above 1: tokens of prompt and output get less likely.",
        column="<f8",
    )
    min_new_tokens: int = _parameter(
        0,
        Integer(0, INT32_MAX),
        "Tokens to generate at least: until then nothing ends the generation.",
        column="<i8",
    )
    n: int = _parameter(1, Integer(1, SAMPLES_MAX), "Samples of the prompt, each a stream of its own.")
    json_schema: str | None = _parameter(None, JsonSchema(), "The output is JSON of this schema.", extra=str)
    regex: str | None = _parameter(None, RegexGrammar(), "The output matches this pattern.", extra=str)
    ebnf: str | None = _parameter(None, Grammar(), "The output follows this grammar.", extra=str)
    structural_tag: str | None = _parameter(
        None, Grammar(), "The output is constrained between these tags.", extra=str
    )
    ignore_eos: bool = _parameter(False, Flag(), "Go on after the model's own end.", column="?")
    skip_special_tokens: bool = _parameter(True, Flag(), "Leave special tokens out of the text.", column="?")
    spaces_between_special_tokens: bool = _parameter(
        True, Flag(), "Put spaces between special tokens in the text.", column="?"
    )
    no_stop_trim: bool = _parameter(False, Flag(), "Leave the matched stop in the text.", column="?")
    stream_interval: int | None = _parameter(
        None, Integer(1, INT32_MAX), "Tokens between two deltas. Null: the engine's own.", column="<i4"
    )
    logit_bias: Mapping[str, float] | Mapping[int, float] | None = _parameter(
        None, LogitBias(), "Added to the logits of these tokens.", extra=dict[int, float]
    )
    sampling_seed: int | None = _parameter(
        None,
        Integer(INT64_MIN, INT64_MAX),
        "Makes sampling repeatable. Null: the engine's own.",
        column="<i8",
    )
    custom_params: Mapping[str, Any] | None = _parameter(
        None, JsonObject(), "For the engine's own extensions; carried untouched.", extra=dict[str, Any]
    )

    def __post_init__(self) -> None:
        for name, default, parameter in _CHECKS:
            value = getattr(self, name)
            if value is default:
                continue
            if value is None:
                if not parameter.optional:
                    object.__setattr__(self, name, default)
                continue
            canonical = parameter.kind.check(name, value)
            if canonical is not value:
                object.__setattr__(self, name, canonical)

    @classmethod
    def from_mapping(cls, mapping: object) -> SamplingParams:
        """The parameters of a client's object. Unknown and internal keys are errors.

        A null means the default, except for `max_new_tokens`, where absent is the default and
        null is "no limit".
        """
        if not isinstance(mapping, Mapping):
            raise wrong_type("sampling_params", mapping, "object")
        for key in mapping:
            # Also before the call below, which would report it in Python's words.
            if not isinstance(key, str) or key not in PARAMETERS:
                raise ValidationError(
                    f"sampling parameter is unknown: name={shown(key)}",
                    field=key if isinstance(key, str) else "sampling_params",
                )
        return cls(**mapping)

    def normalize(self, *, vocab_size: int, has_tokenizer: bool) -> NormalizedSampling:
        """Make it ready for one deployment. Raises ValidationError with the field's name."""
        # The normalized form is built on the schema in this module, so it can only be met here.
        from manager.sampling.normalized import NormalizedSampling  # noqa: PLC0415

        return NormalizedSampling.of(self, vocab_size=vocab_size, has_tokenizer=has_tokenizer)


PARAMETERS: Final[dict[str, Parameter]] = {
    field.name: field.metadata["parameter"] for field in dataclasses.fields(SamplingParams)
}

DEFAULTS: Final[dict[str, Any]] = {field.name: field.default for field in dataclasses.fields(SamplingParams)}

_CHECKS: Final = [(name, DEFAULTS[name], parameter) for name, parameter in PARAMETERS.items()]


def merge_preferred(
    preferred: Mapping[str, object], request: Mapping[str, object] | None
) -> dict[str, object]:
    """The operator's preferences, overruled by every key the request has.

    Also by a key whose value is null or the default: the client said so.
    """
    return {**preferred, **(request or {})}
