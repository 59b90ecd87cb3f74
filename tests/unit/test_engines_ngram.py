"""The n-gram model, and the engine that runs it."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from manager.engines import corpus
from manager.engines.engine import Admitted
from manager.engines.ngram import BACKOFF, FOLLOWERS_MAX, NGramModel
from manager.engines.ngram_engine import NGramEngine
from manager.errors import ConfigError, ValidationError
from manager.extras import NOTHING_ASKED, BatchExtras, ExtrasAsked
from manager.finish import FinishCode
from manager.sampling import SAMPLING_DTYPE

EOS = 9
PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 1 << 30, "repetition_penalty": 1.0, "max_new_tokens": 30}


@pytest.fixture(scope="module")
def book() -> NGramModel:
    return NGramModel.load()


@pytest.fixture
def small() -> NGramModel:
    """0 1 2 is followed by 3 twice and by 4 once; 5 1 2 by 6; id 8 never occurs."""
    return NGramModel(
        [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 4], [5, 1, 2, 6]], vocab_size=10, eos_token_id=EOS
    )


def scores(model: NGramModel, ids: list[int]) -> dict[int, float]:
    candidates = model.candidates(model.context(ids))
    return dict(zip(candidates.ids, candidates.weights, strict=True))


def engine_of(model: NGramModel, *, context_length: int = 1000, seed: int = 1) -> NGramEngine:
    return NGramEngine(
        vocab_size=model.vocab_size,
        context_length=context_length,
        eos_token_ids=[model.eos_token_id],
        randomness=random.Random(seed),
        model=model,
    )


def request(
    request_id: int,
    prompt_ids,
    *,
    stop_token_ids=(),
    extras=None,
    asked: ExtrasAsked = NOTHING_ASKED,
    **sampling: Any,
) -> Admitted:
    row = np.zeros(1, SAMPLING_DTYPE)
    for name, value in {**PLAIN, **sampling}.items():
        row[name] = value
    return Admitted(
        request_id,
        np.array(prompt_ids, np.int32),
        row[0],
        np.array(stop_token_ids, np.int32),
        extras or {},
        asked,
    )


def run(engine: NGramEngine) -> dict[int, tuple[list[int], FinishCode, int]]:
    """Step until nothing runs: by request, its tokens and how it finished."""
    tokens: dict[int, list[int]] = {}
    ends: dict[int, tuple[FinishCode, int]] = {}
    while engine.running_count:
        output = engine.step()
        token_ids = output.token_ids.tolist()
        for request_id, count, code, value in zip(
            output.request_ids.tolist(),
            output.token_counts.tolist(),
            output.finish_codes.tolist(),
            output.finish_values.tolist(),
            strict=True,
        ):
            assert request_id not in ends
            tokens.setdefault(request_id, []).extend(token_ids[:count])
            del token_ids[:count]
            if code:
                ends[request_id] = FinishCode(code), value
        assert not token_ids
    return {request_id: (tokens[request_id], *ends[request_id]) for request_id in tokens}


def answer(engine: NGramEngine, *arguments: Any, **named: Any) -> tuple[list[int], FinishCode, int]:
    engine.admit(request(1, *arguments, **named))
    return run(engine)[1]


def test_the_longest_context_scores_by_its_counts(small: NGramModel):
    found = scores(small, [0, 1, 2])
    assert found[3] == pytest.approx(2 / 3)
    assert found[4] == pytest.approx(1 / 3)


def test_shorter_contexts_give_the_rest_at_a_discount(small: NGramModel):
    """6 followed 1 2 once in four, but never 0 1 2."""
    assert scores(small, [0, 1, 2])[6] == pytest.approx(BACKOFF * 1 / 4)


def test_an_unknown_context_backs_off_to_what_it_ends_with(small: NGramModel):
    assert scores(small, [7, 1, 2]) == scores(small, [1, 2])
    assert scores(small, [8]) == scores(small, [4096])


@pytest.mark.parametrize("foreign", [-1, 10, 11, 2**31 - 1, -(2**31)])
def test_ids_outside_the_vocabulary_are_unknown_and_no_error(small: NGramModel, foreign: int):
    """Another tokenizer's id, in one request, must not end the engine for all; nor stand for another id."""
    assert scores(small, [foreign]) == scores(small, [8])
    assert scores(small, [foreign, 1, 2]) == scores(small, [1, 2])


