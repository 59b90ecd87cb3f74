"""What goes on in a ring, in words."""

from dataclasses import replace

import pytest

from shmring import EndStatistics, RingStatistics
from shmring.cli.diagnosis import Condition, diagnose

SECOND = 1_000_000_000
MILLISECOND = 1_000_000


def end(pid, **changes):
    awake = EndStatistics(
        state="attached",
        pid=pid,
        attaches=1,
        position=0,
        records=0,
        bytes=0,
        batches=0,
        stalls=0,
        parks=0,
        parked_ns=0,
        wakes_sent=0,
        idle_ns=None,
        waiting_ns=None,
    )
    return replace(awake, **changes)


def ring(producer=None, consumer=None, **changes):
    """The producer is pid 4, the consumer pid 9; three records of 900 bytes together are untaken."""
    values = {
        "name": "demo",
        "capacity_bytes": 4096,
        "used_bytes": 900,
        "high_water_bytes": 2000,
        "owner_state": "attached",
        "owner_pid": 2,
        "is_retired": False,
        "producer": end(4, records=10, **(producer or {})),
        "consumer": end(9, records=7, **(consumer or {})),
        "waits_log2_ns": (0,) * 64,
    }
    return RingStatistics(**(values | changes))


EMPTY = {"used_bytes": 0}
NEVER = {"state": "never", "attaches": 0}
LOST = {"state": "lost"}
FINISHED = {"state": "finished"}

