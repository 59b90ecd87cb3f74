"""A pattern that is admitted must compile, be cheap on every text, and look back far enough.

Cost is counted in steps of a model of Python's matcher, never in time.
"""

from __future__ import annotations

import re
import sys

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from manager import stop_regex
from manager.errors import ValidationError
from manager.stop_regex import UNBOUNDED, admit

if sys.version_info >= (3, 11):
    from re import _constants as sre_constants
    from re import _parser as sre_parse
else:
    import sre_constants
    import sre_parse

ADMITTED = {
    r"[.!?]\s*$": UNBOUNDED,
    r"and|or": 3,
    r"colou?r": 6,
    r"\d{6}": 6,
    r"abc": 3,
    r"\d+": UNBOUNDED,
    r"\s+$": UNBOUNDED,
    r"Answer: .*": UNBOUNDED,
    r"a{3,}": UNBOUNDED,
    r"END(ING)?": 6,
    r"(?imsx)a-b": 3,
    r"(?-i:abc)": 3,
    r"(?i-s:a)": 1,
    r"(?i)(?m)a": 1,
    r"(?i)abc": 3,
    r"(?i)[a-z]{1,8}": 8,
    r"(?i)\d{4}-\d{2}": 7,
    r"\x41": 1,
    r"a\x41b": 3,
    r"(?P<n>a)": 1,
    r"\bword\b": 4,
    r"\bword": 4,
    r"<END>": 5,
    r"[\d\s]{2}": 2,
    r"a{200}": 200,
    r"(?:ab){3}": 6,
    r"(ab){3}": 6,
    r"^abc$": 3,
    r"a|bbb": 3,
    r"a\d{2,5}": 6,
    r"\.\*\(": 3,
    r"[]a]": 1,
    r"[^]a]": 1,
    r"a??b": 2,
    r"(a)\1": UNBOUNDED,
    r"(?P<q>['\"])x(?P=q)": UNBOUNDED,
    "\N{EGYPTIAN HIEROGLYPH A001}": 4,
    "[\N{PARTY POPPER}]": 4,
    "(" * 10 + "a" + ")" * 10: 1,
    "a" * 256: 256,
    # What follows a repetition cannot begin with what it takes, so it can stop at one place only.
    r"a+b+": UNBOUNDED,
    r"a+b+c": UNBOUNDED,
    r"\d+\.\d+": UNBOUNDED,
    r"https?://\S+": UNBOUNDED,
    r"\d+(?:\.\d+)?": UNBOUNDED,
    r"(\w+)\s*=\s*(\w+)\n": UNBOUNDED,
    r"[^\n]*\n[^\n]+\n": UNBOUNDED,
    r"(?i)\d+\s+\d+": UNBOUNDED,
    r"(?:a+)?b": UNBOUNDED,
    # What follows always succeeds, so nothing is ever tried again.
    r"x.*.*": UNBOUNDED,
    "(?:a|ab)" * 8 + "Z": 17,
    r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec) (?:mon|tue|wed|thu|fri|sat|sun)": 7,
}

