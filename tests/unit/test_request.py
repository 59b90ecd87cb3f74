"""What a request stands for: prompts, samples, names, and what is too much of them."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager.errors import ValidationError
from manager.request import BATCH_COUNT_MAX, BROADCAST_BYTES_MAX, GenerateRequest, fan_out, to_token_ids
from manager.sampling import SAMPLES_MAX, SamplingParams


def _source():
    """Random bytes that are not: 0, 0, ..., then 1, 1, ..."""
    numbers = itertools.count()
    return lambda count: next(numbers).to_bytes(count, "big")


def _split(**fields):
    preferred = fields.pop("preferred", None)
    return fan_out(GenerateRequest(**fields), preferred=preferred, random_bytes=_source())


def _refused(field, **fields):
    with pytest.raises(ValidationError) as error:
        _split(**fields)
    assert error.value.field == field
    assert error.value.status == 400
    assert field in str(error.value)
    str(error.value).encode()


def test_a_string_is_one_request_with_defaults():
    """The plain case, and what it means when nothing else is said."""
    [single] = _split(text="hi")
    assert (single.index, single.sample, single.text, single.input_ids) == (0, 0, "hi", None)
    assert single.sampling == SamplingParams()
    assert single.rid == single.client_rid == "0" * 32
    assert (single.stream, single.return_logprob, single.return_hidden_states) == (False, False, False)
    assert (single.logprob_start_len, single.top_logprobs_num, single.token_ids_logprob) == (-1, 0, None)
    assert single.return_text_in_logprobs is False


def test_a_flat_list_of_ids_is_one_prompt():
    """It must not be taken for a batch of one-token prompts."""
    [single] = _split(input_ids=[1, 2, 3])
    assert single.text is None
    assert single.input_ids.dtype == np.int32
    assert single.input_ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("prompt", "is_batch", "count"),
    [
        ({"text": "a"}, False, 1),
        ({"text": ["a"]}, True, 1),
        ({"text": ("a", "b")}, True, 2),
        ({"input_ids": [1, 2]}, False, 1),
        ({"input_ids": [[1, 2]]}, True, 1),
        ({"input_ids": [[1], [2, 3]]}, True, 2),
        ({"input_ids": [(1,), np.array([2, 3])]}, True, 2),
        ({"input_ids": np.array([1, 2])}, False, 1),
        ({"input_ids": np.array([[1, 2], [3, 4]])}, True, 2),
    ],
)
def test_the_form_of_the_prompt_decides_whether_it_is_a_batch(prompt, is_batch, count):
    """A list of one is answered with a list of one: clients index into it."""
    assert GenerateRequest(**prompt).is_batch is is_batch
    singles = _split(**prompt)
    assert [single.index for single in singles] == list(range(count))


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("text", {}),
        ("text", {"text": "a", "input_ids": [1]}),
        ("text", {"text": ""}),
        ("text", {"text": []}),
        ("text", {"text": ["a", ""]}),
        ("text", {"text": ["a", None]}),
        ("text", {"text": ["a", 5]}),
        ("text", {"text": 5}),
        ("text", {"text": b"a"}),
        ("text", {"text": "\ud800"}),
        ("text", {"text": [["a"]]}),
        ("input_ids", {"input_ids": []}),
        ("input_ids", {"input_ids": [[]]}),
        ("input_ids", {"input_ids": [[1, 2], []]}),
        ("input_ids", {"input_ids": [[1], 2]}),
        ("input_ids", {"input_ids": [1, [2]]}),
        ("input_ids", {"input_ids": [[[1]]]}),
        ("input_ids", {"input_ids": "abc"}),
        ("input_ids", {"input_ids": b"abc"}),
        ("input_ids", {"input_ids": 5}),
        ("input_ids", {"input_ids": {1, 2}}),
        ("input_ids", {"input_ids": {"a": 1}}),
        ("input_ids", {"input_ids": [1, True]}),
        ("input_ids", {"input_ids": [1, 2.0]}),
        ("input_ids", {"input_ids": [1, "2"]}),
        ("input_ids", {"input_ids": [1, None]}),
        ("input_ids", {"input_ids": [2**31]}),
        ("input_ids", {"input_ids": [-(2**31) - 1]}),
        ("input_ids", {"input_ids": [2**63]}),
        ("input_ids", {"input_ids": [10**30]}),
        ("input_ids", {"input_ids": np.array([1.0])}),
        ("input_ids", {"input_ids": np.array([True])}),
        ("input_ids", {"input_ids": np.array([2**31])}),
        ("input_ids", {"input_ids": np.array([2**63], dtype=np.uint64)}),
        ("input_ids", {"input_ids": np.array([], dtype=np.int32)}),
        ("input_ids", {"input_ids": np.array(5)}),
        ("input_ids", {"input_ids": np.zeros((2, 2, 2), dtype=np.int32)}),
        ("input_ids", {"input_ids": np.zeros((0, 2), dtype=np.int32)}),
        ("stream", {"text": "a", "stream": 1}),
        ("stream", {"text": "a", "stream": "false"}),
        ("stream", {"text": "a", "stream": None}),
        ("return_logprob", {"text": "a", "return_logprob": 1}),
        ("return_logprob", {"text": "a", "return_logprob": "true"}),
        ("return_logprob", {"text": ["a", "b"], "return_logprob": [True]}),
        ("return_logprob", {"text": ["a", "b"], "return_logprob": [True, 0]}),
        ("return_hidden_states", {"text": ["a", "b"], "return_hidden_states": [True] * 3}),
        ("return_hidden_states", {"text": "a", "return_hidden_states": "no"}),
        ("return_text_in_logprobs", {"text": "a", "return_text_in_logprobs": 0}),
        ("logprob_start_len", {"text": "a", "logprob_start_len": -2}),
        ("logprob_start_len", {"text": "a", "logprob_start_len": 0.0}),
        ("logprob_start_len", {"text": "a", "logprob_start_len": 2**31}),
        ("top_logprobs_num", {"text": "a", "top_logprobs_num": -1}),
        ("top_logprobs_num", {"text": "a", "top_logprobs_num": True}),
        ("top_logprobs_num", {"text": ["a", "b"], "top_logprobs_num": [1, 2, 3]}),
        ("top_logprobs_num", {"text": "a", "top_logprobs_num": 2**63}),
        ("token_ids_logprob", {"text": "a", "token_ids_logprob": 5}),
        ("token_ids_logprob", {"text": "a", "token_ids_logprob": "5"}),
        ("token_ids_logprob", {"text": "a", "token_ids_logprob": [True]}),
        ("token_ids_logprob", {"text": "a", "token_ids_logprob": [1.5]}),
        ("token_ids_logprob", {"text": "a", "token_ids_logprob": [2**40]}),
        ("token_ids_logprob", {"text": "a", "token_ids_logprob": [[0], [1, 2]]}),
        ("token_ids_logprob", {"text": "a", "token_ids_logprob": [[1]]}),
        ("token_ids_logprob", {"text": ["a", "b"], "token_ids_logprob": [[1]]}),
        ("token_ids_logprob", {"text": ["a", "b"], "token_ids_logprob": [[1], 2]}),
        ("token_ids_logprob", {"text": ["a", "b"], "token_ids_logprob": [[1], [[2]]]}),
        ("rid", {"text": "a", "rid": 5}),
        ("rid", {"text": "a", "rid": "x" * 129}),
        ("rid", {"text": "a", "rid": "\ud800"}),
        ("rid", {"text": "a", "rid": ["x"]}),
        ("rid", {"text": ["a", "b"], "rid": ["x"]}),
        ("rid", {"text": ["a", "b"], "rid": ["x", "x"]}),
        ("rid", {"text": ["a", "b"], "rid": ["x", None]}),
        ("rid", {"text": ["a", "b"], "rid": "x" * 127}),
        ("rid", {"text": "a", "rid": "x" * 127, "sampling_params": {"n": 2}}),
        ("sampling_params", {"text": ["a", "b"], "sampling_params": [{}]}),
        ("sampling_params", {"text": "a", "sampling_params": "x"}),
        ("sampling_params", {"text": "a", "sampling_params": [5]}),
        ("temperature", {"text": ["a", "b"], "sampling_params": [{}, {"temperature": "bad"}]}),
        ("zzz", {"text": "a", "sampling_params": {"zzz": 1}}),
        ("n", {"text": "a", "sampling_params": {"n": 0}}),
        ("n", {"text": "a", "sampling_params": {"n": 5_000_000}}),
        ("n", {"text": "a", "sampling_params": {"n": True}}),
    ],
)
def test_what_makes_no_sense_is_refused_by_the_name_of_its_field(field, fields):
    """Behind this door it would be a crash, or somebody else's wrong answer."""
    _refused(field, **fields)


