"""Trains the four small tokenizers beside this file, one for each way of decoding.

    python tests/data/tokenizers/make.py

The text is the help topics of the running Python and some sentences of our own, so the
result differs from one Python to the next. The files are committed; nothing needs them to
be made again. About 1,500 ids each: enough for tokens of several bytes that begin or end
inside a character, small enough to read.
"""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

HERE = Path(__file__).parent
VOCAB_SIZE = 1500

SENTENCES = """
今天天气很好,我们一起去公园散步吧。请用中文写一段关于大海的话。语言模型把文字变成数字,再把数字变成文字。
안녕하세요, 오늘은 날씨가 좋네요. 삼겹살을 먹고 싶습니다. 한국어 문장은 토큰 경계에서 자주 나뉩니다.
مرحبا بالعالم، كيف حالك اليوم؟ الكلمات تتكون من حروف، والحروف من بايتات.
Привет, мир! Ça va très bien, merci. Größe und Maß, naïve café résumé.
こんにちは、世界。これは終わりの合図です。終わり。
😀😃😄😁 🚀 🌶️ 👩‍💻 👨‍👩‍👧‍👦 🇫🇷🇩🇪 ❤️‍🔥
I don't know, do not ask; it's what we've said, isn't it? They're here: 'quoted' (yes).
"""


def corpus() -> list[str]:
    """Lines of help text, and our own sentences often enough to be learned."""
    lines = [line for text in topics.values() for line in text.splitlines() if line.strip()]
    return lines[:4000] + SENTENCES.strip().splitlines() * 40


def bytelevel() -> Tokenizer:
    """Like GPT-2: tokens are bytes. Added tokens of raw text stand beside them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("工具", normalized=False)])
    return tokenizer


def bytefallback() -> Tokenizer:
    """Like Llama 2: pieces with a word mark, and a token for each byte they do not cover."""
    mark = "▁"
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend(mark), normalizers.Replace(" ", mark)])
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 259, limit_alphabet=200, max_token_length=16, show_progress=False
    )
    trained.train_from_iterator(corpus(), trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = trained.normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(mark, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in tokens[:3]])
    return tokenizer


def wordpiece() -> Tokenizer:
    """Like BERT: words and the rest of words, with spaces cleaned up."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    """Like T5: Unigram pieces, of which the first loses its word mark."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<unk>", "<pad>", "</s>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def main() -> None:
    """Writes the four files."""
    for make in (bytelevel, bytefallback, wordpiece, metaspace):
        tokenizer = make()
        path = HERE / f"{make.__name__}.json"
        path.write_text(tokenizer.to_str(), encoding="utf-8")
        print(f"{path.name}: ids={tokenizer.get_vocab_size()}, bytes={path.stat().st_size}")


if __name__ == "__main__":
    main()
