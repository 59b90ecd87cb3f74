"""Why a generation ended: what the scheduler says, kept key for key.

The dictionary of the scheduler is echoed to the client as it came, so it is stored as it came
and only *read* through methods. A kind that nobody here knows passes through untouched: one
new finish type must never cost a whole batch its frame.

On the wire the common cases are a code and a number, as columns. Everything else is code
DETAILS with the dictionary as msgpack. `decode` is the exact inverse of `encode`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from manager.errors import CodecError

if TYPE_CHECKING:
    from collections.abc import Mapping

INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1

# What a client is told when an abort names a status but no reason.
DEFAULT_ABORT_MESSAGE: Final = "request aborted"


class FinishKind(enum.Enum):
    """The kinds that have a meaning here. A known type with a wrongly typed field is UNKNOWN."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    UNKNOWN = "unknown"


class FinishCode(enum.IntEnum):
    """The finish column of a batch frame, u8."""

    NONE = 0
    """Not finished."""
    STOP = 1
    """Stopped; nothing said about what matched. No value."""
    STOP_TOKEN = 2
    """Stopped at a token. Value: its id."""
    LENGTH = 3
    """Reached the limit. Value: the limit."""
    ABORT = 4
    """Aborted; nothing more is said. No value."""
    DETAILS = 255
    """Anything else. Details: the dictionary as msgpack."""


#: What a finish column may hold.
FINISH_CODES: Final = frozenset(int(code) for code in FinishCode)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_matched(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_int(item) for item in value)
    return isinstance(value, str) or _is_int(value)


def _classify(raw: Mapping[str, Any]) -> FinishKind:
    """The kind by type and shape. An absent or null field is incomplete, not wrong."""

    def well_typed(key: str, check: Any) -> bool:  # noqa: ANN401 -- a predicate of this module
        value = raw.get(key)
        return value is None or bool(check(value))

    kind = raw.get("type")
    if kind == "stop" and well_typed("matched", _is_matched):
        return FinishKind.STOP
    if kind == "length" and well_typed("length", _is_int):
        return FinishKind.LENGTH
    if (
        kind == "abort"
        and well_typed("message", lambda value: isinstance(value, str))
        and well_typed("status_code", _is_int)
        and well_typed("err_type", lambda value: isinstance(value, str))
    ):
        return FinishKind.ABORT
    return FinishKind.UNKNOWN


@dataclass(frozen=True)
class FinishReason:
    """A finish dictionary and its kind. Build it with `from_mapping`, `stop`, `length` or `abort`."""

    kind: FinishKind
    raw: Mapping[str, Any]

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> FinishReason:
        """Take over what a scheduler said, whatever it is."""
        return cls(kind=_classify(raw), raw=dict(raw))

    @classmethod
    def stop(cls, matched: int | str | list[int] | None = None) -> FinishReason:
        """Ended by a stop token, stop string or stop regex, or by the model's own end."""
        if matched is None:
            return cls.from_mapping({"type": "stop"})
        # Engines hand over numpy integers, which are no ints to JSON and msgpack.
        return cls.from_mapping(
            {"type": "stop", "matched": matched if isinstance(matched, (str, list)) else int(matched)}
        )

    @classmethod
    def length(cls, length: int) -> FinishReason:
        """Ended because `length` tokens were generated."""
        return cls.from_mapping({"type": "length", "length": int(length)})

    @classmethod
    def abort(
        cls, message: str | None = None, *, status_code: int | None = None, err_type: str | None = None
    ) -> FinishReason:
        """Ended from outside. With a status code it is an error, without one a normal end."""
        if message is None and status_code is None and err_type is None:
            return cls.from_mapping({"type": "abort"})
        return cls.from_mapping(
            {"type": "abort", "message": message, "status_code": status_code, "err_type": err_type}
        )

    def to_mapping(self) -> dict[str, Any]:
        """The dictionary, key for key as it came, nulls included."""
        return dict(self.raw)

    def matched(self) -> int | str | list[int] | None:
        """What a stop matched: a token id, a text, several ids. None for every other kind."""
        if self.kind is not FinishKind.STOP:
            return None
        matched: int | str | list[int] | None = self.raw.get("matched")
        return matched

    def abort_status(self) -> tuple[int, str] | None:
        """(status code, message) of an abort that is an error.

        None for everything else: an abort without a status is a normal completion.
        """
        if self.kind is not FinishKind.ABORT or self.raw.get("status_code") is None:
            return None
        return self.raw["status_code"], self.raw.get("message") or DEFAULT_ABORT_MESSAGE

    def kind_name(self) -> str:
        """The scheduler's own word for the kind, also where it is unknown here."""
        name = self.raw.get("type")
        return name if isinstance(name, str) else FinishKind.UNKNOWN.value