def test_an_empty_prompt_begins_a_document(small: NGramModel):
    assert scores(small, [])[0] == pytest.approx(3 / 4)
    assert scores(small, []) == scores(small, [EOS])


def test_what_comes_before_an_empty_prompt_is_in_no_text():
    """Were it the id 0, a text with 0 0 before an eos would speak for all beginnings."""
    model = NGramModel([[0, 0], [7], [8], [8]], vocab_size=10, eos_token_id=EOS)
    assert model.candidates(model.context([])).ids[0] == 8


def test_a_document_can_end(small: NGramModel):
    assert scores(small, [1, 2, 6])[EOS] == 1.0


def test_the_reserve_has_every_id(small: NGramModel):
    """It is what is left when all candidates are masked."""
    assert sorted(small.unigrams.ids) == list(range(10))
    assert min(small.unigrams.weights) > 0


def test_candidates_of_the_book_are_sparse_and_sorted(book: NGramModel):
    context = book.context([])
    dice = random.Random(3)
    for _ in range(2000):
        candidates = book.candidates(context)
        assert 0 < len(candidates.ids) <= 4 * FOLLOWERS_MAX
        assert len(set(candidates.ids)) == len(candidates.ids)
        assert list(candidates.weights) == sorted(candidates.weights, reverse=True)
        context = book.extended(context, dice.choice(candidates.ids))


def test_the_same_candidates_whether_new_or_kept(book: NGramModel):
    """What is put together once must be what would be put together again."""
    again = NGramModel.load()
    contexts = [book.context([a, b, c]) for a in (0, 300, 5000) for b in (13, 264) for c in (11, 270)]
    first = [book.candidates(context) for context in contexts]
    assert [book.candidates(context) for context in contexts] == first
    assert [again.candidates(context) for context in reversed(contexts)] == first[::-1]


def test_the_book_gives_readable_text(book: NGramModel):
    """Greedy, so that it can be told from noise: it goes on as the book does."""
    tokenizer = Tokenizer.from_file(str(corpus.TOKENIZER_PATH))
    prompt = tokenizer.encode("Because of an hereditary").ids
    token_ids, _, _ = answer(engine_of(book), prompt, top_k=1, max_new_tokens=4)
    assert tokenizer.decode(token_ids).startswith(" recklessness")


def test_texts_of_the_book_end_by_themselves_now_and_then(book: NGramModel):
    """A model that never ends hides every fault of the end of a stream."""
    engine = engine_of(book, context_length=100_000)
    for request_id in range(20):
        engine.admit(request(request_id, [], max_new_tokens=2000))
    ends = run(engine)
    stopped = [end for end in ends.values() if end[1] is FinishCode.STOP_TOKEN]
    assert len(stopped) > 10
    for token_ids, _, value in stopped:
        assert token_ids[-1] == value == corpus.EOS_TOKEN_ID
        assert corpus.EOS_TOKEN_ID not in token_ids[:-1]


def test_another_vocabulary_is_refused(small: NGramModel):
    """Its ids would be decoded into nonsense by the deployment's tokenizer."""
    with pytest.raises(ConfigError, match="vocab_size=4096, expected=10") as caught:
        NGramEngine(
            vocab_size=4096, context_length=9, eos_token_ids=[], randomness=random.Random(1), model=small
        )
    assert caught.value.setting == "tokenizer"


def test_a_seed_gives_the_same_answer_in_any_batch(book: NGramModel):
    """sampling_seed is for comparing runs; a busy server must not change the answer."""
    alone = answer(engine_of(book), [300, 301], sampling_seed=5, has_seed=True)
    engine = engine_of(book, seed=2)
    for request_id in range(2, 9):
        engine.admit(request(request_id, [300, 301], temperature=0.1 * request_id))
    engine.step()
    engine.admit(request(1, [300, 301], sampling_seed=5, has_seed=True))
    assert run(engine)[1] == alone


