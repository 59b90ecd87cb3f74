"""The page that says what the bytes mean says what the compiler makes of them."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from shmring import layout

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "layout.md").read_text(encoding="utf-8")
LENGTHS = {"u64": 8, "u32": 4, "u64[64]": 512, "end": 32, "statistics": 88}

COMPILER = shutil.which("cc") or shutil.which("gcc")


def rows_under(heading: str) -> list[tuple[int, str, str]]:
    """Offset, type and field of each row of the first table after `heading`."""
    text = PAGE.split(heading, 1)[1].lstrip("\n")
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table is not None
    found = re.findall(r"^\| (0x[0-9a-f]+) \| (\S+) \| (\w+) \|", table.group(), re.MULTILINE)
    return [(int(offset, 16), kind, field) for offset, kind, field in found]


TABLES = {
    "struct shr_header": rows_under("## Header"),
    "struct shr_end_state": rows_under("An end:"),
    "struct shr_end_statistics": rows_under("Statistics of an end, all u64:"),
}


@pytest.mark.skipif(COMPILER is None, reason="no C compiler here")
def test_every_field_on_the_page_is_where_the_compiler_puts_it(tmp_path):
    """Somebody writes a reader in another language from that page alone."""
    asks = [(struct, field) for struct, rows in TABLES.items() for _, _, field in rows]
    lines = "".join(
        f'printf("%zu %zu\\n", offsetof({struct}, {field}), sizeof((({struct} *)0)->{field}));\n'
        for struct, field in asks
    )
    source = tmp_path / "ask.c"
    source.write_text(
        f'#include <stdio.h>\n#include "shmring/layout.h"\nint main(void) {{\n{lines}return 0; }}\n'
    )
    subprocess.run(
        [COMPILER, "-std=c11", f"-I{ROOT / 'native' / 'include'}", str(source), "-o", str(tmp_path / "ask")],
        check=True,
    )
    said = subprocess.run([str(tmp_path / "ask")], check=True, capture_output=True, text=True).stdout.split()
    of_compiler = list(zip(map(int, said[::2]), map(int, said[1::2]), strict=True))
    of_page = [(offset, LENGTHS[kind]) for rows in TABLES.values() for offset, kind, _ in rows]
    named = [(struct, field) for struct, field in asks]
    assert dict(zip(named, of_page, strict=True)) == dict(zip(named, of_compiler, strict=True))


def test_no_field_of_the_header_file_is_left_out_of_the_page():
    """A field that is not on the page is a field that the next reader tramples on."""
    text = (ROOT / "native" / "include" / "shmring" / "layout.h").read_text(encoding="utf-8")
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    for struct, rows in TABLES.items():
        body = re.search(struct + r" \{(.*?)\n\};", text, re.DOTALL)
        assert body is not None
        fields = {re.sub(r"\[.*", "", f.split()[-1]) for f in body.group(1).split(";") if f.strip()}
        assert fields - {"reserved"} == {field for _, _, field in rows}, struct


def test_the_locks_on_the_page_are_the_roles():
    """A tool that holds another byte holds nothing."""
    found = re.findall(r"^\| (\d) \| (\w+) \|", PAGE, re.MULTILINE)
    assert {name.upper(): int(byte) for byte, name in found} == {r.name: r.value for r in layout.Role}


def test_fields_do_not_overlap():
    """Two fields in one place is a slip of the pen that nobody sees."""
    for rows in TABLES.values():
        for (offset, kind, _), (following, _, _) in itertools.pairwise(rows):
            assert offset + LENGTHS[kind] <= following
