"""Names of requests: the deployment's own number, and the client's string.

The number is the only identity on hot columns. It is never used twice, so nobody has to
police collisions, and its shard is its remainder, so every process can tell the shard of a
request without asking. The client's string is kept exactly as it was sent and travels once.
"""

from __future__ import annotations

import itertools
import secrets
from typing import TYPE_CHECKING

import numpy as np

from manager.errors import ValidationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

# 0 marks an empty slot in tables and columns, so no request may own it.
FIRST_REQUEST_ID = 1

# Bytes of UTF-8, not characters: it is what travels. The bound of SGLang's server.
RID_LENGTH_MAX = 128

# 16 random bytes in hex: the length of a uuid4 without its dashes, as clients know it.
MINTED_RID_LENGTH = 32

# SGLang's mark of a probe; engines that know it keep probes out of their metrics.
HEALTH_RID_PREFIX = "HEALTH_CHECK_"


class RequestIds:
    """The source of request ids: 1, 2, 3, ... as u64, none of them twice.

    Safe to call from several threads. At a million requests a second 2**64 lasts for half a
    million years, so running out is not handled.
    """

    def __init__(self, first: int = FIRST_REQUEST_ID) -> None:
        assert first >= FIRST_REQUEST_ID, f"request id 0 is reserved: first={first}"
        self._numbers = itertools.count(first)

    def take(self) -> int:
        """The next id."""
        # next() on a count is one C call, so two threads can never be given the same number.
        return next(self._numbers)


def shard_of(request_id: int, shards: int) -> int:
    """The shard, in 0..shards-1, that owns a request: a pure function of its id."""
    return request_id % shards


def shards_of(request_ids: NDArray[np.uint64], shards: int) -> NDArray[np.intp]:
    """`shard_of` for a whole column: (n,) uint64 in, (n,) intp out, ready to index with."""
    # The divisor is made a uint64 first: a Python int would be read as int64 by some numpy
    # versions, and uint64 with int64 goes through float64, which loses ids above 2**53.
    remainders: NDArray[np.uint64] = request_ids % np.uint64(shards)
    return remainders.astype(np.intp)


def mint_rid(random_bytes: Callable[[int], bytes] = secrets.token_bytes) -> str:
    """A rid for a client that sent none: 32 lowercase hex digits."""
    return random_bytes(MINTED_RID_LENGTH // 2).hex()


def mint_health_rid(random_bytes: Callable[[int], bytes] = secrets.token_bytes) -> str:
    """A rid for a health probe, told by its prefix from everybody else's."""
    return HEALTH_RID_PREFIX + mint_rid(random_bytes)


def check_rid(rid: object) -> str:
    """The client's rid, unchanged. Any text up to RID_LENGTH_MAX bytes is a valid rid.

    Raises ValidationError if it is no string, no text, or too long.
    """
    if not isinstance(rid, str):
        raise ValidationError(f"rid must be a string: type={type(rid).__name__}", field="rid")
    try:
        length = len(rid.encode())
    except UnicodeEncodeError:
        raise ValidationError("rid is not valid text: it holds a lone surrogate", field="rid") from None
    if length > RID_LENGTH_MAX:
        raise ValidationError(f"rid is too long: bytes={length}, max={RID_LENGTH_MAX}", field="rid")
    return rid
