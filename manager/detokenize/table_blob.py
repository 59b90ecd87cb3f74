"""A decode table as bytes that every worker of a deployment maps: built once, read in place.

     0        8         12       16         20      24            32             40
    +--------+---------+--------+----------+-------+-------------+--------------+---------
    | magic  | version | crc32  | id_count | flags | text_length | first_length | zero,
    |        |   u32   |  u32   |   u32    |  u32  |     u64     |     u64      | 16 bytes
    +--------+---------+--------+----------+-------+-------------+--------------+---------
     56           57            58                 59               60         64        68
    +------------+-------------+------------------+----------------+-----------+---------+------+
    | strip_byte | strip_count | swap_from_length | swap_to_length | swap_from | swap_to | zero |
    +------------+-------------+------------------+----------------+-----------+---------+------+
     72: sections, 8-aligned

Sections in order: text_offsets u32 (id_count + 1), flags u8 (id_count), text, and, if the table
tells first tokens apart, first_offsets u32 (id_count + 1) and first_text. Padding is zero. The
checksum covers everything behind itself.

Nothing that is read is believed: lengths must add up to the length of the whole, the checksum
must be right, and then the table itself is checked before it is used.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Final

import numpy as np

from manager.detokenize.table import DecodeTable
from manager.errors import DetokenizeError

if TYPE_CHECKING:
    import numpy.typing as npt

_MAGIC: Final = b"shmDETOK"
TABLE_VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sIIIIQQ16xBBBB4s4s4x")
_CHECKSUM_END: Final = 16
_HAS_FIRST: Final = 1
_BYTES_IN_RUNS: Final = 2
_SWAP_LENGTH_MAX: Final = 4


def table_to_bytes(table: DecodeTable) -> bytes:
    """The table as one block of bytes; `table_from_bytes` is the inverse."""
    has_first = table.first_text is not None and table.first_offsets is not None
    sections: list[npt.NDArray[np.uint8] | npt.NDArray[np.uint32]] = [
        table.text_offsets,
        table.flags,
        table.text,
    ]
    first_length = 0
    if table.first_text is not None and table.first_offsets is not None:
        sections += [table.first_offsets, table.first_text]
        first_length = len(table.first_text)
    body = bytearray()
    for section in sections:
        body += section.tobytes()
        body += bytes(-len(body) % 8)
    header = bytearray(
        _HEADER.pack(
            _MAGIC,
            TABLE_VERSION,
            0,
            table.vocab_size,
            (_HAS_FIRST if has_first else 0) | (_BYTES_IN_RUNS if table.bytes_in_runs else 0),
            len(table.text),
            first_length,
            table.strip_byte,
            table.strip_count,
            len(table.swap_from),
            len(table.swap_to),
            table.swap_from,
            table.swap_to,
        )
    )
    header[12:16] = zlib.crc32(body, zlib.crc32(header[_CHECKSUM_END:])).to_bytes(4, "little")
    return bytes(header + body)


def table_from_bytes(data: memoryview | bytes) -> DecodeTable:
    """The table in `data`, as views of it and not copied. Raises DetokenizeError if it is damaged.

    Its own consistency is checked by whoever decodes with it, as for every table.
    """
    if len(data) < _HEADER.size:
        raise DetokenizeError(f"decode table is cut short: length={len(data)}")
    (
        magic,
        version,
        checksum,
        id_count,
        flags,
        text_length,
        first_length,
        strip_byte,
        strip_count,
        swap_from_length,
        swap_to_length,
        swap_from,
        swap_to,
    ) = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != TABLE_VERSION:
        raise DetokenizeError(
            f"decode table has another version: magic={magic!r}, version={version}, expected={TABLE_VERSION}"
        )
    lengths = [4 * (id_count + 1), id_count, text_length]
    if flags & _HAS_FIRST:
        lengths += [4 * (id_count + 1), first_length]
    places, end = [], _HEADER.size
    for length in lengths:
        places.append((end, length))
        end += length + -length % 8
    if end != len(data) or max(swap_from_length, swap_to_length) > _SWAP_LENGTH_MAX:
        raise DetokenizeError(f"decode table contradicts itself: length={len(data)}, expected={end}")
    if zlib.crc32(data[_CHECKSUM_END:]) != checksum:
        raise DetokenizeError(f"decode table is damaged: expected_checksum={checksum}")

    def section(index: int) -> npt.NDArray[np.uint8]:
        start, length = places[index]
        return np.frombuffer(data, np.uint8, length, start)

    return DecodeTable(
        text_offsets=section(0).view(np.uint32),
        flags=section(1),
        text=section(2),
        first_offsets=section(3).view(np.uint32) if flags & _HAS_FIRST else None,
        first_text=section(4) if flags & _HAS_FIRST else None,
        strip_byte=strip_byte,
        strip_count=strip_count,
        swap_from=swap_from[:swap_from_length],
        swap_to=swap_to[:swap_to_length],
        bytes_in_runs=bool(flags & _BYTES_IN_RUNS),
    )
