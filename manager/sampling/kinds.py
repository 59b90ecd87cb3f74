"""The kinds of value a sampling parameter can be: number, integer, flag, text, ...

A kind checks one value on its own: exact type, then range. It gives back the canonical form, and
takes its own canonical form again unchanged. What needs the vocabulary, the tokenizer or another
field is not decided here.

Types are exact because coercion hides mistakes: True is no number, "5" is not 5, the string
"false" is truthy. Ranges are in what an engine can hold: tensors are float32, counts int32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from manager.errors import ValidationError

INT32_MAX: Final = 2**31 - 1
INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1
UINT64_MAX: Final = 2**64 - 1

# Numbers end up in float32 tensors: beyond the largest a value is infinite there, and below the
# smallest normal one devices that flush subnormals make it 0.
FLOAT32_MAX: Final = 3.4028234663852886e38
FLOAT32_NORMAL_MIN: Final = 2.0**-126

# Well below Python's own recursion limit and msgspec's, and deeper than any parameter we have seen.
JSON_DEPTH_MAX: Final = 32

# Characters of a value that an error shows; the client knows the rest.
SHOWN_MAX: Final = 60


def shown(value: object) -> str:
    """A value as an error text shows it: short, printable, and safe to put into JSON."""
    # repr of an int beyond 4300 digits is itself an error in newer Pythons.
    if isinstance(value, int) and value.bit_length() > 128:
        return f"<integer of {value.bit_length()} bits>"
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, str):
        # repr escapes what is not printable, lone surrogates too.
        text = repr(value[:SHOWN_MAX])
        return text if len(value) <= SHOWN_MAX else f"{text}... ({len(value)} characters)"
    return f"<{type(value).__name__}>"


def wrong_type(field: str, value: object, wanted: str) -> ValidationError:
    """The error for a value of a type that `field` does not take."""
    return ValidationError(
        f"{field} has the wrong type: value={shown(value)}, type={type(value).__name__}, wanted={wanted}",
        field=field,
    )


def out_of_range(field: str, value: object, allowed: str) -> ValidationError:
    """The error for a value of the right type that is not allowed."""
    return ValidationError(f"{field} is out of range: value={shown(value)}, allowed={allowed}", field=field)


def check_text(field: str, value: object) -> str:
    """`value` as a string that has a UTF-8 form. Raises ValidationError for everything else."""
    if not isinstance(value, str):
        raise wrong_type(field, value, "string")
    # A JSON body may spell half a surrogate pair, and every later encode would raise on it.
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValidationError(
            f"{field} is not valid text: value={shown(value)}, why=lone surrogate", field=field
        ) from None
    return value


class Kind(Protocol):
    """What the schema needs of a kind."""

    @property
    def type_name(self) -> str:
        """The type in words, for documentation."""

    @property
    def bounds(self) -> str:
        """What is allowed, in words, for documentation. Empty if everything is."""

    def check(self, field: str, value: object) -> Any:  # noqa: ANN401 -- each kind has its own type
        """The canonical form of `value`. Raises ValidationError naming field, value and bound."""


@dataclass(frozen=True)
class Number:
    """A finite float, or an int that stands for one."""

    low: float
    high: float
    low_included: bool = True

    type_name = "number"

    @property
    def bounds(self) -> str:
        """As an interval."""
        if self.high == FLOAT32_MAX:
            return f"at least {self.low:g}, finite as float32"
        return f"{'[' if self.low_included else '('}{self.low:g}, {self.high:g}]"

    def check(self, field: str, value: object) -> float:
        """A float within the interval. NaN and infinities are within none."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise wrong_type(field, value, self.type_name)
        low = self.low if self.low_included else max(self.low, FLOAT32_NORMAL_MIN)
        # Written so that NaN fails: a test for what is wrong would let it through.
        if not low <= value <= self.high:
            raise out_of_range(field, value, self.bounds)
        return float(value)


