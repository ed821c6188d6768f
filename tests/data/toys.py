"""Corpora without files, and what can happen to them while they are tokenised."""

import random
import struct
from itertools import pairwise

import data.tokens
from data import DataConfig, get_tokenizer

BYTES = get_tokenizer("bytes")


class Hooked:
    """The bytes, and something that happens in the middle: in the second call, when some text is written."""

    name, vocab_size, end_of_document = BYTES.name, BYTES.vocab_size, BYTES.end_of_document

    def __init__(self, hook):
        self.hook = hook
        self.calls = 0

    def encode_to_arrays(self, texts):
        self.calls += 1
        if self.calls == 2:
            self.hook()
        return BYTES.encode_to_arrays(texts)


def raising(error):
    def stop(*args, **kwargs):
        raise error

    return stop


def silent(message):
    pass


def some_documents(count, seed=0):
    """Different texts of 1 to 60 characters, in no order."""
    rng = random.Random(seed)
    letters = "abc xyz\n=<|endoftext|>ü漢\U0001f4bb"
    return [f"{i}:" + "".join(rng.choices(letters, k=rng.randrange(58))) for i in rng.sample(range(count), count)]


def give(monkeypatch, documents):
    """Make these the corpus: texts, or pairs of a split and a text; each text in blocks of three characters."""
    pairs = [item if isinstance(item, tuple) else (None, item) for item in documents]
    pairs = [(split, [text[i : i + 3] for i in range(0, len(text), 3)]) for split, text in pairs]
    monkeypatch.setattr(data.tokens, "documents", lambda config: iter(pairs))


def forbid_reading(monkeypatch):
    monkeypatch.setattr(data.tokens, "documents", raising(AssertionError("the corpus was read again")))


def toy(tmp_path, **settings):
    return DataConfig("toy", "hub", "owner/toy", cache=str(tmp_path / "cache"), **settings)


def read(path, code):
    """A file of little-endian numbers."""
    raw = path.read_bytes()
    return list(struct.unpack(f"<{len(raw) // struct.calcsize(code)}{code}", raw))


def texts_of(found, split):
    """The documents of a split of token files of bytes, cut where the offsets say."""
    ids, offsets = read(found.folder / f"{split}.bin", "H"), read(found.folder / f"{split}.offsets", "q")
    texts = []
    for begin, end in pairwise(offsets):
        *document, last = ids[begin:end]
        assert last == 256
        texts.append(bytes(document).decode("utf-8"))
    return texts
