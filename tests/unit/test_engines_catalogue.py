"""Engines by name."""

from __future__ import annotations

import random
import subprocess
import sys
from types import SimpleNamespace

import pytest

from manager.engines.catalogue import CONTINUES_PROMPT, ENGINE_NAMES, make_engine
from manager.errors import ConfigError

PORT = SimpleNamespace(vocab_size=4096, context_length=100, eos_token_ids=(0,))


@pytest.mark.parametrize("name", ENGINE_NAMES)
def test_every_name_makes_an_engine_with_nothing_running(name: str):
    assert make_engine(name, PORT, randomness=random.Random(1)).running_count == 0


def test_every_name_says_whether_its_output_goes_on_where_the_prompt_ended():
    """An echo whose answer begins with a space that the prompt had not is no echo."""
    assert CONTINUES_PROMPT.keys() == set(ENGINE_NAMES)
    assert not CONTINUES_PROMPT["echo"]


def test_an_unknown_name_is_told_the_known_ones():
    with pytest.raises(ConfigError, match="echo, ngram"):
        make_engine("gpt", PORT, randomness=random.Random(1))


def test_ngram_refuses_a_deployment_of_another_tokenizer():
    other = SimpleNamespace(vocab_size=151_669, context_length=100, eos_token_ids=(0,))
    with pytest.raises(ConfigError, match="vocab_size=151669, expected=4096"):
        make_engine("ngram", other, randomness=random.Random(1))
    assert make_engine("echo", other, randomness=random.Random(1)).running_count == 0


def test_an_echo_needs_no_tokenizer_library():
    """An engine process is started to load the rings, not a tokenizer."""
    code = "import sys, manager.engines.catalogue, manager.engines.loop; print('tokenizers' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "False\n"