REFUSED = [
    # Python cannot compile them, or reads something else than the author meant.
    r"\p{L}", r"\P{L}", r"\pL", r"(?<n>a)", r"\x{1F600}", r"\u{41}", r"a{2,1}", r"$*", r"\b{2}", r"^+",
    r"a?*", r"a**", r"a{2,5}?*", r"[a[:alpha:](?=-]", r"[\p{L}]", r"[\P{L}]", r"[\x{41}]", r"[a--b]",
    r"[a&&b]", r"[a||b]", r"[a~~b]", r"[[a]", r"(?R)a", r"(?U)a", r"(?R:a)", r"(?U:a)", r"(?a)\w", r"(?L)a",
    r"\<END\>", r"\<word", r"end\>", r"[\<]", r"\b{start}xyz", r"\b{end}", r"\B{end}", r"a(?i)b", r"(?-i)a",
    r"\N{SNOWMAN}", r"\0", r"\10", r"\Z", r"\K", "a\\", "(", ")", "a)", "[", "[a", "(?", "(?P<n", "\ud800",
    r"(?x)a#b", "(?x)#[\n(?a:a)", "(?#comment)a", "(?>a)", "a++", "(a)(?(1)b|c)",
    # Look-around and references of no fixed length.
    r"(?=x)y", r"(?!x)y", r"(?<=x)y", r"(?<=a+)b", r"(?<!x)y", r"(a+)\1", r"\1", r"(?P=n)",
    # Too large.
    r"(?:(?:a*){65535}){65535}", r"(?:){1048575}x", r"a{4294967294}", r"a{4294967295}", r"(?:a*){4294967294}",
    r"a{1048576}", r"a{1000000000}", r"a{0,4294967295}", r"a{1048576,}", r"(?:a{100}){100}",
    r"(?:(?:a{65535}){65535}){65535}", r"a{512}", "a" * 257, "é" * 129,
    *("(" * depth + "a" + ")" * depth for depth in (64, 127, 400, 2000)),
    "(?:" * 5 + "a" + ")?" * 5 + "b",
    # Too ambiguous.
    r"(?:a+)+b", r"(a+)+b", r"(a*)*b", r"(?:.*){20}Z", r".*.*.*.*.*.*.*.*Z", r"(?:.?){30}Z", r"(?:.?){255}Z",
    r"(?:.{0,1}.{0,1}.{0,1}){8}Z", r"(?:(?:.?){15}){15}Z", ".{0,1}" * 20 + "Z", ".{0,4}" * 12 + "Z",
    r"(a|a)*b", r"(?:.|.)*Z", r"(?x)(?:.|.) *Z", r"(?:a|ab)?c", "a*" * 8 + "b", r".*a.*b", r"(?:a?)+b",
    r"\w+\d+x", r"(?i)a+A+b", r"(?i)k+[\N{KELVIN SIGN}]+x", "(?i)s+\u017f+x", r"\s*\n\s*x",
    "(?:.|..)" * 25 + "Z", "(?:a|aa)" * 9 + "Z",
    # They match the empty text, which is there before the first token.
    "", r"a|", r"^$", r"$", r".*", r"\s*", r"a?", r"(?:)", r"\b", r"(?:ab)*", r"(?i)",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _forget() -> None:
    stop_regex._admitted.clear()


@pytest.mark.parametrize(("pattern", "bound"), ADMITTED.items())
def test_ordinary_patterns_are_admitted_with_the_length_of_their_longest_match(pattern, bound):
    """A bound too large makes the engine search all of the output every token; too small loses the stop."""
    assert admit(pattern) == bound


@pytest.mark.parametrize("pattern", ADMITTED)
def test_every_admitted_pattern_compiles(pattern):
    """One that does not would end the scheduler in the middle of everyone's requests."""
    admit(pattern)
    re.compile(pattern)


@pytest.mark.parametrize("pattern", ADMITTED)
def test_the_bound_is_never_below_what_the_engine_assumes(pattern):
    """A smaller window would cut the beginning of a match off, and the stop would not fire."""
    assert admit(pattern) >= min(_python_rule(sre_parse.parse(pattern)), UNBOUNDED)


@pytest.mark.parametrize("pattern", REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_proved_harmless_is_refused(pattern):
    """One such pattern stalls or ends the decode loop for all requests."""
    with pytest.raises(ValidationError) as error:
        admit(pattern)
    assert error.value.field == "stop_regex"
    str(error.value).encode()


def test_an_answer_from_memory_is_the_answer_of_a_fresh_look():
    """Or a pattern would be admitted the second time that was refused the first."""
    for _ in range(2):
        assert admit(r"memo\d{3}[a-f]+") == UNBOUNDED
        with pytest.raises(ValidationError):
            admit(r"memo(?:.|.)*Z")
    for number in range(513):
        admit(f"memofill{number}")
    assert admit(r"memo\d{3}[a-f]+") == UNBOUNDED
    with pytest.raises(ValidationError):
        admit(r"memo(?:.|.)*Z")


def test_memory_of_patterns_is_bounded():
    """Clients choose the patterns: unbounded memory is theirs to fill."""
    for number in range(3 * stop_regex.CACHE_COUNT_MAX + 7):
        admit(f"pattern{number}")
        assert len(stop_regex._admitted) <= stop_regex.CACHE_COUNT_MAX


def test_refusals_are_not_remembered():
    """Bad patterns would push out the good ones."""
    for number in range(100):
        with pytest.raises(ValidationError):
            admit(f"({number}")
    assert not stop_regex._admitted


def test_reading_a_pattern_is_itself_bounded():
    """The check runs on the manager's only thread: it must not be the denial of service it prevents."""
    for pattern in (
        "?".join(chr(0x100 + number) for number in range(85)) + "Z",
        "|".join(f"{chr(97 + n % 26)}?{chr(98 + n % 25)}?c" for n in range(42)),
        "(?:a" * 40 + ")?" * 40 + "b",
    ):
        reader = _CountingAmbiguity()
        reader.prepend(sre_parse.parse(pattern), stop_regex._END, ignore_case=False)
        assert reader.comparisons <= stop_regex.PROOFS_MAX


class _CountingAmbiguity(stop_regex._Ambiguity):
    comparisons = 0

    def _fails_at_once(self, rest, first):
        before = self._proofs_left
        answer = super()._fails_at_once(rest, first)
        if self._proofs_left >= 0:
            self.comparisons += before - self._proofs_left
        return answer


# Everything Python's own matcher knows about categories, over all of Unicode.
ALL_CHARACTERS = "".join(map(chr, range(sys.maxunicode + 1)))
CATEGORY_SPELLINGS = {
    sre_constants.CATEGORY_DIGIT: r"\d",
    sre_constants.CATEGORY_SPACE: r"\s",
    sre_constants.CATEGORY_WORD: r"\w",
    sre_constants.CATEGORY_NOT_DIGIT: r"\D",
    sre_constants.CATEGORY_NOT_SPACE: r"\S",
    sre_constants.CATEGORY_NOT_WORD: r"\W",
}


def test_the_categories_are_as_python_has_them():
    """Two sets taken for apart that share a character would hide an ambiguity."""
    members = {}
    for category, is_category in stop_regex._IS_CATEGORY.items():
        inside = frozenset(re.findall(CATEGORY_SPELLINGS[category], ALL_CHARACTERS))
        assert inside == frozenset(filter(is_category, ALL_CHARACTERS))
        members[category] = inside, True
        members[stop_regex._OPPOSITE[category]] = inside, False
    for smaller, larger in stop_regex._WITHIN:
        (one, one_inside), (other, other_inside) = members[smaller], members[larger]
        if one_inside and other_inside:
            assert one < other
        elif one_inside:
            assert one.isdisjoint(other)
        else:
            # The outside of one lies in the outside of the other.
            assert not other_inside
            assert other < one


# Where characters with case and digits live; a check of all of Unicode would take seconds for each set.
MANY_CHARACTERS = "".join(map(chr, [*range(0x3000), *range(0xA640, 0xAC00), *range(0xFF00, 0x10600)]))

SETS = [
    "a", "b", "z", "5", " ", "_", "é", "\n", "-", r"\d", r"\D", r"\s", r"\S", r"\w", r"\W", ".",
    "[a-f]", "[b-y]", "[0-9]",
    "[^a]", "[^0-9]", r"[^\d]", r"[^\w]", r"[^\s]", r"[\d_]", r"[^\dx]",
    "[a-zA-Z]", "[Ā-ӿ]", "[^a-z]", r"[\s\d]", r"[^\W]",
    "k", "s", "K", "\u017f", "\u212a", "i", "\u0131", "\u0130",
]  # fmt: skip


@pytest.mark.parametrize("ignore_case", [False, True])
def test_sets_said_to_be_apart_share_no_character(ignore_case):
    """The proof of harmlessness rests on this: checked against Python's matcher."""
    flags = re.DOTALL | (re.IGNORECASE if ignore_case else 0)
    members = {text: frozenset(re.findall(text, MANY_CHARACTERS, flags)) for text in SETS}
    known = {text: stop_regex._characters(*next(iter(sre_parse.parse(text))), ignore_case) for text in SETS}
    proved = 0
    for one in SETS:
        for other in SETS:
            if known[one].is_apart_from(known[other]):
                proved += 1
                assert members[one].isdisjoint(members[other]), (one, other)
    assert proved > 100


class _TooManyStepsError(Exception):
    """The model took more steps than it was given."""


def _steps_of_one_attempt(pattern: str, text: str, limit: int = 50_000) -> int:
    """Steps of a backtracking matcher on `text`, from its start, if the end is made to fail.

    It goes the ways of Python's: items in order, greedy first, back to the last choice. Failing
    at the end makes it go all of them, except where the pattern's end always succeeds.
    """
    steps = 0

    def sequence(items, ignore, then):
        for op, argument in reversed(list(items)):
            then = item(op, argument, ignore, then)
        return then

    def item(op, argument, ignore, then):
        def step(position):
            nonlocal steps
            steps += 1
            if steps > limit:
                raise _TooManyStepsError
            return go(position)

        if op is sre_constants.SUBPATTERN:
            return sequence(argument[3], ignore, then)
        if op is sre_constants.BRANCH:
            ways = [sequence(body, ignore, then) for body in argument[1]]

            def go(position):
                return any(way(position) for way in ways)
        elif op in {sre_constants.MAX_REPEAT, sre_constants.MIN_REPEAT}:
            low, high, body = argument
            greedy = op is sre_constants.MAX_REPEAT

            def go(position, count=0):
                def more():
                    if count >= high:
                        return False
                    return sequence(
                        body,
                        ignore,
                        lambda after: (after > position or count < low) and go(after, count + 1),
                    )(position)

                if count < low:
                    return more()
                return (more() or then(position)) if greedy else (then(position) or more())
        elif op is sre_constants.AT:

            def go(position):
                return then(position)
        else:
            one = re.compile(_spell(op, argument))

            def go(position):
                return position < len(text) and bool(one.match(text, position)) and then(position + 1)

        return step

    sequence(sre_parse.parse(pattern), False, lambda _: True)(0)
    return steps


def _spell(op, argument) -> str:
    if op is sre_constants.ANY:
        return "."
    if op is sre_constants.LITERAL:
        return re.escape(chr(argument))
    if op is sre_constants.NOT_LITERAL:
        return f"[^{re.escape(chr(argument))}]"
    inside = ""
    for kind, value in argument:
        if kind is sre_constants.NEGATE:
            inside += "^"
        elif kind is sre_constants.CATEGORY:
            inside += CATEGORY_SPELLINGS[value]
        elif kind is sre_constants.RANGE:
            inside += f"{re.escape(chr(value[0]))}-{re.escape(chr(value[1]))}"
        else:
            inside += re.escape(chr(value))
    return f"[{inside}]"


def _worst(pattern: str, length: int) -> int:
    """The most steps over texts that are built to be hard, with an end that fits nothing."""
    return max(
        _steps_of_one_attempt(pattern, text)
        for unit in ("a", "b", "ab", "ba", "aab", "1", "1.", "a ", " ", "a=", "ac")
        for text in (
            (unit * length)[:length],
            (unit * length)[: length - 1] + "\0",
            "a" * (length // 2) + "b" * (length // 2),
        )
    )


LENGTH = 48


@pytest.mark.parametrize(
    "pattern",
    ["a+b+c", r"\d+\.\d+x", r"[.!?]\s*$", r"(\w+)\s*=\s*(\w+)\n", r"a*?b",
     "(?:ab)+c", "(?:a+)?b", "a{1,30}b+c", "a?b?c", "ab?.*.*"],
)  # fmt: skip
def test_an_attempt_costs_steps_in_proportion_to_the_text(pattern):
    """Twice the text, twice the work: a decode step stays a decode step."""
    admit(pattern)
    assert _worst(pattern, 2 * LENGTH) <= 2 * _worst(pattern, LENGTH) + 100


@pytest.mark.parametrize("pattern", ["a*a*b", ".*a.*c", "a+.+c", r"\w+\w+x"])
def test_the_count_of_steps_shows_what_refused_patterns_would_cost(pattern):
    """The measure has to see the fault, or its silence says nothing."""
    with pytest.raises(ValidationError):
        admit(pattern)
    assert _worst(pattern, 2 * LENGTH) > 3 * _worst(pattern, LENGTH)


def test_the_count_of_steps_shows_exponential_cost():
    """As above, for the classic."""
    with pytest.raises(_TooManyStepsError):
        _steps_of_one_attempt("(a+)+b", "a" * 40)


ATOMS = st.sampled_from(["a", "b", "c", ".", "[ab]", "[^a]", r"\d", r"\w", "1"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=5).map("".join),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "+?", "??", "{2}", "{1,3}", "{2,}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
        st.lists(inner, min_size=2, max_size=3).map(lambda items: f"(?:{'|'.join(items)})"),
    ),
    max_leaves=10,
)


@settings(max_examples=100, deadline=None)
@given(PATTERNS)
def test_whatever_is_admitted_is_linear_to_try_and_compiles(pattern):
    """The proof is in the code; this looks for a pattern that slips through it."""
    try:
        bound = admit(pattern)
    except ValidationError:
        assume(False)
    assert bound >= min(_python_rule(sre_parse.parse(pattern)), UNBOUNDED)
    assert not re.compile(pattern).match("")
    for text in ("ab" * 9, "a1 c" * 5, "b" * 18, "cab\nb" * 4):
        match = re.search(pattern, text)
        assert match is None or len(match[0].encode()) <= bound
    assert _worst(pattern, 2 * LENGTH) <= 2 * _worst(pattern, LENGTH) + 100 * len(pattern)


def _python_rule(items) -> int:
    """SGLang's own estimate: one for each character, the sum of a sequence, the most of a branch."""
    total = 0
    for op, argument in items:
        if op in {sre_constants.LITERAL, sre_constants.NOT_LITERAL, sre_constants.IN, sre_constants.ANY}:
            total += 1
        elif op is sre_constants.SUBPATTERN:
            total += _python_rule(argument[3])
        elif op is sre_constants.BRANCH:
            total += max(map(_python_rule, argument[1]))
        elif op in {sre_constants.MAX_REPEAT, sre_constants.MIN_REPEAT}:
            _, high, body = argument
            total += UNBOUNDED if high is sre_constants.MAXREPEAT else high * _python_rule(body)
        elif op is not sre_constants.AT:
            total += UNBOUNDED
    return total