def test_requests_without_a_seed_differ_from_each_other(book: NGramModel):
    engine = engine_of(book)
    engine.admit(request(1, []))
    engine.admit(request(2, []))
    answers = run(engine)
    assert answers[1] != answers[2]


def test_the_limit_and_the_context_end_with_length(small: NGramModel):
    for limit, context_length in ((4, 100), (-1, 7)):
        engine = engine_of(small, context_length=context_length)
        token_ids, code, value = answer(engine, [0, 1, 2], max_new_tokens=limit, ignore_eos=True)
        assert (len(token_ids), code, value) == (4, FinishCode.LENGTH, 4)


def test_no_new_tokens_is_one_row_of_none(small: NGramModel):
    """max_new_tokens 0 is asked for to warm a cache: an answer without text, not a hang."""
    engine = engine_of(small, context_length=3)
    engine.admit(request(1, [0], max_new_tokens=0))
    engine.admit(request(2, [0]))
    engine.admit(request(3, [0, 1, 2]))
    assert engine.running_count == 3
    output = engine.step()
    assert output.request_ids.tolist() == [2, 1, 3]
    assert output.token_counts.tolist() == [1, 0, 0]
    assert output.finish_codes.tolist() == [FinishCode.NONE, FinishCode.LENGTH, FinishCode.LENGTH]
    assert output.finish_values.tolist() == [0, 0, 0]
    assert engine.running_count == 1


def test_stop_tokens_and_eos_end_and_are_in_the_answer(small: NGramModel):
    """The worker trims what it is told of; it cannot trim what it was not given."""
    greedy = {"top_k": 1}
    assert answer(engine_of(small), [0, 1], **greedy) == ([2, 3, EOS], FinishCode.STOP_TOKEN, EOS)
    assert answer(engine_of(small), [0, 1], stop_token_ids=[3], **greedy) == (
        [2, 3],
        FinishCode.STOP_TOKEN,
        3,
    )
    token_ids, code, _ = answer(engine_of(small), [0, 1], ignore_eos=True, max_new_tokens=9, **greedy)
    assert (token_ids[:4], len(token_ids), code) == ([2, 3, EOS, 0], 9, FinishCode.LENGTH)


def test_min_new_tokens_puts_the_end_off(small: NGramModel):
    for seed in range(20):
        token_ids, code, _ = answer(
            engine_of(small, seed=seed), [1, 2, 6], min_new_tokens=5, max_new_tokens=200
        )
        assert code is FinishCode.STOP_TOKEN
        assert len(token_ids) > 5


def test_logit_bias_of_the_wire_is_by_text_ids(small: NGramModel):
    """JSON keys are strings; they must reach the sampler as ids."""
    token_ids, _, _ = answer(engine_of(small), [0, 1], extras={"logit_bias": {"8": 100.0}}, max_new_tokens=3)
    assert token_ids == [8, 8, 8]


@pytest.mark.parametrize("bias", [{"10": 1.0}, {"-1": 1.0}, {"x": 1.0}, {"1": float("nan")}, {"1": "a"}, [1]])
def test_a_bias_that_makes_no_sense_is_refused(small: NGramModel, bias: Any):
    with pytest.raises(ValidationError) as caught:
        answer(engine_of(small), [0], extras={"logit_bias": bias})
    assert caught.value.field == "logit_bias"


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "frequency_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_refused(small: NGramModel, name: str, value: float):
    """One NaN in the column must not end the step of every other request."""
    with pytest.raises(ValidationError, match=name):
        answer(engine_of(small), [0], **{name: value})


def test_a_repetition_penalty_knows_the_prompt(small: NGramModel):
    """After 1 2 comes 3, twice as often as anything else, unless the prompt has had it."""
    penalized = {"top_k": 1, "repetition_penalty": 2.0, "max_new_tokens": 1}
    assert answer(engine_of(small), [1, 2], **penalized)[0] == [3]
    assert answer(engine_of(small), [4, 1, 2], **penalized)[0] == [3]
    assert answer(engine_of(small), [3, 1, 2], **penalized)[0] == [4]