CASES = {
    "a full ring names both ends and the time": (
        ring({"waiting_ns": 3_200 * MILLISECOND}, {"idle_ns": 4 * SECOND}),
        Condition.FULL,
        (
            "full: the producer (pid 4) has waited 3.2 s for the consumer (pid 9), "
            "which has taken nothing for 4 s"
        ),
    ),
    "a full ring whose consumer never took anything": (
        ring({"waiting_ns": SECOND}),
        Condition.FULL,
        "full: the producer (pid 4) has waited 1 s for the consumer (pid 9), which has taken nothing yet",
    ),
    "two that wait for each other": (
        ring({"waiting_ns": 2 * SECOND}, {"waiting_ns": 3 * SECOND}),
        Condition.STUCK,
        (
            "stuck: the producer (pid 4) has waited 2 s for room, and the consumer (pid 9) sleeps "
            "without releasing 3 records (900 B)"
        ),
    ),
    "a consumer that is only just being woken is not stuck": (
        ring({"waiting_ns": 2 * SECOND}, {"waiting_ns": MILLISECOND, "idle_ns": MILLISECOND}),
        Condition.FULL,
        (
            "full: the producer (pid 4) has waited 2 s for the consumer (pid 9), "
            "which has taken nothing for 1 ms"
        ),
    ),
    "an idle ring": (
        ring({"idle_ns": 5 * SECOND}, {"waiting_ns": 5 * SECOND}, **EMPTY),
        Condition.IDLE,
        (
            "idle: the consumer (pid 9) sleeps, nothing to take; "
            "the producer (pid 4) has published nothing for 5 s"
        ),
    ),
    "an idle ring whose ends only try": (
        ring({"idle_ns": 5 * SECOND}, **EMPTY),
        Condition.IDLE,
        "idle: nothing to take; the producer (pid 4) has published nothing for 5 s",
    ),
    "a sleeper that keeps what it was given": (
        ring({"idle_ns": 5 * SECOND}, {"waiting_ns": 5 * SECOND}),
        Condition.IDLE,
        "idle: the consumer (pid 9) sleeps and has 3 records (900 B) not yet released",
    ),
    "a sleeper that was only just given something": (
        ring({"idle_ns": MILLISECOND}, {"waiting_ns": 5 * SECOND}),
        Condition.FLOWING,
        "flowing: 3 records (900 B) just published; the consumer (pid 9) wakes",
    ),
    "a consumer busy with itself": (
        ring({"idle_ns": MILLISECOND}, {"idle_ns": 7 * SECOND}),
        Condition.BEHIND,
        "behind: the consumer (pid 9) is awake and has taken nothing for 7 s, with 3 records (900 B) to take",
    ),
    "a consumer that never began": (
        ring({"idle_ns": MILLISECOND}, used_bytes=4000),
        Condition.BEHIND,
        (
            "behind, nearly full (98%): the consumer (pid 9) is awake and has taken nothing yet, "
            "with 3 records (3.9 KiB) to take"
        ),
    ),
    "a ring at work": (
        ring({"idle_ns": MILLISECOND}, {"idle_ns": 2 * MILLISECOND}),
        Condition.FLOWING,
        (
            "flowing: the consumer (pid 9) is awake and has taken nothing for 2 ms, "
            "with 3 records (900 B) to take"
        ),
    ),
    "a ring at work, and all is taken": (
        ring({"idle_ns": MILLISECOND}, {"idle_ns": MILLISECOND}, **EMPTY),
        Condition.FLOWING,
        "flowing: all is taken; the last batch was published 1 ms ago",
    ),
    "a dead consumer leaves records": (
        ring({"waiting_ns": 3 * SECOND}, LOST),
        Condition.LOST,
        (
            "the consumer (pid 9) is gone with 3 records (900 B) untaken; "
            "the producer (pid 4) has waited 3 s for room"
        ),
    ),
    "a dead producer leaves nothing": (
        ring(LOST, {"waiting_ns": SECOND}, **EMPTY),
        Condition.LOST,
        "the producer (pid 4) is gone with nothing untaken; the consumer (pid 9) sleeps",
    ),
    "a dead producer after a finished consumer": (
        ring(LOST, FINISHED),
        Condition.LOST,
        "the producer (pid 4) is gone with 3 records (900 B) untaken; the consumer (pid 9) has finished",
    ),
    "both dead": (
        ring(LOST, LOST),
        Condition.LOST,
        "both ends are gone: producer pid 4, consumer pid 9; 3 records (900 B) untaken",
    ),
    "never attached": (
        ring(NEVER, NEVER, **EMPTY),
        Condition.UNUSED,
        "never attached: nobody has taken either end yet",
    ),
    "no consumer yet": (
        ring({}, NEVER),
        Condition.UNPAIRED,
        "there has been no consumer yet; 3 records (900 B) untaken; the producer (pid 4) is awake",
    ),
    "no producer yet": (
        ring(NEVER, {"waiting_ns": SECOND}, **EMPTY),
        Condition.UNPAIRED,
        "there has been no producer yet; nothing untaken; the consumer (pid 9) sleeps",
    ),
    "the producer has finished": (
        ring(FINISHED, {}),
        Condition.FINISHED,
        "the producer (pid 4) has finished with 3 records (900 B) untaken; the consumer (pid 9) is awake",
    ),
    "both have finished": (
        ring(FINISHED, FINISHED, **EMPTY),
        Condition.FINISHED,
        "finished: both ends have closed with nothing untaken",
    ),
    "positions that cannot be": (
        ring(used_bytes=5000),
        Condition.DAMAGED,
        "damaged: published and released position are 5000 bytes apart, in a ring of 4096",
    ),
    "a state that cannot be": (
        ring({"state": "unknown"}),
        Condition.DAMAGED,
        "damaged: the state of an end is none that exists",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_sentence_says_who_waits_for_whom(case):
    """The operator reads one sentence and must not be sent to the wrong process by it."""
    values, condition, sentence = CASES[case]
    diagnosis = diagnose(values)
    assert (diagnosis.condition, diagnosis.sentence) == (condition, sentence)


def test_every_condition_has_a_case():
    """A condition that no test constructs is one that nobody has read."""
    assert {condition for _, condition, _ in CASES.values()} == set(Condition)


@pytest.mark.parametrize("case", CASES)
def test_the_brief_form_fits_the_last_column_of_top(case):
    """On 80 columns it is all that is seen of the diagnosis."""
    assert 0 < len(diagnose(CASES[case][0]).brief) <= 21


def test_every_state_of_the_two_ends_has_a_sentence():
    """A combination that was not thought of must not end the listing of all other rings."""
    states = ["never", "attached", "finished", "lost", "unknown"]
    for left in states:
        for right in states:
            for changes in ({}, EMPTY):
                assert diagnose(ring({"state": left}, {"state": right}, **changes)).sentence


@pytest.mark.parametrize(("published", "text"), [(8, "1 record (900 B)"), (7, "900 B"), (6, "900 B")])
def test_what_is_untaken_is_told_even_where_the_counts_disagree(published, text):
    """Two processes count, a moment apart: the bytes are there although the records seem not to be."""
    values = ring({}, FINISHED)
    values = replace(values, producer=replace(values.producer, records=published))
    assert f" with {text} untaken" in diagnose(values).sentence