def test_sampling_parameters_are_shared_or_given_for_each():
    """One object for all, or a list in the order of the prompts."""
    one, other = _split(text=["a", "b"], sampling_params={"temperature": 0.5})
    assert one.sampling == other.sampling == SamplingParams(temperature=0.5)
    one, other = _split(text=["a", "b"], sampling_params=[{"temperature": 0.1}, {"temperature": 0.9}])
    assert (one.sampling.temperature, other.sampling.temperature) == (0.1, 0.9)
    one, other = _split(text=["a", "b"], sampling_params=[SamplingParams(top_k=5), None])
    assert (one.sampling, other.sampling) == (SamplingParams(top_k=5), SamplingParams())


def test_preferred_parameters_apply_to_every_object():
    """The operator's choice must not be lost for the second prompt of a batch."""
    preferred = {"temperature": 0.25, "top_p": 0.75, "max_new_tokens": 4096}
    [single] = _split(text="a", preferred=preferred)
    assert (single.sampling.temperature, single.sampling.max_new_tokens) == (0.25, 4096)
    one, other = _split(
        text=["a", "b"], sampling_params=[{"temperature": 0.5}, {"top_p": 0.9}], preferred=preferred
    )
    assert (one.sampling.temperature, one.sampling.top_p) == (0.5, 0.75)
    assert (other.sampling.temperature, other.sampling.top_p) == (0.25, 0.9)


