"""Make the data files of the embedded engines: the text and the tokenizer.

    pip download --no-deps --no-binary :all: --no-build-isolation sentencepiece==0.2.3
    python scripts/make_engine_data.py sentencepiece-0.2.3.tar.gz

Writes `botchan.txt.xz` and `tokenizer.json` into `manager/engines/data/` (or `--out`), byte for
byte the same every time with the versions that NOTICE.md names: the tokenizer is trained on the
text and on help texts and sources of the standard library, so it depends on the Python release.
`--check` writes nothing and says whether the files that are there are the ones it would write.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import lzma
import re
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from collections.abc import Iterator

ARCHIVE_MEMBER = "sentencepiece-0.2.3/test/botchan.txt"
ARCHIVE_SHA256 = "21618ad31f0453a1ebf5ec58defed99758d54af0b670546ecac639ddd8b86fbd"
DATA = Path(__file__).resolve().parents[1] / "manager" / "engines" / "data"

VOCAB_SIZE = 4096
SPECIAL_TOKENS = ["<|endoftext|>", "<|pad|>"]  # ids 0 and 1, in this order
LINE_LENGTH = 71  # the source is wrapped at 71, some pages at 72 columns
SENTENCE_ENDS = ".?!\"':;)-"
# Our own sentences are few, so they are repeated until their characters are worth a token each.
OWN_SENTENCES_REPEATED = 40
CODE_MODULES = [
    "argparse",
    "asyncio.queues",
    "asyncio.streams",
    "collections",
    "dataclasses",
    "heapq",
    "json.decoder",
    "json.encoder",
    "logging",
    "queue",
    "random",
    "statistics",
    "textwrap",
]

# Written for this tokenizer.
OWN_SENTENCES = """\
今天的天气很好，我们一起去公园散步吧。
请把这个请求放进队列，等调度器有空的时候再处理。
她说：“你什么时候回来？”他笑了笑，没有回答。
这本书讲的是一个年轻老师在乡下学校里的故事。
如果一个字要用三个字节来表示，就可能被分成几个词元。
我想学习怎样写出又快又清楚的程序，可以告诉我从哪里开始吗？
中国有很多城市，北京、上海、广州和成都都很有名。
一二三四五六七八九十百千万，数字从来不会骗人。
오늘은 날씨가 좋아서 친구와 함께 공원을 걸었습니다.
요청이 많아지면 대기열이 길어지고 응답이 늦어집니다.
"언제 돌아올 거예요?" 하고 그녀가 물었지만 그는 대답하지 않았다.
이 책은 시골 학교에 온 젊은 선생님의 이야기입니다.
한국어를 배우고 싶은데 어디서부터 시작하면 좋을까요?
서울에서 부산까지 기차로 세 시간쯤 걸립니다.
今日はとても天気がいいので、友だちと公園を散歩しました。
リクエストが多くなると、待ち行列が長くなって返事が遅くなります。
「いつ帰ってくるの？」と彼女は聞いたが、彼は何も答えなかった。
子どものころから無鉄砲で、いつも損ばかりしてきた。
プログラムが止まったら、まずログを読んで、原因を一つずつ調べましょう。
東京から大阪まで新幹線で二時間半ぐらいかかります。
الطقس جميل اليوم، فلنذهب معا إلى الحديقة.
إذا كثرت الطلبات طال الانتظار وتأخر الجواب.
سألته: متى تعود؟ فابتسم ولم يقل شيئا.
هذا الكتاب يحكي قصة معلم شاب في مدرسة بعيدة عن المدينة.
أريد أن أتعلم كيف أكتب برنامجا سريعا وواضحا.
القاهرة وبغداد ودمشق مدن عربية كبيرة وقديمة.
Good morning 😀 and good night 🌙 from all of us 🎉🎉
Great work 👍 thank you so much 🙏 see you tomorrow 👋
I ❤️ this 😂😂😂 🔥 🚀 ✨ ✅ ❌ ⚠️ 💡 🤔 😭 🥳 😍 👏 💯
👩‍💻 writes code, 👨‍👩‍👧 eat 🍕 and 🍜, the 🐈 sleeps, the 🐕 runs in the 🌧️
Où est la bibliothèque ? Fünf größere Äpfel, ¿cuántos años tienes, señor?
Доброе утро! Сегодня хорошая погода, пойдём гулять в парк.
""".splitlines()  # noqa: RUF001


def read_archive(path: Path) -> str:
    """Read the book out of the source archive; SystemExit if it is not the archive we know."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != ARCHIVE_SHA256:
        sys.exit(f"not the archive this was written for: sha256={digest}, expected={ARCHIVE_SHA256}")
    with tarfile.open(path) as archive:
        member = archive.extractfile(ARCHIVE_MEMBER)
        assert member is not None, "a regular file in the archive with that digest"
        return member.read().decode("utf-8-sig")


