"""How tables of sampling parameters spell what JSON cannot say."""

from __future__ import annotations

from typing import Any


def meant(value: Any) -> Any:
    """A value of a table; what JSON cannot say, or not in a line, is spelled with an @."""
    if isinstance(value, list):
        return [meant(item) for item in value]
    if isinstance(value, str):
        return float(value[1:]) if value in {"@nan", "@inf", "@-inf"} else value
    if not isinstance(value, dict):
        return value
    match value:
        case {"@power of ten": exponent}:
            return 10**exponent
        case {"@repeat": [text, count]}:
            return text * count
        case {"@groups": depth}:
            return "(" * depth + "a" + ")" * depth
        case {"@different": count}:
            return [f"x{number}" for number in range(count)]
        case {"@range": count}:
            return list(range(count))
        case {"@nested": depth}:
            nested = 1
            for _ in range(depth):
                nested = {"a": nested}
            return nested
    return {key: meant(item) for key, item in value.items()}