def test_options_are_shared_or_given_for_each():
    """A list that is broadcast as a whole would give every prompt the first one's options."""
    one, other = _split(
        text=["a", "b"],
        return_logprob=[True, False],
        logprob_start_len=[0, 2],
        top_logprobs_num=3,
        return_hidden_states=[False, True],
        return_text_in_logprobs=True,
        stream=True,
    )
    assert (one.return_logprob, one.logprob_start_len, one.return_hidden_states) == (True, 0, False)
    assert (other.return_logprob, other.logprob_start_len, other.return_hidden_states) == (False, 2, True)
    for single in (one, other):
        assert (single.top_logprobs_num, single.return_text_in_logprobs, single.stream) == (3, True, True)


@pytest.mark.parametrize(
    ("value", "count", "expected"),
    [
        ([1, 2], 2, [(1, 2), (1, 2)]),
        ([[1], [2, 3]], 2, [(1,), (2, 3)]),
        ([], 1, [None]),
        ([], 2, [None, None]),
        ([[], [], [], []], 4, [None] * 4),
        ([[], [7]], 2, [None, (7,)]),
        ([None, [7]], 2, [None, (7,)]),
        (None, 2, [None, None]),
        ([[1]], 1, [(1,)]),
    ],
)
def test_token_ids_for_logprobs_are_shared_if_flat_and_split_if_nested(value, count, expected):
    """An empty list that got through once put the engine on its slow path for nothing."""
    singles = _split(text=["a"] * count, token_ids_logprob=value)
    assert [single.token_ids_logprob for single in singles] == expected


