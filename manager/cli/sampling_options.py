"""Sampling parameters as options of a command line. Values are checked where all clients' are."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from manager.errors import ValidationError
from manager.sampling import SamplingParams
from manager.sampling.kinds import shown

if TYPE_CHECKING:
    import argparse

#: option -> (parameter, what it is for); a number is read as JSON, so that 1.5 is no int
_NUMBERS: Final = {
    "--max-new-tokens": ("max_new_tokens", "at most so many tokens; 'null': until the context is full"),
    "--min-new-tokens": ("min_new_tokens", "do not end before so many tokens"),
    "--temperature": ("temperature", "0 is greedy"),
    "--top-p": ("top_p", "draw from the likeliest tokens that make up this much probability"),
    "--top-k": ("top_k", "draw from so many tokens; -1: all"),
    "--min-p": ("min_p", "drop tokens less likely than this part of the likeliest"),
    "--frequency-penalty": ("frequency_penalty", "-2 to 2"),
    "--presence-penalty": ("presence_penalty", "-2 to 2"),
    "--repetition-penalty": ("repetition_penalty", "above 0, to 2"),
    "--seed": ("sampling_seed", "the same seed gives the same tokens"),
    "--n": ("n", "samples of each prompt"),
}
_SWITCHES: Final = {
    "--ignore-eos": ("ignore_eos", True, "go on after the end-of-text token"),
    "--no-stop-trim": ("no_stop_trim", True, "keep the stop string or token that ended the text"),
    "--keep-special-tokens": ("skip_special_tokens", False, "show special tokens in the text"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add one option a parameter."""
    group = parser.add_argument_group("sampling")
    for option, (parameter, text) in _NUMBERS.items():
        group.add_argument(option, dest=parameter, metavar="N", help=text)
    for option, (parameter, value, text) in _SWITCHES.items():
        group.add_argument(option, dest=parameter, action="store_const", const=value, help=text)
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be repeated"
    )
    group.add_argument(
        "--stop-token-id", dest="stop_token_ids", action="append", metavar="ID", help="may be repeated"
    )
    group.add_argument("--sampling", metavar="JSON", help="any sampling parameters as one JSON object")


def sampling_of(options: argparse.Namespace) -> dict[str, Any]:
    """The parameters that were given, checked. Raises ValidationError that names the field and its bound.

    No more than these: the settings' preferred ones are for all others.
    """
    values: dict[str, Any] = {}
    if options.sampling is not None:
        given = _parse("sampling", options.sampling)
        if not isinstance(given, dict):
            raise ValidationError(
                f"sampling must be a JSON object: value={options.sampling}", field="sampling"
            )
        values.update(given)
    for parameter, _ in _NUMBERS.values():
        text = getattr(options, parameter)
        if text is not None:
            values[parameter] = _parse(parameter, text)
    for parameter, _, _ in _SWITCHES.values():
        if getattr(options, parameter) is not None:
            values[parameter] = getattr(options, parameter)
    if options.stop:
        values["stop"] = options.stop
    if options.stop_token_ids:
        values["stop_token_ids"] = [_parse("stop_token_ids", text) for text in options.stop_token_ids]
    SamplingParams.from_mapping(values)
    return values


def _parse(field: str, text: str) -> Any:  # noqa: ANN401 - whatever JSON holds; checked afterwards
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        kind = "JSON" if field == "sampling" else "number"
        text = f"{field} is no {kind}: value={shown(text)}, why={error}"
        raise ValidationError(text, field=field) from None
