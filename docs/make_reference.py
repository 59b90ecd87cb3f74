"""Writes the tables of the reference that the code knows best: settings, frames, sampling parameters.

    python docs/make_reference.py            write them into docs/reference/
    python docs/make_reference.py --check    write nothing; 1 if a page is out of date

A table stands between `<!-- made: NAME -->` and `<!-- end -->`; the rest of a page is written by hand.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING

from manager import messages
from manager.config import BOUNDS, Settings
from manager.sampling import reference_table
from shmring import Shape

if TYPE_CHECKING:
    from shmring import Schema

PAGES = Path(__file__).parent / "reference"
_SHAPES = {Shape.FLAT: "one a row", Shape.FREE: "any number"}


def settings_table() -> str:
    """One line a setting: type, default, bounds, meaning."""
    meanings = _meanings()
    rows = []
    for field in fields(Settings):
        default = "needed" if field.default is MISSING else f"`{_number(field.default)}`"
        bounds = BOUNDS.get(field.name)
        allowed = "" if bounds is None else f"{_number(bounds[0])} to {_number(bounds[1])}"
        kind = str(field.type).replace("|", "or")
        rows.append((f"`{field.name}`", kind, default, allowed, meanings.get(field.name, "")))
    return _table(("Setting", "Type", "Default", "Allowed", "Meaning"), rows)


def _meanings() -> dict[str, str]:
    """The string below each field of the class, as its source has it."""
    (settings,) = ast.parse(inspect.getsource(Settings)).body
    assert isinstance(settings, ast.ClassDef)
    found = {}
    for before, after in zip(settings.body, settings.body[1:], strict=False):
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and is_text:
            found[before.target.id] = " ".join(str(after.value.value).split())
    return found


def _number(value: object) -> str:
    """Powers of two that nobody knows by their digits as such."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1 << 16:
        exponent = value.bit_length() - 1
        return f"2^{exponent}" if value == 1 << exponent else str(value)
    return str(value)


def frame_tables(schemas: tuple[Schema, ...]) -> str:
    """One table a frame, under its name and record type."""
    return "\n".join(
        f"#### {schema.name} (type {int(schema.record_type)})\n\n{_columns(schema)}" for schema in schemas
    )


def _columns(schema: Schema) -> str:
    rows = []
    for column, dtype in zip(schema.columns, schema.dtypes, strict=True):
        name = "structure" if dtype.fields else dtype.name
        items = _SHAPES.get(column.shape, f"`{column.counts}` a row")
        if column.counts is not None and schema.columns[schema.indexes[column.counts]].counts is not None:
            items = f"`{column.counts}` an item of those"
        rows.append((f"`{column.name}`", name, items, "yes" if column.is_optional else ""))
    return _table(("Column", "Type", "Items", "Optional"), rows)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


TABLES = {
    "settings": settings_table,
    "sampling": reference_table,
    "ingress": lambda: frame_tables((messages.REQUEST, messages.ABORT, messages.CONTROL)),
    "egress": lambda: frame_tables((messages.RESULT, messages.BATCH, messages.EXTRAS, messages.ERROR)),
    "register": lambda: frame_tables((messages.REGISTER, messages.DEREGISTER, messages.DECODE)),
    "reply": lambda: frame_tables(
        (
            messages.TEXT,
            messages.REPLY_EXTRAS,
            messages.FAIL,
            messages.ABORT_ASKED,
            messages.REPLY_RESULT,
        ),
    ),
}


def renewed(text: str) -> str:
    """A page with all its tables made anew."""
    return re.sub(
        r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n{found[3]}",
        text,
        flags=re.DOTALL,
    )


def main(arguments: list[str]) -> int:
    """Write what is out of date, or say so."""
    stale = 0
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        wanted = renewed(text)
        if text == wanted:
            continue
        print(f"{page.name}: {'is out of date' if arguments else 'written'}")
        if arguments:
            stale = 1
        else:
            page.write_text(wanted, encoding="utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
