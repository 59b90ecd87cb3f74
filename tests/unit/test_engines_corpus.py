"""The data that comes with the package."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from manager.engines import corpus

TOKENIZER = Tokenizer.from_file(str(corpus.TOKENIZER_PATH))


def test_the_tokenizer_has_the_ids_that_the_code_names():
    """A wrong eos id means answers that never end."""
    assert TOKENIZER.get_vocab_size() == corpus.VOCAB_SIZE
    assert TOKENIZER.token_to_id("<|endoftext|>") == corpus.EOS_TOKEN_ID
    assert TOKENIZER.token_to_id("<|pad|>") == corpus.PAD_TOKEN_ID
    assert TOKENIZER.encode("plain").ids == TOKENIZER.encode("plain", add_special_tokens=False).ids


@pytest.mark.parametrize(
    "text",
    [
        "Plain English, with 12,345.67 numbers!\n\n\ttabs  and   spaces ",
        "今天的天气很好, 我们去公园",
        "오늘은 날씨가 좋아서 걸었습니다",
        "الطقس جميل اليوم",
        "今日はとても天気がいい",
        "👩‍💻👨‍👩‍👧🏽 🇩🇪 e\u0301 \x00 \ufffd \U00013000 \u200d",
        "",
    ],
)
def test_text_comes_back_unchanged(text: str):
    """The echo's promise, text out equals text in, stands on this."""
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


@settings(deadline=None)
@given(st.text())
def test_any_text_comes_back_unchanged(text: str):
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_the_text_is_the_book_alone():
    """The distributor's licence asks for more than we give if its name stays in the text."""
    text = corpus.read_text()
    assert text.startswith("A NOTE BY THE TRANSLATOR\n")
    assert text.endswith("So Kiyo's grave is in the Yogen temple at Kobinata.\n")
    assert "gutenberg" not in text.lower()


def test_documents_hold_the_whole_book_and_end_with_its_chapters():
    """A document across two chapters would teach the model never to end there."""
    documents = corpus.read_documents()
    assert "\n".join(documents) + "\n" == corpus.read_text()
    assert sum(document.startswith("CHAPTER ") for document in documents) == 11
    assert not any("\nCHAPTER " in document for document in documents)
