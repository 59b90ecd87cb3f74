"""What a request carries for its engine alone: images, places to fetch a cache from, and the like.

A mapping of the caller's own names, packed once and never looked into: the engine gets what the
caller gave. Only what msgpack can say travels: None, booleans, integers of 64 bits, floats, text,
bytes, and lists and maps of these; a tuple arrives as a list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from manager.errors import CodecError, ValidationError
from manager.sampling.kinds import wrong_type

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(dict[str, Any])
#: Lists around what is packed, one in the other, when it is read on trial: an engine that reads it in
#: the midst of deeper calls than ours has as many left.
_LISTS_AROUND: Final = b"\x91" * 200


def pack_attachments(value: object) -> bytes:
    """Pack one request's attachments; b"" for none. Raises ValidationError for what cannot travel.

    Whatever is let in here `decode_attachments` can read.
    """
    if not isinstance(value, Mapping):
        raise wrong_type("attachments", value, "mapping")
    for name in value:
        if not isinstance(name, str):
            raise ValidationError(
                f"attachments have a name that is no text: type={type(name).__name__}", field="attachments"
            )
    if not value:
        return b""
    try:
        packed = _ENCODER.encode(dict(value))
        msgspec.msgpack.decode(_LISTS_AROUND + packed)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValidationError(f"attachments cannot travel: why={error}", field="attachments") from error
    return packed


def decode_attachments(data: bytes) -> dict[str, Any]:
    """What the caller gave, by its names; {} for b"". Raises CodecError for bytes that are damaged."""
    if not data:
        return {}
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CodecError(f"attachments are damaged: length={len(data)}, why={error}") from error
