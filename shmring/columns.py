"""Frames: records whose payload is a set of typed columns.

Written from numpy arrays in one call, read as numpy views of the ring.

A schema says what the columns are, once. Its fingerprint travels in every frame, so a reader
with another schema is told so instead of reading shifted columns.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from shmring._fast import Frame, FrameLayout

if TYPE_CHECKING:
    from typing import TypeAlias

    import numpy.typing as npt
    from typing_extensions import Buffer, Self


#: What a column is written from: an array, or any other buffer of the right format; None: absent.
ColumnData: TypeAlias = "npt.NDArray[Any] | Buffer | None"

FRAME_HEADER_LENGTH = 16
COLUMN_ENTRY_LENGTH = 8


class Shape(enum.IntEnum):
    """How many items a column has."""

    FLAT = 0
    """One a row."""
    RAGGED = 1
    """As many as its counts column says, all back to back: counts for each row, or for each item of a row."""
    FREE = 2
    """Any number; the reader knows."""


@dataclass(frozen=True)
class Column:
    """One column of a schema. Little-endian, whatever the machine."""

    name: str
    dtype: npt.DTypeLike
    shape: Shape = Shape.FLAT
    counts: str | None = None
    """Ragged: an earlier uint32 column of counts, flat (one a row) or ragged itself (rows of rows)."""
    is_optional: bool = False
    """May be absent from a frame."""


def _check_column(schema: str, column: object) -> None:
    if not isinstance(column, Column):
        raise TypeError(f"columns are of type Column: schema={schema}, type={type(column).__name__}")
    if column.dtype is None:  # numpy would make a float of it
        raise ValueError(f"column has no dtype: schema={schema}, column={column.name}")
    if column.shape not in tuple(Shape):
        raise ValueError(f"shape is none: schema={schema}, column={column.name}, shape={column.shape!r}")


class Schema(FrameLayout):
    """The columns of one kind of frame.

    `record_type` is the type of its records, 0 to 255. The fingerprint covers names, dtypes,
    shapes and order: two schemas with equal fingerprints read each other's frames.
    """

    def __init__(self, name: str, record_type: int, columns: list[Column]) -> None:
        if not 0 <= record_type <= 255:
            raise ValueError(f"record_type is one byte: schema={name}, record_type={record_type}, max=255")
        self.name = name
        self.record_type = record_type
        self.columns = tuple(columns)
        for column in self.columns:
            _check_column(name, column)
        self.names = tuple(c.name for c in columns)
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"column names repeat: schema={name}, columns={self.names}")
        self.indexes = {column: index for index, column in enumerate(self.names)}
        self.dtypes = tuple(np.dtype(c.dtype).newbyteorder("<") for c in columns)
        self.fingerprint = self._fingerprint()
        self._lay_out(
            self.fingerprint, record_type, tuple(self._entry(i) for i in range(len(columns))), self.dtypes
        )

    @property
    def layout(self) -> Self:
        """What `Producer.push_frame` takes: the schema itself."""
        return self

    def _fingerprint(self) -> int:
        text = repr(
            [
                (c.name, d.descr if d.fields else d.str, int(c.shape), c.counts, c.is_optional)
                for c, d in zip(self.columns, self.dtypes, strict=True)
            ]
        )
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def _entry(self, index: int) -> tuple[str, str, int, int, int, bool]:
        column, dtype = self.columns[index], self.dtypes[index]
        # fields are told apart by the whole format: two structures may have one size
        kind = f"V{np.empty(0, dtype).data.format}" if dtype.fields else dtype.kind
        is_plain = kind[0] in ("V" if dtype.fields else "iufb") and not (kind == "f" and dtype.itemsize > 8)
        # an object, in a field too, is an address: in another process it leads nowhere
        if not is_plain or dtype.hasobject:
            raise ValueError(
                f"dtype cannot be a column: schema={self.name}, column={column.name}, dtype={dtype}"
            )
        counts_index = 0
        if column.shape == Shape.RAGGED:
            if column.counts not in self.names[:index]:
                raise ValueError(f"counts come before their column: schema={self.name}, column={column.name}")
            counts_index = self.names.index(column.counts)
            if self.dtypes[counts_index] != np.uint32 or self.columns[counts_index].shape == Shape.FREE:
                raise ValueError(
                    f"counts are uint32, flat or ragged: schema={self.name}, column={column.name}, "
                    f"counts={column.counts}, dtype={self.dtypes[counts_index]}"
                )
        return (column.name, kind, dtype.itemsize, int(column.shape), counts_index, column.is_optional)

    def payload_length(self, *columns: ColumnData) -> int:
        """Bytes of the payload that a frame of these columns has: what to wait for room for."""
        lengths = (memoryview(cast("Buffer", column)).nbytes for column in columns if column is not None)
        return FRAME_HEADER_LENGTH + COLUMN_ENTRY_LENGTH * len(columns) + sum((n + 7) & ~7 for n in lengths)


__all__ = ["Column", "ColumnData", "Frame", "Schema", "Shape"]