def cut_to_the_book(source: str) -> list[str]:
    """Lines from the translator's note to the last sentence: no header, footer or list of corrections."""
    lines = source.splitlines()
    first = lines.index("A NOTE BY THE TRANSLATOR")
    last = next(i for i, line in enumerate(lines) if line.startswith("--(THE END)--"))
    # Marks of footnotes and of the transcriber's corrections, such as "[3]" and "[J]".
    return [re.sub(r" ?\[[A-Z0-9]{1,2}\]", "", line).strip() for line in lines[first:last]]


def paragraphs(lines: list[str]) -> Iterator[str]:
    """Undo the wrapping.

    The source has no blank lines. A paragraph ends where the next line's first word would still
    have fitted and the line ends a sentence; a heading is a paragraph of its own.
    """
    paragraph = ""
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        paragraph = f"{paragraph} {line}" if paragraph else line
        fits = not following or len(line) + 1 + len(following.split()[0]) <= LINE_LENGTH
        heading = paragraph.startswith("CHAPTER ") or paragraph.isupper() or following.startswith("CHAPTER ")
        if heading or not following or (fits and line[-1] in SENTENCE_ENDS):
            yield paragraph
            paragraph = ""


def tokenizer_texts(book: str) -> Iterator[str]:
    """Yield what the tokenizer is trained on, line by line."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    for name in sorted(topics):
        yield from topics[name].splitlines(keepends=True)
    for name in CODE_MODULES:
        yield from inspect.getsource(importlib.import_module(name)).splitlines(keepends=True)
    yield from book.splitlines(keepends=True)
    for sentence in OWN_SENTENCES:
        for _ in range(OWN_SENTENCES_REPEATED):
            yield sentence + "\n"


def train_tokenizer(book: str) -> str:
    """Train the byte-level BPE; the JSON that `Tokenizer.from_file` reads."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(tokenizer_texts(book), trainer)
    size = tokenizer.get_vocab_size()
    assert size == VOCAB_SIZE, f"too little text for the vocabulary: size={size}"
    return str(tokenizer.to_str(pretty=False))


def main() -> int:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("archive", type=Path)
    parser.add_argument("--out", type=Path, default=DATA)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    book = "\n".join(paragraphs(cut_to_the_book(read_archive(options.archive)))) + "\n"
    files = {
        "botchan.txt.xz": lzma.compress(book.encode(), preset=9 | lzma.PRESET_EXTREME),
        "tokenizer.json": train_tokenizer(book).encode(),
    }
    status = 0
    for name, content in files.items():
        path = options.out / name
        if not options.check:
            path.write_bytes(content)
        elif not path.exists() or path.read_bytes() != content:
            print(f"differs: {path}")
            status = 1
        print(f"{name}: {len(content)} bytes, sha256={hashlib.sha256(content).hexdigest()}")
    return status


if __name__ == "__main__":
    sys.exit(main())