@pytest.mark.parametrize(
    ("fields", "rids", "client_rids"),
    [
        ({"text": "a", "rid": "r"}, ["r"], ["r"]),
        ({"text": "a", "rid": ""}, [""], [""]),
        ({"text": ["a"], "rid": "r"}, ["r_0"], ["r"]),
        ({"text": ["a", "b"], "rid": "base"}, ["base_0", "base_1"], ["base", "base"]),
        ({"text": ["a", "b"], "rid": ["x", "y"]}, ["x", "y"], ["x", "y"]),
        ({"text": "a", "rid": "r", "sampling_params": {"n": 2}}, ["r_0", "r_1"], ["r", "r"]),
        (
            {"text": ["a", "b"], "rid": ["x", "y"], "sampling_params": [{"n": 2}, {}]},
            ["x_0", "x_1", "y"],
            ["x", "x", "y"],
        ),
        (
            {"text": ["a", "b"], "rid": "r", "sampling_params": {"n": 2}},
            ["r_0_0", "r_0_1", "r_1_0", "r_1_1"],
            ["r"] * 4,
        ),
        ({"text": ["a", "b"]}, [f"{0:032x}", f"{1:032x}"], [f"{0:032x}", f"{1:032x}"]),
        ({"text": "a", "sampling_params": {"n": 2}}, [f"{0:032x}_0", f"{0:032x}_1"], [f"{0:032x}"] * 2),
    ],
)
def test_every_single_request_has_a_name_and_knows_what_the_client_calls_it(fields, rids, client_rids):
    """A client that aborts its request means all of its prompts and samples."""
    singles = _split(**fields)
    assert [single.rid for single in singles] == rids
    assert [single.client_rid for single in singles] == client_rids


@pytest.mark.parametrize(
    "fields",
    [
        {"rid": ["x", "x"]},
        {"rid": ["x", "x_0"], "sampling_params": [{"n": 2}, {}]},
        {"rid": ["x_1", "x"], "sampling_params": [{}, {"n": 2}]},
    ],
)
def test_a_name_used_twice_in_one_request_is_refused(fields):
    """Also where a suffix runs into it: one of the two would never be answered."""
    _refused("rid", text=["a", "b"], **fields)


def test_samples_are_requests_of_one_sample_with_seeds_of_their_own():
    """With one seed for all, n samples are n times the same text."""
    singles = _split(text="a", sampling_params={"n": 3, "sampling_seed": 41, "temperature": 0.5})
    assert [single.sample for single in singles] == [0, 1, 2]
    assert [single.sampling for single in singles] == [
        SamplingParams(sampling_seed=seed, temperature=0.5) for seed in (41, 42, 43)
    ]


def test_samples_without_a_seed_stay_without():
    """Each is random then; a seed made up here would make none of them so."""
    assert {single.sampling.sampling_seed for single in _split(text="a", sampling_params={"n": 3})} == {None}


def test_counting_up_the_largest_seed_wraps_around():
    """A seed beyond int64 would not fit its column."""
    singles = _split(text="a", sampling_params={"n": 2, "sampling_seed": 2**63 - 1})
    assert [single.sampling.sampling_seed for single in singles] == [2**63 - 1, -(2**63)]


def test_an_int32_array_is_taken_as_it_is():
    """A prompt of a million tokens is not copied for nothing."""
    ids = np.arange(5, dtype=np.int32)
    assert to_token_ids("input_ids", ids) is ids


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.uint64, ">i4", np.int16])
def test_other_integer_arrays_are_converted(dtype):
    """Tokenizers give int64, files give anything."""
    converted = to_token_ids("input_ids", np.array([1, 2, 100], dtype=dtype))
    assert (converted.dtype, converted.tolist()) == (np.dtype("<i4"), [1, 2, 100])


def test_an_array_with_gaps_is_made_contiguous():
    """The ring copies bytes, not strides."""
    converted = to_token_ids("input_ids", np.arange(10, dtype=np.int32)[::3])
    assert converted.flags.c_contiguous
    assert converted.tolist() == [0, 3, 6, 9]


@pytest.mark.parametrize("value", [range(5), (0, 1, 2, 3, 4), list(np.arange(5)), [0, 1, 2, 3, np.int8(4)]])
def test_whatever_holds_real_integers_is_a_list_of_ids(value):
    """Python callers slice, and get numpy scalars."""
    assert to_token_ids("input_ids", value).tolist() == [0, 1, 2, 3, 4]


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=50))
def test_every_list_of_int32_survives_the_conversion(ids):
    """Negative ones too: the vocabulary is checked elsewhere, with its own message."""
    assert to_token_ids("input_ids", ids).tolist() == ids