@pytest.mark.parametrize("name", ["json_schema", "regex", "ebnf", "structural_tag"])
def test_constrained_decoding_is_refused(small: NGramModel, name: str):
    """Text that ignores the schema would fail in the client's parser, far from here."""
    with pytest.raises(ValidationError, match=name):
        answer(engine_of(small), [0], extras={name: "{}"})


def test_a_dropped_request_is_gone(small: NGramModel):
    engine = engine_of(small)
    engine.admit(request(1, [0], ignore_eos=True))
    engine.admit(request(2, [0], ignore_eos=True))
    engine.admit(request(3, [0], max_new_tokens=0))
    engine.drop(np.array([1, 3, 77], np.uint64))
    assert engine.step().request_ids.tolist() == [2]


def _extras(engine: NGramEngine) -> list[BatchExtras | None]:
    steps = []
    while engine.running_count:
        steps.append(engine.step().extras)
    return steps


def test_log_probabilities_are_the_models_own(small: NGramModel):
    """A client compares models by them: what its own sampling parameters do must not show."""
    engine = engine_of(small)
    asked = ExtrasAsked(return_logprob=True, top_logprobs_num=2, token_ids_logprob=(8, 4))
    bias = {"logit_bias": {"4": 100.0}}
    engine.admit(request(1, [0, 1, 2], max_new_tokens=1, asked=asked, extras=bias, temperature=0.1))
    expected = scores(small, [0, 1, 2])
    total = sum(expected.values())
    engine.admit(request(2, [0, 1, 2], max_new_tokens=1))
    (extras,) = _extras(engine)
    assert extras is not None
    of_four = pytest.approx(math.log(expected[4] / total))
    assert (extras.output.values, extras.output.ids) == ([[of_four], None], [[4], None])
    (values,) = extras.output_top.values[0]
    assert extras.output_top.ids == [[[3, 4]], None]
    assert values == [pytest.approx(math.log(expected[3] / total)), of_four]
    (values,) = extras.output_token_ids.values[0]
    assert extras.output_token_ids.ids == [[[8, 4]], None]
    assert values == [-16.0, of_four]
    assert extras.input is extras.input_top is extras.hidden_states is None


def test_a_step_of_nobody_who_asks_has_no_extras(small: NGramModel):
    """They cost time in every part."""
    engine = engine_of(small)
    engine.admit(request(1, [0, 1, 2]))
    assert set(_extras(engine)) == {None}


@pytest.mark.parametrize("max_new_tokens", [0, 1, 3])
@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_the_prompt_is_scored_once_from_where_it_is_asked(small: NGramModel, start: int, max_new_tokens: int):
    """Each token given those before it; the first has none. No new tokens are needed for it."""
    engine = engine_of(small)
    prompt = [0, 1, 2]
    asked = ExtrasAsked(
        return_logprob=True, logprob_start_len=start, top_logprobs_num=1, token_ids_logprob=(2,)
    )
    engine.admit(
        request(1, prompt, max_new_tokens=max_new_tokens, asked=asked, ignore_eos=True, min_new_tokens=9)
    )
    first, *rest = _extras(engine)
    assert all(extras is not None and extras.input is None for extras in rest)
    if start == len(prompt):
        assert first is None or first.input is None
        return
    assert first is not None
    assert first.input.ids == [prompt[start:]]
    values = first.input.values[0]
    for place, value in enumerate(values, start):
        if place == 0:
            assert value is None
            assert first.input_top.values[0][0] is None
            continue
        model = scores(small, prompt[:place])
        assert value == pytest.approx(math.log(model[prompt[place]] / sum(model.values())))
        assert len(first.input_top.ids[0][place - start]) == 1
        assert first.input_token_ids.ids[0][place - start] == [2]


def test_hidden_states_are_refused(small: NGramModel):
    """There are none, and an answer without them would look like a fault."""
    with pytest.raises(ValidationError, match="no hidden states"):
        engine_of(small).admit(request(1, [0], asked=ExtrasAsked(return_hidden_states=True)))
