r"""Which stop regexes are let in, and how far back each can look.

An engine runs `re.search` on the tail of the output in its decode loop, with every other request
waiting. So the contract is one-sided: a pattern that is admitted compiles, and is cheap on any
text; a good pattern may be refused.

Cheap means this. Python's matcher backtracks, so the cost of one attempt is at most
W^degree * ways for a text of W characters, and `admit` allows degree 1 and a bounded number of ways:

* a repetition that can stop at several places multiplies the cost of what follows by W, and raises
  the degree by one, *unless* what follows always succeeds (then it is never tried again), or
  cannot begin with a character that the repetition takes (then all places but the last
  fail at once). That is why `\d+\.\d+` is fine and `.*a.*b` is not.
* an alternation multiplies by the number of branches that can begin with the same character.

The pattern is read by Python's own parser, so there is no second opinion on what it means.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from typing import Any, Final

if sys.version_info >= (3, 11):
    # sre_parse and sre_constants still exist there, but importing them warns.
    from re import _constants as sre_constants
    from re import _parser as sre_parse
else:
    import sre_constants
    import sre_parse

from manager.errors import ValidationError

PATTERN_LENGTH_MAX: Final = 256  # bytes of UTF-8; SGLang's server
GROUP_DEPTH_MAX: Final = 64  # Python's parser recurses, and gives up at about 400
REPEAT_COST_MAX: Final = 511  # product of nested counts; beyond it patterns take visible time to compile
REPEAT_DEPTH_MAX: Final = 4  # reading optional groups within each other costs the square of their depth
DEGREE_MAX: Final = 1
# As many alternatives as fit into a pattern of the maximal length side by side.
WAYS_MAX: Final = 128

# Comparisons of character sets, about a microsecond each; ordinary patterns take under a hundred.
PROOFS_MAX: Final = 500
FIRST_COUNT_MAX: Final = 32  # character sets kept apart as the beginning of one part

# The longest match of a pattern without an end; SGLang's number for "all of the output".
UNBOUNDED: Final = 1 << 30

CACHE_COUNT_MAX: Final = 512  # as many as CPython keeps compiled (re._MAXCACHE)

# Letters and digits that may follow a backslash. Python knows a few more, and others not in all
# of its versions; everything else that is no letter or digit is that character itself.
_ESCAPES: Final = frozenset("AbBdDsSwWafnrtvx")
_FLAGS: Final = frozenset("imsxu")

_GROUP: Final = re.compile(r"\((?:\?(?:P<\w+>|P=\w+\)|(?P<on>[a-zA-Z]*)(?P<off>-[a-zA-Z]+)?(?P<end>[:)])))?")
_QUANTIFIER: Final = re.compile(r"[*+?]|\{\d*,?\d*\}")


class _RefusedError(Exception):
    """The pattern cannot be admitted; the text says why."""


_admitted: dict[str, int] = {}


def admit(pattern: str) -> int:
    """The longest match of `pattern`, at most UNBOUNDED: how much of the output to search.

    In bytes of UTF-8 for literals and at least one for everything else, so never less than the
    count of characters that SGLang assumes. Raises ValidationError if the pattern is refused.

    Admissions are remembered, refusals are not: nobody can fill the memory with bad patterns.
    """
    bound = _admitted.get(pattern)
    if bound is not None:
        return bound
    try:
        bound = _examine(pattern)
    except _RefusedError as refusal:
        raise ValidationError(
            f"stop_regex is refused: pattern={pattern[:PATTERN_LENGTH_MAX]!r}, why={refusal}",
            field="stop_regex",
        ) from None
    if len(_admitted) >= CACHE_COUNT_MAX:
        _admitted.clear()
    _admitted[pattern] = bound
    return bound


def _examine(pattern: str) -> int:
    """The bound of an admissible pattern. Every limit is checked before the work it limits."""
    try:
        length = len(pattern.encode())
    except UnicodeEncodeError:
        raise _RefusedError("it is not valid text") from None
    if length > PATTERN_LENGTH_MAX:
        raise _RefusedError(f"it is too long: bytes={length}, max={PATTERN_LENGTH_MAX}")
    _check_dialect(pattern)
    try:
        parsed = sre_parse.parse(pattern)
        if parsed.state.flags & re.ASCII:
            raise _RefusedError("flag a is not taken")
        size = _Sizes().of(parsed)
        if size.least == 0:
            raise _RefusedError("it matches the empty string, so it would end every output at once")
        rest = _Ambiguity().prepend(parsed, _END, bool(parsed.state.flags & re.IGNORECASE))
        if rest.degree > DEGREE_MAX:
            raise _RefusedError(f"it can match in too many ways: degree={rest.degree}, max={DEGREE_MAX}")
        if rest.ways > WAYS_MAX:
            raise _RefusedError(f"it has too many alternatives: ways={rest.ways}, max={WAYS_MAX}")
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError, ValueError, Warning) as error:
        raise _RefusedError(f"Python cannot compile it: {error}") from None
    return size.bound


def _check_dialect(pattern: str) -> None:
    """Refuse what means something else in other dialects, warns, or differs between Pythons.

    Also alternation in a repeated group, which is ambiguous more often than not. The parser folds
    `(?:a|a)` into a class, so it has to be seen here.
    """
    index = _after_leading_flags(pattern)
    alternates = [False]  # one entry an open group
    while index < len(pattern):
        character = pattern[index]
        if character == "\\":
            index = _after_escape(pattern, index)
        elif character == "[":
            index = _after_class(pattern, index)
        elif character == "(":
            index, opens = _after_group_start(pattern, index)
            if opens:
                alternates.append(False)
            if len(alternates) > GROUP_DEPTH_MAX:
                raise _RefusedError(f"groups are nested too deeply: max={GROUP_DEPTH_MAX}")
        elif character == ")":
            index += 1
            if len(alternates) == 1:
                raise _RefusedError("it closes a group that was never opened")
            if alternates.pop():
                if _QUANTIFIER.match(pattern, index):
                    raise _RefusedError("it repeats an alternation")
                alternates[-1] = True
        else:
            if character == "|":
                alternates[-1] = True
            index += 1


def _after_leading_flags(pattern: str) -> int:
    """Where the pattern begins after `(?i)(?m)`: flags for all of it may stand only here."""
    index = 0
    while (group := _GROUP.match(pattern, index)) and group["end"] == ")" and group["on"]:
        if group["off"] or not set(group["on"]) <= _FLAGS:
            raise _RefusedError(f"it sets flags that are not taken here: {group[0]}")
        _check_verbose(pattern, group["on"])
        index = group.end()
    return index


def _after_group_start(pattern: str, index: int) -> tuple[int, bool]:
    """The index after the opening, and whether there is a group to close."""
    group = _GROUP.match(pattern, index)
    assert group is not None
    if group[0] == "(" and pattern.startswith("(?", index):
        raise _RefusedError("it has a group of a form that is not taken")
    if group["end"] == ")":
        raise _RefusedError("flags for all of it can stand only at the start")
    if group["end"] == ":" and not set(group["on"] + (group["off"] or "-")[1:]) <= _FLAGS:
        raise _RefusedError(f"it sets flags that are not taken here: {group[0]}")
    _check_verbose(pattern, group["on"] or "")
    return group.end(), not group[0].startswith("(?P=")


def _check_verbose(pattern: str, flags: str) -> None:
    """Refuse comments, in which brackets mean nothing: the reading here would lose its place."""
    if "x" in flags and "#" in pattern:
        raise _RefusedError("a # cannot stand where flag x makes it a comment")


def _after_escape(pattern: str, index: int) -> int:
    """The index after an escape outside of a class."""
    after = pattern[index + 1 : index + 2]
    following = pattern[index + 2 : index + 3]
    if after in {"<", ">"}:
        raise _RefusedError(f"escape is a word boundary elsewhere: \\{after}")
    if after in {"b", "B"} and following == "{":
        raise _RefusedError(f"escape is a word boundary elsewhere: \\{after}{{")
    # A back reference; two digits may be an octal number instead.
    if after.isascii() and after.isdigit() and after != "0" and not following.isdigit():
        return index + 2
    return _after_plain_escape(pattern, index)


def _after_plain_escape(pattern: str, index: int) -> int:
    after = pattern[index + 1 : index + 2]
    if not after:
        raise _RefusedError("it ends in a backslash")
    if after.isalnum() and after not in _ESCAPES:
        raise _RefusedError(f"escape is not taken: \\{after}")
    return index + 2


def _after_class(pattern: str, index: int) -> int:
    """The index after a `[...]`. Refuses what may become a set operation, about which Python warns."""
    index += 1
    if pattern.startswith("^", index):
        index += 1
    start = index
    while index < len(pattern):
        character = pattern[index]
        if character == "]" and index > start:
            return index + 1
        if character == "[":
            raise _RefusedError("a [ within a class must be escaped")
        if character in "-&|~" and pattern.startswith(character, index + 1):
            raise _RefusedError(f"a class holds what may become a set operation: {character * 2}")
        if character == "\\":
            if pattern[index + 1 : index + 2] in {"<", ">"}:
                raise _RefusedError(f"escape is a word boundary elsewhere: \\{pattern[index + 1]}")
            index = _after_plain_escape(pattern, index)
        else:
            index += 1
    raise _RefusedError("a class is not closed")


@dataclass(frozen=True)
class _Size:
    """How long a match can be."""

    least: int
    """Characters."""
    most: int
    """Characters; UNBOUNDED or more if there is no end."""
    bound: int
    """Bytes for literals, one for everything else that takes a character."""


_EMPTY: Final = _Size(0, 0, 0)


@dataclass(frozen=True)
class _Repeats:
    """The repetitions around a part of the pattern."""

    cost: int = 1
    """Product of their counts."""
    depth: int = 0
    endless: bool = False
    """One of them has no end."""
    several: bool = False
    """One of them can take its body more than once."""


class _Sizes:
    """Measures a parsed pattern, and refuses what is too large or has no measure."""

    def __init__(self) -> None:
        self._groups: dict[int, _Size] = {}

    def of(self, items: Any, around: _Repeats = _Repeats()) -> _Size:
        """The size of a sequence."""
        least = most = bound = 0
        for op, argument in items:
            size = self._of_item(op, argument, around)
            least += size.least
            most += size.most
            bound += size.bound
        return _Size(least, min(most, UNBOUNDED), min(bound, UNBOUNDED))

    def _of_item(self, op: Any, argument: Any, around: _Repeats) -> _Size:
        if op is sre_constants.LITERAL:
            return _Size(1, 1, len(chr(argument).encode()))
        if op is sre_constants.IN:
            return _Size(1, 1, _class_bound(argument))
        if op in {sre_constants.NOT_LITERAL, sre_constants.ANY}:
            return _Size(1, 1, 1)
        if op is sre_constants.AT:
            return _EMPTY
        if op is sre_constants.SUBPATTERN:
            group, add_flags, _, items = argument
            # Sets of characters are compared below as they are without this flag.
            if add_flags & re.ASCII:
                raise _RefusedError("flag a is not taken")
            size = self.of(items, around)
            if group is not None:
                self._groups[group] = size
            return size
        if op is sre_constants.BRANCH:
            if around.several:
                raise _RefusedError("it repeats an alternation")
            sizes = [self.of(items, around) for items in argument[1]]
            return _Size(
                min(size.least for size in sizes),
                max(size.most for size in sizes),
                max(size.bound for size in sizes),
            )
        if op in {sre_constants.MAX_REPEAT, sre_constants.MIN_REPEAT}:
            return self._of_repeat(argument, around)
        if op is sre_constants.GROUPREF:
            # Of a fixed length it adds no way to match, so only the bound is lost.
            size = self._groups[argument]
            if size.least != size.most:
                raise _RefusedError("it refers back to a group of varying length")
            return _Size(size.least, size.most, UNBOUNDED)
        raise _RefusedError(f"it uses what is not taken here: {str(op).lower()}")

    def _of_repeat(self, argument: Any, around: _Repeats) -> _Size:
        low, high, items = argument
        endless = high is sre_constants.MAXREPEAT
        if endless and around.endless:
            raise _RefusedError("it repeats a repetition without end")
        low = int(low)
        high = low if endless else int(high)
        inside = _Repeats(
            cost=around.cost * max(high, 1),
            depth=around.depth + 1,
            endless=endless or around.endless,
            several=endless or high > 1 or around.several,
        )
        if inside.cost > REPEAT_COST_MAX:
            raise _RefusedError(f"its counts are too large: product={inside.cost}, max={REPEAT_COST_MAX}")
        if inside.depth > REPEAT_DEPTH_MAX:
            raise _RefusedError(f"repetitions are nested too deeply: max={REPEAT_DEPTH_MAX}")
        size = self.of(items, inside)
        if endless and (size.least != size.most or size.least == 0):
            raise _RefusedError("it repeats without end what has no fixed length")
        if endless:
            return _Size(low * size.least, UNBOUNDED, UNBOUNDED)
        return _Size(low * size.least, min(high * size.most, UNBOUNDED), min(high * size.bound, UNBOUNDED))


def _class_bound(items: Any) -> int:
    """The longest character that a class spells out, in bytes. Categories count as one."""
    bound = 1
    for op, argument in items:
        if op is sre_constants.LITERAL:
            bound = max(bound, len(chr(argument).encode()))
        elif op is sre_constants.RANGE:
            bound = max(bound, len(chr(argument[1]).encode()))
    return bound


_IS_CATEGORY: Final[dict[Any, Any]] = {
    sre_constants.CATEGORY_DIGIT: str.isdecimal,
    sre_constants.CATEGORY_SPACE: str.isspace,
    sre_constants.CATEGORY_WORD: lambda character: character.isalnum() or character == "_",
}
_OPPOSITE: Final = {
    sre_constants.CATEGORY_DIGIT: sre_constants.CATEGORY_NOT_DIGIT,
    sre_constants.CATEGORY_SPACE: sre_constants.CATEGORY_NOT_SPACE,
    sre_constants.CATEGORY_WORD: sre_constants.CATEGORY_NOT_WORD,
    sre_constants.CATEGORY_NOT_DIGIT: sre_constants.CATEGORY_DIGIT,
    sre_constants.CATEGORY_NOT_SPACE: sre_constants.CATEGORY_SPACE,
    sre_constants.CATEGORY_NOT_WORD: sre_constants.CATEGORY_WORD,
}
# (smaller, larger): every character of the first is in the second.
_WITHIN: Final = {
    (sre_constants.CATEGORY_DIGIT, sre_constants.CATEGORY_WORD),
    (sre_constants.CATEGORY_DIGIT, sre_constants.CATEGORY_NOT_SPACE),
    (sre_constants.CATEGORY_WORD, sre_constants.CATEGORY_NOT_SPACE),
    (sre_constants.CATEGORY_SPACE, sre_constants.CATEGORY_NOT_WORD),
    (sre_constants.CATEGORY_SPACE, sre_constants.CATEGORY_NOT_DIGIT),
    (sre_constants.CATEGORY_NOT_WORD, sre_constants.CATEGORY_NOT_DIGIT),
}

# A range is compared with a category character by character, if it is at most this long.
_RANGE_LENGTH_MAX: Final = 128


@dataclass(frozen=True)
class _Characters:
    """A set of characters that can be proved to be apart from another, or cannot."""

    ranges: tuple[tuple[int, int], ...] = ()
    categories: tuple[Any, ...] = ()
    negated: bool = False

    def is_apart_from(self, other: _Characters) -> bool:
        """True only if no character is in both."""
        if self.negated and other.negated:
            return False
        if self.negated:
            return other.is_apart_from(self)
        if other.negated:
            return all(other._spells(low, high) for low, high in self.ranges) and all(
                any(mine == theirs or (mine, theirs) in _WITHIN for theirs in other.categories)
                for mine in self.categories
            )
        return (
            all(
                a_high < b_low or b_high < a_low
                for a_low, a_high in self.ranges
                for b_low, b_high in other.ranges
            )
            and all(
                _range_is_in(low, high, _OPPOSITE[category])
                for low, high in self.ranges
                for category in other.categories
            )
            and all(
                _range_is_in(low, high, _OPPOSITE[category])
                for low, high in other.ranges
                for category in self.categories
            )
            and all(
                _OPPOSITE[theirs] == mine or (mine, _OPPOSITE[theirs]) in _WITHIN
                for mine in self.categories
                for theirs in other.categories
            )
        )

    def _spells(self, low: int, high: int) -> bool:
        """Whether every character of a range is among those listed (before negation)."""
        return any(a_low <= low and high <= a_high for a_low, a_high in self.ranges) or any(
            _range_is_in(low, high, category) for category in self.categories
        )


_EVERYTHING: Final = _Characters(negated=True)


def _range_is_in(low: int, high: int, category: Any) -> bool:
    """True only if all of a range is in a category."""
    if high - low >= _RANGE_LENGTH_MAX:
        return False
    positive = category in _IS_CATEGORY
    is_category = _IS_CATEGORY[category if positive else _OPPOSITE[category]]
    return all(is_category(chr(code)) is positive for code in range(low, high + 1))


def _characters(op: Any, argument: Any, ignore_case: bool) -> _Characters:
    """The characters that an item can take; more than it can, where that is hard to say."""
    if op is sre_constants.LITERAL:
        return _EVERYTHING if ignore_case and _has_case(argument) else _Characters(((argument, argument),))
    if op is sre_constants.NOT_LITERAL:
        return _EVERYTHING if ignore_case else _Characters(((argument, argument),), negated=True)
    if op is not sre_constants.IN:
        return _EVERYTHING
    ranges: list[tuple[int, int]] = []
    categories: list[Any] = []
    negated = False
    for kind, value in argument:
        if kind is sre_constants.NEGATE:
            negated = True
        elif kind is sre_constants.CATEGORY:
            categories.append(value)
        else:
            ranges.append((value, value) if kind is sre_constants.LITERAL else value)
    # Other cases of a range are other ranges, which are not worth working out.
    if ignore_case and any(high > low or _has_case(low) for low, high in ranges):
        return _EVERYTHING
    return _Characters(tuple(ranges), tuple(categories), negated)


def _has_case(code: int) -> bool:
    character = chr(code)
    return not character == character.lower() == character.upper()


@dataclass(frozen=True)
class _Rest:
    """What is left of the pattern at some point, as it looks to what stands before it."""

    first: tuple[_Characters, ...]
    """What its first character can be."""
    nullable: bool
    """Whether it can match without taking a character."""
    certain: bool
    """Whether it always matches."""
    degree: int
    ways: int


_END: Final = _Rest(first=(), nullable=True, certain=True, degree=0, ways=1)
# Stands after the body of a repetition: anything may follow, and it may fail.
_UNKNOWN: Final = _Rest(first=(_EVERYTHING,), nullable=True, certain=False, degree=0, ways=1)


class _Ambiguity:
    """Reads a parsed pattern from its end, and keeps account of the ways to match it.

    Its own work is bounded: when PROOFS_MAX is used up, nothing is proved any more, and the
    pattern looks more ambiguous than it is.
    """

    def __init__(self) -> None:
        self._proofs_left = PROOFS_MAX
        # Without it, optional groups within each other would double the work at every level.
        self._bodies: dict[tuple[int, bool], _Rest] = {}

    def prepend(self, items: Any, rest: _Rest, ignore_case: bool) -> _Rest:
        """`rest` with a sequence in front of it."""
        for op, argument in reversed(list(items)):
            if op is sre_constants.AT:
                rest = replace(rest, certain=False)
            elif op is sre_constants.SUBPATTERN:
                _, add_flags, del_flags, body = argument
                inner = (ignore_case or bool(add_flags & re.IGNORECASE)) and not del_flags & re.IGNORECASE
                rest = self.prepend(body, rest, inner)
            elif op is sre_constants.BRANCH:
                rest = self._either([self.prepend(body, rest, ignore_case) for body in argument[1]])
            elif op in {sre_constants.MAX_REPEAT, sre_constants.MIN_REPEAT}:
                rest = self._repeat(argument, rest, ignore_case)
            else:
                rest = _Rest(
                    first=(_characters(op, argument, ignore_case),),
                    # A group of no length can be referred back to.
                    nullable=op is sre_constants.GROUPREF and rest.nullable,
                    certain=False,
                    degree=rest.degree,
                    ways=rest.ways,
                )
        return rest

    def _either(self, branches: list[_Rest]) -> _Rest:
        """One of several. Only those that can begin alike are gone into one after the other."""
        ways = max(
            sum(
                other.ways
                for other in branches
                if other is branch or branch.nullable or not self._fails_at_once(other, branch.first)
            )
            for branch in branches
        )
        return _Rest(
            first=_union(*(branch.first for branch in branches)),
            nullable=any(branch.nullable for branch in branches),
            certain=any(branch.certain for branch in branches),
            degree=max(branch.degree for branch in branches),
            ways=ways,
        )

    def _repeat(self, argument: Any, rest: _Rest, ignore_case: bool) -> _Rest:
        low, high, items = argument
        endless = high is sre_constants.MAXREPEAT
        body = self._body(items, ignore_case)
        # Wherever the body would go on, what follows fails, so there is one place to stop.
        parted = not body.nullable and self._fails_at_once(rest, body.first)
        settled = parted or rest.certain
        skippable = low == 0 or body.nullable
        ways = rest.ways
        if not endless and low == high:
            degree = int(high) * body.degree + rest.degree
        elif not endless and high == 1:
            # The body or nothing: an alternation of two, and a repetition if they overlap.
            taken = self.prepend(items, rest, ignore_case)
            ways = max(taken.ways, rest.ways) if parted else taken.ways + rest.ways
            degree = max(taken.degree, rest.degree) if settled else 1 + body.degree + rest.degree
        elif settled and body.degree == 0:
            degree = max(1, rest.degree)
        else:
            degree = 1 + (1 if endless else int(high)) * body.degree + rest.degree
        return _Rest(
            first=_union(body.first, rest.first) if skippable else body.first,
            nullable=skippable and rest.nullable,
            certain=low == 0 and rest.certain,
            degree=degree,
            ways=ways,
        )

    def _body(self, items: Any, ignore_case: bool) -> _Rest:
        """What is repeated, on its own."""
        # The parsed pattern lives as long as this object, so the id stays the node's own.
        key = id(items), ignore_case
        if key not in self._bodies:
            self._bodies[key] = self.prepend(items, _UNKNOWN, ignore_case)
        return self._bodies[key]

    def _fails_at_once(self, rest: _Rest, first: tuple[_Characters, ...]) -> bool:
        """True only if `rest` cannot match a text that begins with one of `first`."""
        self._proofs_left -= len(rest.first) * len(first)
        if rest.nullable or self._proofs_left < 0:
            return False
        return all(mine.is_apart_from(theirs) for mine in rest.first for theirs in first)


def _union(*firsts: tuple[_Characters, ...]) -> tuple[_Characters, ...]:
    """All of them, or everything if they are too many to compare with."""
    union = tuple(dict.fromkeys(characters for first in firsts for characters in first))
    return union if len(union) <= FIRST_COUNT_MAX else (_EVERYTHING,)
