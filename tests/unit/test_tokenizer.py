"""Loading a tokenizer: which file, what facts, and what is wrong with a bad one."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from manager.errors import ConfigError
from manager.tokenizer import EMBEDDED_TOKENIZER, load_tokenizer

TINY = Path(__file__).parents[1] / "data/detok/bytelevel_tiny.json"


def test_the_embedded_tokenizer_is_there() -> None:
    """`generate` works on a machine that has nothing."""
    loaded = load_tokenizer(None)
    assert loaded.path == EMBEDDED_TOKENIZER
    assert loaded.vocab_size == loaded.tokenizer.get_vocab_size(with_added_tokens=True)
    assert loaded.eos_token_ids


def test_a_folder_means_the_file_in_it(tmp_path: Path) -> None:
    """What a model is downloaded as."""
    (tmp_path / "tokenizer.json").write_bytes(TINY.read_bytes())
    assert load_tokenizer(tmp_path).path == tmp_path / "tokenizer.json"
    assert load_tokenizer(tmp_path / "tokenizer.json").vocab_size == 278


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff", b"null", TINY.read_bytes()[:1000]])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    """The operator must know which file, and need no traceback for it."""
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(file)
    assert caught.value.setting == "tokenizer"
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, ()),
        ({"generation_config.json": {"eos_token_id": 272}}, (272,)),
        ({"generation_config.json": {"eos_token_id": [272, 273]}}, (272, 273)),
        ({"tokenizer_config.json": {"eos_token": "<|eos|>"}}, (272,)),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|eos|>"}}}, (272,)),
        (
            {
                "generation_config.json": {"eos_token_id": 273},
                "tokenizer_config.json": {"eos_token": "<|eos|>"},
            },
            (273,),
        ),
        ({"tokenizer_config.json": {"eos_token": "<no such token>"}}, ()),
        ({"generation_config.json": {"eos_token_id": True}}, ()),
        ({"generation_config.json": {"eos_token_id": "272"}}, ()),
        ({"generation_config.json": []}, ()),
    ],
)
def test_the_end_of_text_is_what_the_files_say(
    tmp_path: Path, files: dict[str, Any], ids: tuple[int, ...]
) -> None:
    """A model whose end is not known talks on until the context is full."""
    content = json.loads(TINY.read_bytes())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] != "<|im_end|>"]
    content["added_tokens"].append(
        {"id": 273, "content": "<|other|>", "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
    )  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps(value))
    assert load_tokenizer(tmp_path).eos_token_ids == ids


def test_padding_and_truncation_of_a_file_are_switched_off(tmp_path: Path) -> None:
    """A file made for embeddings would cut prompts at 128 tokens and fill them up with nothing."""
    tokenizer = Tokenizer.from_file(str(TINY))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (ids,) = load_tokenizer(tmp_path).encode(["abcdefgh"])
    assert ids.tolist() == list(b"abcdefgh")


def test_many_threads_encode_what_one_does() -> None:
    """A tokenizer whose settings race gives now and then another prompt."""
    loaded = load_tokenizer(None)
    texts = [f"text {i} 世界 {'word ' * (i % 13)}" for i in range(250)]
    wanted = [ids.tolist() for ids in loaded.encode(texts)]
    wrong: list[int] = []

    def encode(thread: int) -> None:
        for start in range(0, 250, 50):
            for i, ids in enumerate(loaded.encode(texts[start : start + 50]), start):
                if ids.tolist() != wanted[i]:
                    wrong.append(thread)

    threads = [threading.Thread(target=encode, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
