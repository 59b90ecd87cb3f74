"""How sampling parameters travel: a row of columns, and a map of what is rare.

The columns are what an engine reads in its loop. The order in memory is by size, then as declared,
so that the row has no holes:

    f8  temperature top_p min_p frequency_penalty presence_penalty repetition_penalty
    i8  max_new_tokens (-1: no limit)  min_new_tokens  sampling_seed (valid if has_seed)
    i4  top_k  stream_interval (0: unset)  stop_str_max_len  stop_regex_max_len
    ?   ignore_eos skip_special_tokens spaces_between_special_tokens no_stop_trim has_seed

The extras are a msgpack map that holds only what is set; nothing set is no bytes at all.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np

from manager.errors import CodecError, ValidationError
from manager.sampling.params import PARAMETERS

# Columns that are no parameter of a client: found while normalizing.
DERIVED_COLUMNS: Final = {
    "stop_str_max_len": "<i4",
    "stop_regex_max_len": "<i4",
    "has_seed": "?",
}


def _columns() -> list[tuple[str, str]]:
    columns = [(name, parameter.column) for name, parameter in PARAMETERS.items() if parameter.column]
    columns += DERIVED_COLUMNS.items()
    return sorted(
        columns, key=lambda column: (-np.dtype(column[1]).itemsize, np.dtype(column[1]).kind != "f")
    )


# One row per request, aligned, little-endian on every machine.
SAMPLING_DTYPE: Final = np.dtype(_columns(), align=True)

# Stops are no parameters under these names, but the engine needs them to look for.
_STOP_EXTRAS: Final = {"stop_strs": "stop", "stop_regex_strs": "stop_regex"}

# name in the map -> the parameter whose kind checks it
EXTRA_NAMES: Final[dict[str, str]] = {
    **{name: name for name, parameter in PARAMETERS.items() if parameter.extra is not None},
    **_STOP_EXTRAS,
}

_Extras: Any = msgspec.defstruct(
    "Extras",
    [
        (name, (list[str] if name in _STOP_EXTRAS else PARAMETERS[source].extra) | None, None)
        for name, source in EXTRA_NAMES.items()
    ],
    omit_defaults=True,
    forbid_unknown_fields=True,
)
_EXTRAS_ENCODER: Final = msgspec.msgpack.Encoder()
_EXTRAS_DECODER: Final = msgspec.msgpack.Decoder(_Extras)


def encode_extras(values: dict[str, Any]) -> bytes:
    """The values as msgpack; their names are in EXTRA_NAMES. b"" if there are none."""
    return _EXTRAS_ENCODER.encode(values) if values else b""


def decode_extras(data: bytes) -> dict[str, Any]:
    """The inverse of `encode_extras`. Raises CodecError for what no checked request can hold.

    The bytes come from another process, so every value passes the same check as a client's.
    """
    if not data:
        return {}
    try:
        extras = _EXTRAS_DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(f"sampling extras are damaged: length={len(data)}, why={error}") from error
    values: dict[str, Any] = {}
    for name, source in EXTRA_NAMES.items():
        value = getattr(extras, name)
        if value is None:
            continue
        try:
            values[name] = PARAMETERS[source].kind.check(source, value)
        except ValidationError as error:
            raise CodecError(f"sampling extras are damaged: length={len(data)}, why={error}") from error
    return values