def encode(reason: FinishReason | None) -> tuple[FinishCode, int, bytes]:
    """(code, value as int64, details) of one row.

    Raises CodecError if the dictionary holds something msgpack cannot carry.
    """
    if reason is None:
        return FinishCode.NONE, 0, b""
    raw = reason.raw
    if len(raw) == 1:
        if reason.kind is FinishKind.STOP:
            return FinishCode.STOP, 0, b""
        if reason.kind is FinishKind.ABORT:
            return FinishCode.ABORT, 0, b""
    elif len(raw) == 2:
        if reason.kind is FinishKind.STOP and _fits_column(raw.get("matched")):
            return FinishCode.STOP_TOKEN, raw["matched"], b""
        if reason.kind is FinishKind.LENGTH and _fits_column(raw.get("length")):
            return FinishCode.LENGTH, raw["length"], b""
    try:
        return FinishCode.DETAILS, 0, msgspec.msgpack.encode(raw)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise CodecError(
            f"finish reason cannot be carried: type={reason.kind_name()!r}, why={error}"
        ) from error


def _fits_column(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and INT64_MIN <= value <= INT64_MAX


def _refuse_extension(code: int, _data: memoryview) -> Any:  # noqa: ANN401 -- never returns
    """The dictionary is echoed as JSON, which has no extension types."""
    raise CodecError(f"finish details hold an extension type: code={code}")


_DETAILS = msgspec.msgpack.Decoder(dict[str, Any], ext_hook=_refuse_extension)


def decode(code: int, value: int, details: bytes) -> FinishReason | None:
    """The inverse of `encode`. Raises CodecError for whatever `encode` cannot have written."""
    if code == FinishCode.DETAILS:
        if value != 0:
            raise CodecError(f"finish code carries no value: code={code}, value={value}")
        try:
            raw = _DETAILS.decode(details)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise CodecError(f"finish details are damaged: length={len(details)}, why={error}") from error
        return FinishReason.from_mapping(raw)
    if details:
        raise CodecError(f"finish code carries no details: code={code}, length={len(details)}")
    if code == FinishCode.STOP_TOKEN:
        return FinishReason.stop(value)
    if code == FinishCode.LENGTH:
        return FinishReason.length(value)
    if value != 0:
        raise CodecError(f"finish code carries no value: code={code}, value={value}")
    if code == FinishCode.NONE:
        return None
    if code == FinishCode.STOP:
        return FinishReason.stop()
    if code == FinishCode.ABORT:
        return FinishReason.abort()
    raise CodecError(f"finish code is unknown: code={code}")


#: What these carry is a value of any kind, or none: nothing of it can be wrong.
_TAKE_ANY_VALUE: Final = frozenset({FinishCode.STOP_TOKEN, FinishCode.LENGTH})


def check_end(row: int, code: int, value: int, details: bytes) -> None:
    """Refuse an end that `decode` could not read. Raises ValueError with its row."""
    if not details and (code in _TAKE_ANY_VALUE or (not value and code != FinishCode.DETAILS)):
        return
    try:
        decode(code, value, details)
    except CodecError as error:
        raise ValueError(f"end of a request cannot be read: row={row}, why={error}") from error
