"""The frames of every ring of a deployment, declared once for both of its ends.

Shapeless and rare things travel as msgpack in a ragged byte column; everything that is there
on every decode step is a typed column. Records are named by type per ring.
"""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from manager.extras import FLAT_FAMILIES, OPTIONS_DTYPE, RAGGED_FAMILIES
from manager.sampling import SAMPLING_DTYPE
from shmring import Column, Schema, Shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from typing_extensions import Buffer


class IngressType(IntEnum):
    """Records from the manager to the scheduler."""

    REQUEST = 1
    ABORT = 2
    CONTROL = 3


class EgressType(IntEnum):
    """Records from the scheduler to a detok worker; the first numbers are SGLang's frame tags."""

    RESULT = 1
    BATCH = 2
    ERROR = 3
    EXTRAS = 4


class RegisterType(IntEnum):
    """Records from the manager to a detok worker."""

    REGISTER = 1
    DEREGISTER = 2
    DECODE = 3


class ReplyType(IntEnum):
    """Records from a detok worker to the manager."""

    TEXT = 1
    FAIL = 2
    ABORT_ASKED = 3
    RESULT = 4
    EXTRAS = 5


class BatchFlag(IntFlag):
    """Flags of a BATCH record."""

    FRESH_TEXT = 1
    """Output does not continue its prompt: the first token starts a text of its own."""


#: One row of REGISTER: how a request's output is decoded.
OUTPUT_DTYPE: Final = np.dtype(
    [
        ("min_new_tokens", "<i8"),
        ("skip_special_tokens", "?"),
        ("spaces_between_special_tokens", "?"),
        ("no_stop_trim", "?"),
        ("logprob_texts", "?"),
    ],
    align=True,
)


def _ids(name: str = "request_ids") -> Column:
    return Column(name, np.uint64)


def _ragged(name: str, dtype: type, counts: str, *, is_optional: bool = False) -> list[Column]:
    return [
        Column(counts, np.uint32, is_optional=is_optional),
        Column(name, dtype, Shape.RAGGED, counts, is_optional=is_optional),
    ]


def _bytes(name: str, *, is_optional: bool = False) -> list[Column]:
    return _ragged(name, np.uint8, f"{name}_lengths", is_optional=is_optional)


def _family(name: str, *, has_texts: bool) -> list[Column]:
    """A family of log probabilities: values and ids by position, or by position and rank."""
    counts = f"{name}_counts"
    columns = [Column(counts, np.uint32, is_optional=True)]
    if name in RAGGED_FAMILIES:
        lengths = f"{name}_lengths"
        columns.append(Column(lengths, np.uint32, Shape.RAGGED, counts, is_optional=True))
        counts = lengths
    columns += [
        Column(f"{name}_values", np.float32, Shape.RAGGED, counts, is_optional=True),
        Column(f"{name}_ids", np.int32, Shape.RAGGED, counts, is_optional=True),
    ]
    if has_texts:
        lengths = f"{name}_texts_lengths"
        columns += [
            Column(lengths, np.uint32, Shape.RAGGED, counts, is_optional=True),
            Column(f"{name}_texts", np.uint8, Shape.RAGGED, lengths, is_optional=True),
        ]
    return columns


def _families(*, has_texts: bool) -> list[Column]:
    names = (*FLAT_FAMILIES, *RAGGED_FAMILIES)
    return [
        *(column for name in names for column in _family(name, has_texts=has_texts)),
        Column("hidden_counts", np.uint32, is_optional=True),
        Column("hidden_lengths", np.uint32, Shape.RAGGED, "hidden_counts", is_optional=True),
        Column("hidden_values", np.float32, Shape.RAGGED, "hidden_lengths", is_optional=True),
    ]


REQUEST: Final = Schema(
    "request",
    IngressType.REQUEST,
    [
        _ids(),
        *_ragged("prompt_ids", np.int32, "prompt_counts"),
        Column("sampling", SAMPLING_DTYPE),
        *_ragged("stop_token_ids", np.int32, "stop_token_counts"),
        Column("options", OPTIONS_DTYPE),
        *_ragged("token_ids_logprob", np.int32, "token_id_logprob_counts"),
        *_bytes("extras"),
        *_bytes("attachments"),  # see manager.attachments
        *_bytes("rids"),
    ],
)
ABORT: Final = Schema("abort", IngressType.ABORT, [_ids()])
CONTROL: Final = Schema("control", IngressType.CONTROL, [_ids("control_ids"), *_bytes("payloads")])

_BATCH_COLUMNS: Final = [
    _ids(),
    *_ragged("token_ids", np.int32, "token_counts"),
    Column("finish_codes", np.uint8),
    Column("finish_values", np.int64, is_optional=True),
    *_bytes("finish_details", is_optional=True),
]

