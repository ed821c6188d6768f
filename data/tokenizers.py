"""Tokenizers, all of them tiktoken encodings: raw bytes, GPT-2's, or any other that tiktoken knows by name."""

import os
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import tiktoken

END_OF_DOCUMENT = "<|endoftext|>"


class Tokenizer:
    """Text to ids and back. Text is only ever text: `<|endoftext|>` in it does not become the special token."""

    def __init__(self, encoding: tiktoken.Encoding):
        if END_OF_DOCUMENT not in encoding.special_tokens_set:
            raise ValueError(f"tokenizer.name={encoding.name!r}: has no {END_OF_DOCUMENT} token to end a document with")
        self._encoding = encoding
        self.name = encoding.name
        self.vocab_size = encoding.n_vocab
        self.end_of_document = encoding.eot_token

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without an end-of-document token."""
        return self._encoding.encode_ordinary_batch(list(texts), num_threads=os.cpu_count() or 1)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD."""
        return self._encoding.decode(list(ids))

    @cached_property
    def bytes_per_token(self) -> np.ndarray:
        """How many bytes of text each id stands for, int64 (vocab_size,); 0 for special tokens and unused ids."""
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        special = {self._encoding.encode_single_token(token) for token in self._encoding.special_tokens_set}
        for token_id in range(self.vocab_size):
            if token_id not in special:
                try:
                    lengths[token_id] = len(self._encoding.decode_single_token_bytes(token_id))
                except KeyError:  # some vocabularies have gaps
                    continue
        return lengths


def get_tokenizer(name: str) -> Tokenizer:
    """`bytes` (256 bytes and the end of a document; needs no file) or a tiktoken encoding by its name.

    Raises ValueError for a name that is not known, and where tiktoken's vocabulary is neither here nor to be had.
    """
    if name == "bytes":
        ranks, special = {bytes([value]): value for value in range(256)}, {END_OF_DOCUMENT: 256}
        pieces = r"[\s\S]{1,32}"  # no merges, so any cut gives the same bytes; longer pieces are faster
        return Tokenizer(tiktoken.Encoding(name, pat_str=pieces, mergeable_ranks=ranks, special_tokens=special))
    known = ["bytes", *tiktoken.list_encoding_names()]
    if name not in known:
        raise ValueError(f"tokenizer.name={name!r}: known tokenizers are {', '.join(known)}")
    try:
        return Tokenizer(tiktoken.get_encoding(name))
    except OSError as error:  # requests' errors are OSErrors, so are those of a cache folder that cannot be read
        raise ValueError(
            f"tokenizer.name={name!r}: tiktoken could not get its vocabulary ({type(error).__name__}). On a machine "
            f'with a network run `TIKTOKEN_CACHE_DIR=vocabulary python -c "import tiktoken; '
            f"tiktoken.get_encoding('{name}')\"`, copy the folder `vocabulary` here and set TIKTOKEN_CACHE_DIR to it; "
            "or use tokenizer=bytes, which needs no file"
        ) from error
