"""Single numbers and bytes that callers hand over, checked where they come in and named if they are wrong."""

from __future__ import annotations

import operator
from typing import Final

_UINT64_MAX: Final = 2**64 - 1
_INT64_MAX: Final = 2**63 - 1


def integer(name: str, value: object) -> int:
    """Return an int, or what can be one without a change, numpy's included, as an int. Raises TypeError."""
    try:
        return operator.index(value)  # type: ignore[arg-type]  # whether it is one is asked here
    except TypeError:
        raise TypeError(f"{name} is an integer: {name}={value!r}, type={type(value).__name__}") from None


def request_number(name: str, value: object) -> int:
    """Return an id of a request or of a question. Raises TypeError, or ValueError for what is no u64."""
    number = integer(name, value)
    if not 0 <= number <= _UINT64_MAX:
        raise ValueError(f"{name} does not fit 64 bits: {name}={number}, min=0, max={_UINT64_MAX}")
    return number


def signed(name: str, value: object) -> int:
    """Return an int of 64 bits. Raises TypeError or ValueError."""
    number = integer(name, value)
    if not -_INT64_MAX - 1 <= number <= _INT64_MAX:
        raise ValueError(
            f"{name} does not fit 64 bits: {name}={number}, min={-_INT64_MAX - 1}, max={_INT64_MAX}"
        )
    return number


def as_bytes(name: str, value: object) -> bytes:
    """Return bytes of bytes, a bytearray or a memoryview. Raises TypeError: a list would become zeros."""
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(f"{name} is bytes: type={type(value).__name__}")
    return bytes(value)
