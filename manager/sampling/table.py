"""The sampling parameters as a table for the documentation."""

from __future__ import annotations

import json
from typing import Final

from manager.sampling.params import DEFAULTS, PARAMETERS, TOP_K_ALL, Parameter

_HEAD: Final = ("Parameter", "Type", "Default", "Allowed", "Travels as", "Meaning")

# How the stops, which are normalized first, travel.
_TRAVELS: Final = {
    "stop": "extras, stop_strs",
    "stop_regex": "extras, stop_regex_strs",
    "stop_token_ids": "ragged int32 column",
    "n": "one request per sample",
}


def reference_table() -> str:
    """The schema as a Markdown table, one line a parameter."""
    rows = [_HEAD, tuple("---" for _ in _HEAD)]
    rows += [_row(name, parameter) for name, parameter in PARAMETERS.items()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(name: str, parameter: Parameter) -> tuple[str, ...]:
    travels = _TRAVELS.get(name) or (f"column `{parameter.column}`" if parameter.column else "extras")
    return (
        f"`{name}`",
        parameter.kind.type_name + (" or null" if parameter.optional else ""),
        _default(DEFAULTS[name]),
        parameter.kind.bounds or "any",
        travels,
        parameter.meaning,
    )


def _default(value: object) -> str:
    """A default as JSON has it, except for a number that nobody recognises by its digits."""
    return "2^30" if value == TOP_K_ALL else json.dumps(value)