def test_a_batch_is_bounded_before_anything_is_built():
    """A few bytes a prompt, kilobytes a request: the list must not be walked first."""
    assert len(_split(text=["a"] * BATCH_COUNT_MAX)) == BATCH_COUNT_MAX
    _refused("text", text=["a"] * (BATCH_COUNT_MAX + 1))
    _refused("input_ids", input_ids=[[1]] * (BATCH_COUNT_MAX + 1))
    _refused("text", text=[object()] * (BATCH_COUNT_MAX + 1))


def test_prompts_times_samples_are_bounded():
    """Each sample is a request of its own for everyone behind this door."""
    allowed = BATCH_COUNT_MAX // SAMPLES_MAX
    assert len(_split(text=["a"] * allowed, sampling_params={"n": SAMPLES_MAX})) == BATCH_COUNT_MAX
    _refused("n", text=["a"] * (allowed + 1), sampling_params={"n": SAMPLES_MAX})


def test_refusing_too_many_samples_allocates_nothing():
    """Sixty bytes that stand for five million requests were once 22 GB."""
    request = GenerateRequest(text="a", sampling_params={"n": 5_000_000})
    tracemalloc.start()
    try:
        with pytest.raises(ValidationError):
            fan_out(request)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


MEBIBYTE = "x" * (1 << 20)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("sampling_params", {"text": ["a"] * 200, "sampling_params": {"custom_params": {"a": MEBIBYTE}}}),
        ("sampling_params", {"text": "a", "sampling_params": {"custom_params": {"a": MEBIBYTE}, "n": 100}}),
        ("text", {"text": MEBIBYTE, "sampling_params": {"n": 65}}),
        ("text", {"text": ["a", MEBIBYTE], "sampling_params": {"n": 65}}),
        ("input_ids", {"input_ids": np.zeros(1 << 18, dtype=np.int32), "sampling_params": {"n": 65}}),
        ("token_ids_logprob", {"text": ["a"] * 65, "token_ids_logprob": [1] * (1 << 18)}),
    ],
)
def test_what_grows_too_large_by_copying_is_refused(field, fields):
    """Two hundred prompts that share a megabyte are a gigabyte for the scheduler."""
    _refused(field, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "a", "sampling_params": {"custom_params": {"a": MEBIBYTE * 65}}},
        {"text": [MEBIBYTE] * 100},
        {"text": ["a", "b"], "sampling_params": {"custom_params": {"a": MEBIBYTE}}},
        {"text": ["a"] * 4096, "sampling_params": {"temperature": 0.5, "stop": ["END"] * 4}},
        {"text": MEBIBYTE, "sampling_params": {"n": 63}},
        {"text": ["a"] * 20, "sampling_params": [{"custom_params": {"a": MEBIBYTE}}] * 20},
    ],
)
def test_what_was_sent_as_such_is_not_charged(fields):
    """Only copies made here count; a large request that is one is the ring's business."""
    _split(**fields)


def test_the_budget_is_that_of_the_reference():
    """Clients have found out where it is."""
    assert (BATCH_COUNT_MAX, BROADCAST_BYTES_MAX) == (4096, 64 * 1024 * 1024)


@given(
    st.lists(st.tuples(st.text("ab", min_size=1, max_size=3), st.integers(1, 4)), min_size=1, max_size=6),
    st.booleans(),
)
def test_fan_out_keeps_order_and_loses_nothing(prompts, named):
    """Answers are put together by index and sample."""
    singles = _split(
        text=[text for text, _ in prompts],
        rid=[f"r{number}" for number in range(len(prompts))] if named else None,
        sampling_params=[{"n": n, "sampling_seed": 7} for _, n in prompts],
    )
    assert [(single.index, single.sample, single.text) for single in singles] == [
        (index, sample, text) for index, (text, n) in enumerate(prompts) for sample in range(n)
    ]
    assert len({single.rid for single in singles}) == len(singles)
    assert all(single.sampling.n == 1 for single in singles)
    for index, (_, n) in enumerate(prompts):
        seeds = {single.sampling.sampling_seed for single in singles if single.index == index}
        assert len(seeds) == n


def test_a_request_that_is_refused_names_no_one():
    """Nothing is drawn from the source of names before everything else was looked at."""
    drawn = []
    with pytest.raises(ValidationError):
        fan_out(GenerateRequest(text="a", sampling_params={"n": 0}), random_bytes=drawn.append)
    assert not drawn