BATCH: Final = Schema("batch", EgressType.BATCH, _BATCH_COLUMNS)
EXTRAS: Final = Schema("extras", EgressType.EXTRAS, [_ids(), *_families(has_texts=False)])
ERROR: Final = Schema("error", EgressType.ERROR, [_ids(), *_bytes("messages")])
RESULT: Final = Schema("result", EgressType.RESULT, [_ids("control_ids"), *_bytes("payloads")])

REGISTER: Final = Schema(
    "register",
    RegisterType.REGISTER,
    [
        _ids(),
        Column("output", OUTPUT_DTYPE),
        *_ragged("prompt_tails", np.int32, "prompt_tail_counts"),
        *_bytes("stops"),  # msgpack: a list of stop strings, or a Stops; b"": none
    ],
)
DEREGISTER: Final = Schema("deregister", RegisterType.DEREGISTER, [_ids()])
#: Ids that are decoded once: a batch that the manager makes, of which each row is a whole text.
DECODE: Final = Schema("decode", RegisterType.DECODE, _BATCH_COLUMNS)

TEXT: Final = Schema(
    "text",
    ReplyType.TEXT,
    [
        _ids(),
        *_bytes("texts"),
        *_ragged("token_ids", np.int32, "token_counts"),
        Column("completion_counts", np.uint32),
        Column("finish_codes", np.uint8),
        Column("finish_values", np.int64, is_optional=True),
        *_bytes("finish_details", is_optional=True),
    ],
)
REPLY_EXTRAS: Final = Schema(
    "reply extras",
    ReplyType.EXTRAS,
    [
        _ids(),
        Column("has_texts", np.bool_),
        *_families(has_texts=True),
    ],
)
FAIL: Final = Schema("fail", ReplyType.FAIL, [_ids(), Column("statuses", np.uint16), *_bytes("messages")])
ABORT_ASKED: Final = Schema("abort asked", ReplyType.ABORT_ASKED, [_ids()])
REPLY_RESULT: Final = Schema("reply result", ReplyType.RESULT, [_ids("control_ids"), *_bytes("payloads")])

ALL: Final = (
    REQUEST,
    ABORT,
    CONTROL,
    BATCH,
    EXTRAS,
    ERROR,
    RESULT,
    REGISTER,
    DEREGISTER,
    DECODE,
    TEXT,
    REPLY_EXTRAS,
    FAIL,
    ABORT_ASKED,
    REPLY_RESULT,
)


def protocol_fingerprint() -> int:
    """A number that two processes share if they speak of the same columns everywhere."""
    value = 0
    for schema in ALL:
        value = (value * 0x100000001B3 ^ schema.fingerprint) % 2**64
    return value


def pack_bytes(items: Sequence[bytes]) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """(n,) lengths and the bytes back to back: a ragged byte column."""
    lengths = np.fromiter(map(len, items), np.uint32, len(items))
    return lengths, np.frombuffer(b"".join(items), np.uint8)


def unpack_bytes(lengths: NDArray[np.uint32], values: NDArray[np.uint8]) -> list[bytes]:
    """The rows of a ragged byte column, copied."""
    data = values.tobytes()
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    return [data[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]


class Stops(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may end a request's text, where there are regexes among it."""

    strings: list[str]
    regexes: list[str]


_STOPS: Final[msgspec.msgpack.Decoder[list[str] | Stops]] = msgspec.msgpack.Decoder(list[str] | Stops)


def pack_stops(strings: Sequence[str], regexes: Sequence[str]) -> bytes:
    """One item of REGISTER's `stops`."""
    if regexes:
        return msgspec.msgpack.encode(Stops(list(strings), list(regexes)))
    return msgspec.msgpack.encode(list(strings)) if strings else b""


def unpack_stops(packed: bytes) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Stop strings and stop regexes. Raises msgspec.MsgspecError for what is neither."""
    if not packed:
        return (), ()
    stops = _STOPS.decode(packed)
    if isinstance(stops, Stops):
        return tuple(stops.strings), tuple(stops.regexes)
    return tuple(stops), ()


_FRAME_HEADER: Final = struct.Struct("<HHIQ")
_COLUMN_ENTRY: Final = struct.Struct("<II")


def recover_request_ids(record: Buffer) -> list[int]:
    """The request ids that a frame names which cannot be read otherwise; empty if there are none.

    The first column of every frame that is about requests is their ids. Only its own place is
    believed here, so ids are found in a frame of a newer schema and in one with a damaged column.
    """
    payload = bytes(memoryview(record))
    if len(payload) < _FRAME_HEADER.size + _COLUMN_ENTRY.size:
        return []
    _version, columns, rows, _fingerprint = _FRAME_HEADER.unpack_from(payload)
    offset, length = _COLUMN_ENTRY.unpack_from(payload, _FRAME_HEADER.size)
    start = _FRAME_HEADER.size + columns * _COLUMN_ENTRY.size
    if columns == 0 or offset != start or length != 8 * rows or offset + length > len(payload):
        return []
    found: list[int] = np.frombuffer(payload, "<u8", rows, offset).tolist()
    return found
