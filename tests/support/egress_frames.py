"""The golden frames of `tests/data/egress`: what each `.json` describes, as bytes.

    python tests/support/egress_frames.py

writes every `.hex` anew. The bytes are put together here by the document of the layout, not by the
code that writes frames in earnest; only names, types and fingerprints come from the schemas.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from manager import messages

if TYPE_CHECKING:
    from shmring import Schema

FOLDER = Path(__file__).parents[1] / "data" / "egress"
SCHEMAS = {
    schema.name: schema for schema in (messages.BATCH, messages.EXTRAS, messages.ERROR, messages.RESULT)
}
FRAME_VERSION = 1


def names() -> list[str]:
    """Every frame there is."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def describe(name: str) -> dict[str, Any]:
    """What the file says of a frame."""
    described: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return described


def golden_bytes(name: str) -> bytes:
    """The record's payload as it was kept."""
    return bytes.fromhex((FOLDER / f"{name}.hex").read_text(encoding="ascii"))


def column_of(schema: Schema, name: str, value: Any) -> np.ndarray[Any, Any]:
    """A column's items: numbers, null for NaN; of bytes a text, or {"hex": digits}."""
    if isinstance(value, str):
        return np.frombuffer(value.encode(), np.uint8)
    if isinstance(value, dict):
        return np.frombuffer(bytes.fromhex(value["hex"]), np.uint8)
    dtype = schema.dtypes[schema.indexes[name]]
    return np.array([np.nan if item is None else item for item in value], dtype)


def frame_bytes(described: dict[str, Any]) -> bytes:
    """Header, directory, columns padded to 8 bytes; then what the description does to them."""
    if "schema" not in described:
        frame = bytearray()
    else:
        schema = SCHEMAS[described["schema"]]
        entries, data = b"", b""
        start = 16 + 8 * len(schema.names)
        for name in schema.names:
            if name not in described["columns"]:
                entries += struct.pack("<II", 0, 0)
                continue
            raw = column_of(schema, name, described["columns"][name]).tobytes()
            entries += struct.pack("<II", start + len(data), len(raw))
            data += raw + bytes(-len(raw) % 8)
        header = struct.pack("<HHIQ", FRAME_VERSION, len(schema.names), described["rows"], schema.fingerprint)
        frame = bytearray(header + entries + data)
    for how, *arguments in described.get("damage", ()):
        if how == "set":
            offset, digits = arguments
            raw = bytes.fromhex(digits)
            assert offset + len(raw) <= len(frame), "damage lies within the frame"
            frame[offset : offset + len(raw)] = raw
        elif how == "cut to":
            del frame[arguments[0] :]
        else:
            assert how == "append", how
            frame += bytes.fromhex(arguments[0])
    return bytes(frame)


def without_padding(frame: bytes) -> tuple[bytes, list[bytes | None]]:
    """Header and directory, and the bytes of each column; None: absent. What lies between is anything."""
    columns = struct.unpack_from("<H", frame, 2)[0]
    found: list[bytes | None] = []
    for index in range(columns):
        offset, length = struct.unpack_from("<II", frame, 16 + 8 * index)
        found.append(frame[offset : offset + length] if offset else None)
    return frame[: 16 + 8 * columns], found


def main() -> None:
    """Write all of them."""
    for name in names():
        digits = frame_bytes(describe(name)).hex()
        lines = [digits[at : at + 64] for at in range(0, len(digits), 64)]
        (FOLDER / f"{name}.hex").write_text("".join(f"{line}\n" for line in lines), encoding="ascii")


if __name__ == "__main__":
    main()
