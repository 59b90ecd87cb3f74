"""The sampler: what a request's sampling parameters do to the tokens it gets."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from manager.engines.sampler import TOP_K_ALL, Candidates, Sampler, SamplingParams, at_temperature
from manager.finish import FinishCode

EOS = 0
# ids 10 to 14, most probable first; weights need not sum to 1
FIVE = Candidates.from_weights({10: 4.0, 11: 2.0, 12: 1.0, 13: 0.6, 14: 0.4})
RESERVE = Candidates.from_weights({20: 3.0, 21: 2.0, 22: 1.0, EOS: 0.5})


def tokens(params: SamplingParams, count: int, *, seed: int = 1, prompt_ids=(), candidates=FIVE) -> list[int]:
    sampler = Sampler(params, seed=seed, prompt_ids=prompt_ids)
    return [sampler.draw(candidates, RESERVE)[0] for _ in range(count)]


def kept(params: SamplingParams, candidates: Candidates = FIVE) -> set[int]:
    """The ids that first draws with many seeds bring."""
    return {tokens(params, 1, seed=seed, candidates=candidates)[0] for seed in range(400)}


def test_plain_draws_follow_the_probabilities():
    """A sampler that leans to one side changes what every model says."""
    counts = Counter(tokens(SamplingParams(), 20_000))
    for token_id, weight in zip(FIVE.ids, FIVE.weights, strict=True):
        assert counts[token_id] / 20_000 == pytest.approx(weight / FIVE.total, abs=0.01)


def test_greedy_takes_the_most_probable_whatever_the_seed():
    """temperature 0 is how people ask for a reproducible answer."""
    assert kept(SamplingParams(top_k=1)) == {10}
    assert kept(SamplingParams(temperature=0.0)) == {10}


def test_of_equal_candidates_greedy_takes_the_first():
    """An order that depends on chance would make greedy answers differ from run to run."""
    assert kept(SamplingParams(top_k=1), Candidates.from_weights({3: 1.0, 1: 1.0, 2: 1.0})) == {3}


def test_a_seed_gives_the_same_tokens_whatever_else_is_drawn_meanwhile():
    """sampling_seed promises the same answer in a full batch as alone."""
    alone = tokens(SamplingParams(), 50, seed=7)
    ours, other = Sampler(SamplingParams(), seed=7), Sampler(SamplingParams(top_p=0.5), seed=8)
    beside = []
    for _ in range(50):
        other.draw(FIVE, RESERVE)
        beside.append(ours.draw(FIVE, RESERVE)[0])
    assert beside == alone


@pytest.mark.parametrize("other", [2, -1, 1 + (1 << 40)])
def test_other_seeds_give_other_tokens(other: int):
    """Ten samples of one prompt by seeds 1 to 10 must not be one sample."""
    assert tokens(SamplingParams(), 50, seed=1) != tokens(SamplingParams(), 50, seed=other)


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1, 0])
def test_every_seed_of_64_bits_is_taken(seed: int):
    """A seed that the front door admits must not fail at the engine."""
    assert tokens(SamplingParams(), 1, seed=seed)[0] in FIVE.ids


def test_top_k_keeps_so_many():
    assert kept(SamplingParams(top_k=2)) == {10, 11}
    assert kept(SamplingParams(top_k=99)) == set(FIVE.ids)
    assert kept(SamplingParams(top_k=TOP_K_ALL)) == set(FIVE.ids)


def test_top_p_keeps_the_fewest_that_reach_it():
    """Probabilities are 1/2, 1/4, 1/8, ..."""
    assert kept(SamplingParams(top_p=0.5)) == {10}
    assert kept(SamplingParams(top_p=0.51)) == {10, 11}
    assert kept(SamplingParams(top_p=0.76)) == {10, 11, 12}


def test_a_tiny_top_p_keeps_one():
    """A cut that leaves nothing would end the request, or the engine."""
    assert kept(SamplingParams(top_p=1e-300)) == {10}


def test_min_p_keeps_what_is_near_the_best():
    assert kept(SamplingParams(min_p=0.25)) == {10, 11, 12}
    assert kept(SamplingParams(min_p=1.0)) == {10}
    assert kept(SamplingParams(min_p=1.0), Candidates.from_weights({1: 2.0, 2: 2.0, 3: 1.0})) == {1, 2}


def test_the_three_cuts_are_measured_on_one_distribution():
    """Of 0.5, 0.3, 0.2 cut to two, top_p 0.6 keeps both; after renormalizing it would keep one (0.625)."""
    three = Candidates.from_weights({1: 0.5, 2: 0.3, 3: 0.2})
    assert kept(SamplingParams(top_k=2, top_p=0.6), three) == {1, 2}


def test_temperature_sharpens_and_flattens():
    cold, hot = at_temperature(FIVE, 0.5), at_temperature(FIVE, 2.0)
    assert cold.weights[1] / cold.weights[0] == pytest.approx(0.25)
    assert hot.weights[1] / hot.weights[0] == pytest.approx(math.sqrt(0.5))
    assert cold.ids == hot.ids == FIVE.ids


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-3, 1e300])
@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_extreme_temperatures_draw_something(temperature: float, penalty: float):
    """A division by next to nothing must not overflow for one request and stop all of them."""
    drawn = set(tokens(SamplingParams(temperature=temperature, presence_penalty=penalty), 60))
    assert drawn <= set(FIVE.ids)
    assert (drawn == set(FIVE.ids)) == (temperature > 1)


def test_temperature_comes_before_the_cuts():
    """At temperature 0.5 the best of FIVE has 16/21.52 = 0.74, alone enough for top_p 0.7; at 1 only 0.5."""
    assert kept(SamplingParams(temperature=0.5, top_p=0.7)) == {10}
    assert kept(SamplingParams(temperature=1.0, top_p=0.7)) == {10, 11}


def test_penalties_come_before_temperature():
    """A presence penalty of ln 4 at temperature 0.5 weighs ln 16: 4^2 against 2^2 becomes 1 against 4."""
    params = SamplingParams(temperature=0.5, presence_penalty=math.log(4), top_k=2)
    two = Candidates.from_weights({1: 4.0, 2: 2.0})
    seconds = Counter()
    for seed in range(4000):
        first, second = tokens(params, 2, seed=seed, candidates=two)
        if first == 1:
            seconds[second] += 1
    assert seconds[1] / seconds.total() == pytest.approx(0.2, abs=0.03)


def test_frequency_penalty_grows_with_every_use():
    """Greedy: 4 against 2 is ln 2 = 0.69, so with 0.4 the first is taken twice, then the second."""
    two = Candidates.from_weights({1: 4.0, 2: 2.0})
    assert tokens(SamplingParams(top_k=1, frequency_penalty=0.4), 4, candidates=two) == [1, 1, 2, 1]


def test_presence_penalty_counts_once():
    """Greedy with 0.5: one use costs less than ln 2, and a second use costs nothing more."""
    two = Candidates.from_weights({1: 4.0, 2: 2.0})
    assert tokens(SamplingParams(top_k=1, presence_penalty=0.5), 4, candidates=two) == [1, 1, 1, 1]
    assert tokens(SamplingParams(top_k=1, presence_penalty=0.8), 4, candidates=two) == [1, 2, 1, 1]


def test_a_negative_penalty_favours_what_was_said():
    assert tokens(SamplingParams(top_k=1, presence_penalty=-2.0, logit_bias={12: 9.0}), 3) == [12, 12, 12]


def test_repetition_penalty_counts_the_prompt_too():
    """ln 0.5 times 2 is ln 0.25, the weight of the second: the prompt's id falls behind it."""
    params = SamplingParams(top_k=1, repetition_penalty=2.0)
    three = Candidates.from_weights({1: 0.5, 2: 0.3, 3: 0.2})
    assert tokens(params, 2, prompt_ids=[1, 99], candidates=three) == [2, 1]
    assert tokens(params, 1, prompt_ids=[99], candidates=three) == [1]


