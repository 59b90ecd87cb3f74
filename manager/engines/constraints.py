"""The request fields that no engine of this package can honour."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manager.errors import ValidationError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from manager.extras import ExtrasAsked

CONSTRAINTS = ("json_schema", "regex", "ebnf", "structural_tag")


def refuse_constraints(extras: Mapping[str, Any], *, engine: str) -> None:
    """Raise `ValidationError` if the output is to follow a grammar.

    An answer that ignored the grammar would look like a broken model to the client.
    """
    for name in CONSTRAINTS:
        if extras.get(name) is not None:
            raise ValidationError(
                f"the engine has no constrained decoding: engine={engine}, field={name}", field=name
            )


def refuse_hidden_states(asked: ExtrasAsked, *, engine: str) -> None:
    """Raise `ValidationError` if hidden states are asked for: there is no model with any."""
    if asked.return_hidden_states:
        raise ValidationError(
            f"the engine has no hidden states: engine={engine}", field="return_hidden_states"
        )
