"""A decode table as bytes that workers share: the same table again, and no damage goes unseen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import shmring
from manager.config import Settings
from manager.deployment import Deployment, Facts, read_manifest, remove_leftovers, table_name
from manager.detokenize import DecoderKind, TableDecoder, choose, table_from_bytes, table_to_bytes
from manager.errors import DetokenizeError

DATA = Path(__file__).parents[1] / "data"
NAMES = ["bytelevel", "bytefallback", "wordpiece", "metaspace"]


def _table(name):
    table = choose(Tokenizer.from_file(str(DATA / "tokenizers" / f"{name}.json"))).table
    assert table is not None
    return table


@pytest.mark.parametrize("name", NAMES)
def test_a_table_comes_back_as_it_was(name):
    """Workers would write other text than the table that was proved."""
    table = _table(name)
    again = table_from_bytes(table_to_bytes(table))
    for column in ("text", "text_offsets", "first_text", "first_offsets", "flags"):
        before, after = getattr(table, column), getattr(again, column)
        assert (before is None) == (after is None)
        if before is not None:
            assert before.dtype == after.dtype
            assert np.array_equal(before, after)
    for fact in ("strip_byte", "strip_count", "swap_from", "swap_to", "bytes_in_runs"):
        assert getattr(table, fact) == getattr(again, fact)


@pytest.mark.parametrize("name", NAMES)
def test_every_damaged_byte_is_found(name):
    """A worker that decodes with a damaged table sends wrong text, or reads where nothing is."""
    good = table_to_bytes(_table(name))
    places = [*range(72), *range(72, len(good), len(good) // 97)]
    for place in places:
        bad = bytearray(good)
        bad[place] ^= 0x55
        with pytest.raises(DetokenizeError):
            table_from_bytes(bytes(bad))
    for length in (0, 71, 72, len(good) - 1):
        with pytest.raises(DetokenizeError):
            table_from_bytes(good[:length])
    with pytest.raises(DetokenizeError):
        table_from_bytes(good + b"\0")


def test_a_table_that_lies_with_the_right_checksum_is_not_decoded_with():
    """The checksum tells of accidents; offsets that point elsewhere must be found all the same."""
    table = _table("bytelevel")
    offsets = table.text_offsets.copy()
    offsets[5] = 1 << 30
    table.__dict__["text_offsets"] = offsets
    with pytest.raises(DetokenizeError):
        TableDecoder(table_from_bytes(table_to_bytes(table)), slots_max=1, reason="")


def _deploy(name, tokenizer):
    path = DATA / "tokenizers" / f"{tokenizer}.json"
    choice = choose(Tokenizer.from_file(str(path)))
    facts = Facts(choice.table.vocab_size, (), path, choice)
    return Deployment(Settings(name=name, workers=2, tokenizer=path), facts), choice


def test_a_deployment_publishes_its_table_and_takes_it_away(ring_name):
    """Each worker would build its own, or tables would fill shared memory one day."""
    deployment, choice = _deploy(ring_name, "bytefallback")
    manifest = read_manifest(ring_name)
    assert (manifest.decoder, manifest.decoder_reason) == (DecoderKind.TABLE.value, choice.reason)
    mapping = shmring.read_blob(table_name(ring_name))
    table = table_from_bytes(mapping.payload)
    mapping.handle.close()
    deployment.close()
    assert table.text.tobytes() == choice.table.text.tobytes()  # who mapped it keeps it
    with pytest.raises(shmring.SegmentNotFoundError):
        shmring.read_blob(table_name(ring_name))


def test_the_table_of_a_dead_manager_is_removed_with_the_rest(ring_name):
    """A kill would leave megabytes behind each time."""
    child = (
        "import sys, os; sys.path.insert(0, sys.argv[2]); import test_detokenize_blob as t\n"
        "kept = t._deploy(sys.argv[1], 'bytelevel'); print('there', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", child, ring_name, str(Path(__file__).parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stdout.readline() == b"there\n"
        manifest = read_manifest(ring_name)
        process.kill()
        process.wait()
    assert table_name(ring_name) in remove_leftovers(manifest)


def test_a_worker_that_maps_the_table_does_not_load_the_tokenizer_library():
    """It would cost each worker 20 MiB and most of its start."""
    answer = subprocess.run(
        [sys.executable, "-c", "import sys, manager.cli, manager.worker; print('tokenizers' in sys.modules)"],
        capture_output=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert answer.stdout == b"False\n"
