"""Any text, any sizes, any bytes: against plain Python, and never anything but a result or a ValueError."""

import json
import shutil
import struct
import tempfile
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tiktoken
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data import DataConfig, draw_batch, get_tokenizer, prepare
from data.corpora import documents
from data.tokenizers import Tokenizer, parts
from tests.data.test_tokenizers import patterns
from tests.data.toys import BYTES, silent

fuzz = partial(settings, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])

TEXT = st.one_of(
    st.text(),
    st.text(st.characters()),  # with halves of surrogate pairs
    st.text("ab 1\n\r\t.'sS/漢\u0301\u2028\x85"),
    st.builds(
        lambda raw, errors: raw.decode("utf-8", errors),
        st.binary(),
        st.sampled_from(["replace", "ignore", "surrogateescape", "backslashreplace"]),
    ),
    st.builds(lambda text, times: text * times, st.text(max_size=3), st.integers(0, 400)),
)
PLAIN = TEXT.map(lambda text: text.encode("utf-8", "replace").decode())


def repaired(text):
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@cache
def tokenizers():
    """All that need no download; and GPT-2's vocabulary with the patterns of those that do."""
    gpt2 = get_tokenizer("gpt2")
    found = [BYTES, gpt2, *(get_tokenizer("gpt2", size) for size in (257, 258, 1000, 50256))]
    ranks = {gpt2._encoding.decode_single_token_bytes(i): i for i in range(50256)}
    for i, pattern in enumerate(sorted(patterns())):
        special = {"<|endoftext|>": 50300}  # ids 50256 to 50299 are unused
        encoding = tiktoken.Encoding(f"pattern{i}", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        found.append(Tokenizer(encoding))
    return found


@given(st.lists(TEXT, max_size=4))
@fuzz(max_examples=60)
def test_text_comes_back(texts):
    for tokenizer in tokenizers():
        for text, ids in zip(texts, tokenizer.encode_to_arrays(texts), strict=True):
            assert tokenizer.decode(ids) == repaired(text)
            assert tokenizer.bytes_per_token[ids].sum() == len(repaired(text).encode())
            assert (ids < tokenizer.vocab_size).all()
            assert tokenizer.end_of_document not in ids


@given(st.integers(257, 50257), TEXT)
@fuzz(max_examples=12)
def test_text_comes_back_from_any_cut_vocabulary(size, text):
    tokenizer = get_tokenizer("gpt2", size)
    (ids,) = tokenizer.encode([text])
    assert tokenizer.decode(ids) == repaired(text)
    assert tokenizer.bytes_per_token[ids].sum() == len(repaired(text).encode())
    assert max(ids, default=0) < size - 1
    assert len(ids) >= len(get_tokenizer("gpt2").encode([text])[0])


@given(st.lists(st.integers(-2, 60000), max_size=8))
@fuzz(max_examples=60)
def test_ids_are_text_or_refused(ids):
    for tokenizer in tokenizers():
        if all(0 <= i < tokenizer.vocab_size for i in ids):
            text = b"".join(
                b"<|endoftext|>" if i == tokenizer.end_of_document
                else tokenizer._encoding.decode_single_token_bytes(i) if tokenizer.bytes_per_token[i] else b""
                for i in ids
            )  # fmt: skip
            assert tokenizer.decode(ids) == text.decode("utf-8", "replace")
        else:
            with pytest.raises(ValueError, match="is outside the"):
                tokenizer.decode(ids)


@given(TEXT, st.integers(1, 50), st.integers(1, 30), st.integers(0, 40))
@fuzz(max_examples=150)
def test_parts_are_the_text_however_it_comes(text, step, size, more):
    blocks = [text[i : i + step] for i in range(0, len(text), step)]
    found = list(parts(blocks, size))
    assert "".join(found) == text
    for tokenizer in tokenizers():
        if tokenizer is not BYTES:
            assert [i for ids in tokenizer.encode(found) for i in ids] == tokenizer.encode([text])[0]
    longest = size + more
    found = list(parts(blocks, size, longest))
    assert "".join(found) == text
    assert all(0 < len(part) <= longest for part in found[:-1])
    assert len(found[-1]) <= longest
    assert found == list(parts([text], size, longest))


@given(
    st.integers(2, 400), st.integers(1, 60), st.integers(1, 5), st.sampled_from([1, 2, 3, 4, 6]),
    st.integers(0, 2**63), st.integers(0, 10**9),
)  # fmt: skip
@fuzz(max_examples=150)
def test_batches_of_any_sizes(size, length, share, world_size, seed, first):
    batch_size, tokens = share * world_size, np.arange(size)
    if size < length + 1:
        with pytest.raises(ValueError, match=f"{length} tokens.*{size} tokens"):
            draw_batch(tokens, length, batch_size, seed, first)
        return
    windows, epochs = (size - 1) // length, {}
    for step in range(first, first + min(40, -(-2 * windows // batch_size) + 1)):
        alone = draw_batch(tokens, length, batch_size, seed, step)[0][:, 0].tolist()
        shares = [draw_batch(tokens, length, batch_size, seed, step, rank, world_size) for rank in range(world_size)]
        assert [start for inputs, _ in shares for start in inputs[:, 0].tolist()] == alone
        for inputs, targets in shares:
            assert (targets == inputs + 1).all()
            assert (np.diff(inputs) == 1).all()
            assert 0 <= inputs.min() <= targets.max() < size
        for i, start in enumerate(alone):
            epochs.setdefault((step * batch_size + i) // windows, []).append(start)
    for starts in epochs.values():
        assert len({start % length for start in starts}) == 1  # of one cut
        assert len(set(starts)) == len(starts)


def written(folder, kind, texts):
    """The texts in files of a kind; their paths, and the texts that are in them as Python reads them."""
    if kind == "txt":
        paths = [folder / f"{i:03}.txt" for i in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            path.write_bytes(text.encode())
        return paths, [path.read_text(encoding="utf-8-sig") for path in paths]
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(texts)))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array(texts, pyarrow.string())}), path)
    return [path], texts


@given(
    st.lists(PLAIN, min_size=1, max_size=12), st.sampled_from(["txt", "jsonl", "parquet"]), st.integers(0, 9),
    st.floats(0.01, 0.99), st.integers(0, 3),
)  # fmt: skip
@fuzz(max_examples=80)
def test_any_corpus_is_its_texts(texts, kind, which, fraction, seed):
    tokenizer = tokenizers()[which % len(tokenizers())]
    with tempfile.TemporaryDirectory() as folder:
        paths, read = written(Path(folder), kind, texts)
        config = DataConfig("mine", "files", [str(path) for path in paths], cache=f"{folder}/cache",
                            val_fraction=fraction, split_seed=seed)  # fmt: skip
        expected = [text for text in read if text.strip()]
        cut = round(len(expected[0]) * (1 - fraction)) if len(expected) == 1 else 0
        if not expected or (len(set(expected)) == 1 and not 0 < cut < len(expected[0])):
            with pytest.raises(ValueError, match=r"no text at all|too short|the same text"):
                prepare(config, tokenizer, silent)
            return
        found, split = prepare(config, tokenizer, silent), {}
        for name in ("train", "val"):
            ids, offsets = getattr(found, name), getattr(found, f"{name}_offsets").tolist()
            documents = [ids[begin:end].tolist() for begin, end in pairwise(offsets)]
            assert all(document[-1] == tokenizer.end_of_document for document in documents)
            split[name] = [tokenizer.decode(document[:-1]) for document in documents]
            assert [document[:-1] for document in documents] == tokenizer.encode(split[name])
    if len(expected) == 1:
        assert split == {"train": [expected[0][:cut]], "val": [expected[0][cut:]]}
        return
    held_out = set(split["val"])
    assert len(held_out) == min(max(1, round(fraction * len(set(expected)))), len(set(expected)) - 1)
    assert split == {
        "train": [text for text in expected if text not in held_out],
        "val": [text for text in expected if text in held_out],
    }


@given(st.binary(max_size=60), st.binary(max_size=60), st.booleans())
@fuzz(max_examples=60)
def test_any_bytes_as_ids(train, val, header):
    with tempfile.TemporaryDirectory() as folder:
        for name, raw in (("train", train), ("val", val)):
            begin = struct.pack("<256i", 20240520, 1, len(raw) // 2, *[0] * 253) if header else b""
            Path(folder, f"{name}.bin").write_bytes(begin + raw)
        config = DataConfig("mine", "bin", folder, cache=f"{folder}/cache")
        tokens = [struct.unpack(f"<{len(raw) // 2}H", raw[: len(raw) // 2 * 2]) for raw in (train, val)]
        if any(len(raw) % 2 or not raw for raw in (train, val)) or max(map(max, tokens)) > 256:
            with pytest.raises(ValueError, match=r"data\.path"):
                prepare(config, BYTES, silent)
        else:
            found = prepare(config, BYTES, silent)
            assert (found.train.tolist(), found.val.tolist()) == (list(tokens[0]), list(tokens[1]))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["text", "a", "train", "val"]), inner),
    max_leaves=9,
)
LINE = st.one_of(
    st.binary(max_size=30), JSON.map(lambda value: json.dumps(value).encode()),
    st.builds(lambda value: json.dumps({"text": value}).encode(), TEXT),
)  # fmt: skip


@given(st.lists(LINE, max_size=4))
@fuzz(max_examples=150)
def test_any_lines_are_texts_or_refused(lines):
    def told(line):
        row = json.loads(line)
        if not isinstance(row["text"], str):
            raise TypeError
        return row["text"].encode().decode()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.jsonl")
        path.write_bytes(b"\n".join(lines))
        try:
            whole = path.read_bytes().decode("utf-8-sig")
            expected = [
                told(line) for line in whole.replace("\r\n", "\n").replace("\r", "\n").split("\n") if line.strip()
            ]
        except (ValueError, TypeError, KeyError):
            expected = None
        found = ("".join(blocks) for _, blocks in documents(DataConfig("mine", "files", str(path))))
        if expected is None:
            with pytest.raises(ValueError, match="data"):
                list(found)
        else:
            assert list(found) == expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Token files that a test may damage: the configuration they are of, and a copy to go back to."""
    place = tmp_path_factory.mktemp("tokens")
    (place / "a.jsonl").write_text("".join(json.dumps({"text": f"{i} text"}) + "\n" for i in range(20)))
    config = DataConfig("mine", "files", str(place / "a.jsonl"), cache=str(place / "cache"))
    found = prepare(config, BYTES, silent)
    shutil.copytree(found.folder, place / "copy")
    return config, found.folder, place / "copy"


def opened_or_refused(folder, change):
    config, there, whole = folder
    shutil.rmtree(there)
    shutil.copytree(whole, there)
    change(there)
    try:
        found = prepare(config, BYTES, silent)
    except ValueError as error:
        said = str(error)
        assert str(there) in said
        return
    for split in ("train", "val"):
        assert getattr(found, split).tobytes() == (whole / f"{split}.bin").read_bytes()
        assert getattr(found, f"{split}_offsets").tobytes() == (whole / f"{split}.offsets").read_bytes()
    return found.meta


KEYS = ["tokenizer", "vocab_size", "dtype", "corpus", "fingerprint", "tokens", "documents", "sampled", "shards", "data"]


@given(st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=3))
@fuzz(max_examples=150)
def test_any_description_is_right_or_refused(folder, values):
    def describe(there):
        meta = json.loads((there / "tokens.json").read_text())
        (there / "tokens.json").write_text(json.dumps(meta | values | {"digest": None}))

    opened_or_refused(folder, describe)


@given(
    st.sampled_from(["tokens.json", "train.bin", "val.bin", "train.offsets", "val.offsets"]),
    st.integers(0, 10**6), st.integers(0, 9), st.binary(max_size=9),
)  # fmt: skip
@fuzz(max_examples=150)
def test_any_damage_is_found(folder, name, at, length, instead):
    def damage(there):
        raw = (there / name).read_bytes()
        begin = at % (len(raw) + 1)
        (there / name).write_bytes(raw[:begin] + instead + raw[begin + length :])

    meta = opened_or_refused(folder, damage)
    assert meta is None or meta == json.loads((folder[2] / "tokens.json").read_text())