@dataclass(frozen=True)
class Integer:
    """An int that fits its column. `also` is one more value outside of the interval."""

    low: int
    high: int
    also: int | None = None

    type_name = "integer"

    @property
    def bounds(self) -> str:
        """As an interval."""
        interval = f"[{_power(self.low)}, {_power(self.high)}]"
        return interval if self.also is None else f"{self.also} or {interval}"

    def check(self, field: str, value: object) -> int:
        """An int within the interval. 2.0 is no int, and neither is True."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(field, value, self.type_name)
        if not self.low <= value <= self.high and value != self.also:
            raise out_of_range(field, value, self.bounds)
        return value


def _power(value: int) -> str:
    """A bound as a person writes it."""
    return {INT32_MAX: "2^31 - 1", INT64_MAX: "2^63 - 1", INT64_MIN: "-2^63"}.get(value, str(value))


#: Characters of a pattern that constrains the output: looking at one takes 0.4 us, on the event loop.
REGEX_LENGTH_MAX: Final = 1 << 16


@dataclass(frozen=True)
class Flag:
    """A bool."""

    type_name = "boolean"
    bounds = ""

    def check(self, field: str, value: object) -> bool:
        """A bool, and nothing that merely counts as one."""
        if not isinstance(value, bool):
            raise wrong_type(field, value, self.type_name)
        return value


@dataclass(frozen=True)
class Grammar:
    """The text of a constraint on the output. Empty means unset."""

    type_name = "string"
    bounds = "empty means unset"

    def check(self, field: str, value: object) -> str | None:
        """The text, or None if it is empty."""
        return check_text(field, value) or None


@dataclass(frozen=True)
class JsonSchema(Grammar):
    """A JSON schema as text."""

    bounds = "a JSON object, true or false; empty means unset"

    def check(self, field: str, value: object) -> str | None:
        """The text as it is, known to parse: engines hand it to a parser that may not survive it."""
        text = super().check(field, value)
        if text is None:
            return None
        try:
            schema = msgspec.json.decode(text)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValidationError(
                f"{field} does not parse as JSON: value={shown(text)}, why={error}", field=field
            ) from None
        if not isinstance(schema, (dict, bool)):
            raise out_of_range(field, text, self.bounds)
        return text


@dataclass(frozen=True)
class RegexGrammar(Grammar):
    """A regular expression that constrains the output, in the dialect of the engine."""

    bounds = f"balanced, at most {REGEX_LENGTH_MAX} characters; empty means unset"

    def check(self, field: str, value: object) -> str | None:
        """The text as it is. Only what no dialect accepts is refused: unbalanced groups and classes."""
        text = super().check(field, value)
        if text is None:
            return None
        if len(text) > REGEX_LENGTH_MAX:
            raise ValidationError(
                f"{field} is too long: characters={len(text)}, max={REGEX_LENGTH_MAX}", field=field
            )
        fault = _regex_fault(text)
        if fault:
            raise ValidationError(
                f"{field} is not a regular expression: value={shown(text)}, why={fault}", field=field
            )
        return text


def _regex_fault(pattern: str) -> str:
    """What is unbalanced in a pattern, or an empty string."""
    depth = 0
    class_start: int | None = None
    index = 0
    while index < len(pattern):
        character = pattern[index]
        if character == "\\":
            if index + 1 == len(pattern):
                return "ends in a backslash"
            index += 1
        elif class_start is not None:
            # A leading ] is literal, also after the ^ of a negated class.
            if character == "]" and pattern[class_start + 1 : index] not in {"", "^"}:
                class_start = None
        elif character == "[":
            class_start = index
        elif character == "(":
            depth += 1
        elif character == ")":
            depth -= 1
            if depth < 0:
                return "closes a group that was never opened"
        index += 1
    if class_start is not None:
        return "character class is not closed"
    return "group is not closed" if depth else ""


@dataclass(frozen=True)
class Strings:
    """One string or a list of them; none may be empty. Kept as a tuple."""

    count_max: int
    length_max: int
    """Bytes of UTF-8 of each string."""

    type_name = "string or list of strings"

    @property
    def bounds(self) -> str:
        """In words."""
        return f"at most {self.count_max}, each of 1 to {self.length_max} bytes"

    def check(self, field: str, value: object) -> tuple[str, ...] | None:
        """A tuple of strings, or None if the list is empty.

        An empty string would match at the first token, so it is refused and not ignored.
        """
        if isinstance(value, str):
            value = (value,)
        if not isinstance(value, (list, tuple)):
            raise wrong_type(field, value, self.type_name)
        if len(value) > self.count_max:
            raise ValidationError(
                f"{field} has too many entries: count={len(value)}, max={self.count_max}", field=field
            )
        for text in value:
            length = len(check_text(field, text).encode())
            if not 1 <= length <= self.length_max:
                raise ValidationError(
                    f"{field} has an entry of a wrong length: value={shown(text)}, bytes={length}, "
                    f"allowed=1..{self.length_max}",
                    field=field,
                )
        return tuple(value) or None


@dataclass(frozen=True)
class TokenIds:
    """A list of token ids. Kept as a tuple without repeats, in the order given."""

    type_name = "list of integers"
    bounds = "each in the vocabulary"

    def check(self, field: str, value: object) -> tuple[int, ...] | None:
        """A tuple of ids that fit int32, or None if the list is empty."""
        if not isinstance(value, (list, tuple)):
            raise wrong_type(field, value, self.type_name)
        one = Integer(0, INT32_MAX)
        return tuple(dict.fromkeys(one.check(field, item) for item in value)) or None


@dataclass(frozen=True)
class LogitBias:
    """A map from token id to a number added to its logit. Kept with int keys.

    JSON spells keys as strings, Python callers have ints: both are taken.
    """

    type_name = "map from token id to number"
    bounds = "keys in the vocabulary, values finite as float32"

    def check(self, field: str, value: object) -> dict[int, float] | None:
        """A fresh dict, or None if the map is empty."""
        if not isinstance(value, Mapping):
            raise wrong_type(field, value, self.type_name)
        number = Number(-FLOAT32_MAX, FLOAT32_MAX)
        bias: dict[int, float] = {}
        for key, item in value.items():
            token_id = self._token_id(field, key)
            if token_id in bias:
                raise ValidationError(f"{field} names a token twice: key={shown(key)}", field=field)
            if isinstance(item, bool) or not isinstance(item, (int, float)):
                raise wrong_type(field, item, f"number for token {token_id}")
            if not -FLOAT32_MAX <= item <= FLOAT32_MAX:
                raise out_of_range(field, item, self.bounds)
            bias[token_id] = number.check(field, item)
        return bias or None

    @staticmethod
    def _token_id(field: str, key: object) -> int:
        if isinstance(key, int):
            return Integer(0, INT32_MAX).check(field, key)
        # int() alone would take " 5 ", "5_0" and the digits of every script.
        if not isinstance(key, str) or not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise ValidationError(f"{field} has a key that is no token id: key={shown(key)}", field=field)
        return Integer(0, INT32_MAX).check(field, int(key))


@dataclass(frozen=True)
class JsonObject:
    """Any JSON object that msgpack can carry."""

    type_name = "object"
    bounds = f"JSON values, at most {JSON_DEPTH_MAX} deep, integers of 64 bits"

    def check(self, field: str, value: object) -> dict[str, Any] | None:
        """A deep copy, so that the caller's later changes do not reach a request on its way."""
        if not isinstance(value, Mapping):
            raise wrong_type(field, value, self.type_name)
        copied: dict[str, Any] = self._copy(field, value, 1)
        return copied or None

    def _copy(self, field: str, value: object, depth: int) -> Any:  # noqa: ANN401 -- JSON
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return check_text(field, value)
        if isinstance(value, int):
            if not INT64_MIN <= value <= UINT64_MAX:
                raise out_of_range(field, value, self.bounds)
            return value
        if isinstance(value, float):
            if not math.isfinite(value):
                raise out_of_range(field, value, "finite")
            return value
        if not isinstance(value, (Mapping, list, tuple)):
            raise wrong_type(field, value, "JSON value")
        if depth > JSON_DEPTH_MAX:
            raise ValidationError(f"{field} is nested too deeply: max={JSON_DEPTH_MAX}", field=field)
        if isinstance(value, Mapping):
            return {check_text(field, key): self._copy(field, item, depth + 1) for key, item in value.items()}
        return [self._copy(field, item, depth + 1) for item in value]