def test_logit_bias_forces_an_id_that_is_no_candidate():
    """+100 is the documented way to force a token."""
    assert kept(SamplingParams(logit_bias={4000: 100.0})) == {4000}


def test_logit_bias_bans_an_id():
    assert kept(SamplingParams(logit_bias={10: -100.0})) == {11, 12, 13, 14}


def test_a_negative_bias_brings_no_id_in():
    assert kept(SamplingParams(logit_bias={4000: -1.0})) == set(FIVE.ids)


def test_all_candidates_banned_alike_are_all_there_still():
    """A bias is no mask: with nothing else to say the model says one of them."""
    assert kept(SamplingParams(logit_bias=dict.fromkeys(FIVE.ids, -1000.0))) == set(FIVE.ids)


def test_no_ending_before_the_minimum():
    """min_new_tokens is asked for where an empty answer is a failure."""
    params = SamplingParams(min_new_tokens=3, ending_ids=frozenset({10}), top_k=1)
    sampler = Sampler(params, seed=1)
    assert [sampler.draw(FIVE, RESERVE) for _ in range(4)] == [
        (11, FinishCode.NONE, 0),
        (11, FinishCode.NONE, 0),
        (11, FinishCode.NONE, 0),
        (10, FinishCode.STOP_TOKEN, 10),
    ]


def test_all_masked_falls_back_to_the_reserve():
    """At the end of the text a model knows nothing but the end; the request still gets its tokens."""
    only_the_end = Candidates.from_weights({EOS: 1.0})
    params = SamplingParams(min_new_tokens=1, ending_ids=frozenset({EOS}), top_k=1)
    sampler = Sampler(params, seed=1)
    assert sampler.draw(only_the_end, RESERVE) == (20, FinishCode.NONE, 0)
    assert sampler.draw(only_the_end, RESERVE) == (EOS, FinishCode.STOP_TOKEN, EOS)


def test_a_request_that_masks_everything_ends_early():
    """The other ways are to loop for ever or to say what was forbidden and go on."""
    everything = frozenset(FIVE.ids) | frozenset(RESERVE.ids)
    sampler = Sampler(SamplingParams(min_new_tokens=5, ending_ids=everything, top_k=1), seed=1)
    assert sampler.draw(FIVE, RESERVE) == (10, FinishCode.STOP_TOKEN, 10)


def test_the_limit_ends_with_the_number_of_tokens():
    sampler = Sampler(SamplingParams(max_new_tokens=2, top_k=1), seed=1)
    assert [sampler.draw(FIVE, RESERVE)[1:] for _ in range(2)] == [
        (FinishCode.NONE, 0),
        (FinishCode.LENGTH, 2),
    ]


def test_a_stop_token_at_the_limit_is_a_stop():
    """The model was done by itself: "length" would tell the client that the answer is cut."""
    sampler = Sampler(SamplingParams(max_new_tokens=1, ending_ids=frozenset({10}), top_k=1), seed=1)
    assert sampler.draw(FIVE, RESERVE) == (10, FinishCode.STOP_TOKEN, 10)
