"""Jobs, paired differences and groups of seeds, against plain arithmetic on the windows' losses."""

import json
import math

import numpy as np
import pytest

from measure.protocols import Scored, Windows, cut, stretches
from measure.results import Group, Job, Measurement, Scoring, group_labels, grouped, paired, seedless
from model import GPTConfig


def scored(length: int, losses, clusters=None, protocol="sliding", n_tokens=97) -> Scored:
    windows = cut(stretches(n_tokens, 24), length, 24, protocol, 4)
    values = np.asarray(losses(windows) if callable(losses) else losses, dtype=np.float64)
    return Scored(windows, values, None if clusters is None else np.asarray(clusters(windows)))


def test_two_models_on_the_same_windows_are_compared_document_by_document():
    rng = np.random.default_rng(0)
    document = lambda windows: windows.spans[:, 1] // 10  # noqa: E731
    a = scored(24, lambda w: rng.normal(3, 1, len(w.spans)) * w.counts, document)
    b = scored(24, lambda w: rng.normal(2, 1, len(w.spans)) * w.counts, document)
    pair = paired([a], [b])
    per_document = {}
    for x, y, n, d in zip(a.losses, b.losses, a.windows.counts, document(a.windows), strict=True):
        old = per_document.get(d, (0.0, 0))
        per_document[d] = (old[0] + x - y, old[1] + n)
    total = sum(n for _, n in per_document.values())
    mean = sum(loss for loss, _ in per_document.values()) / total
    squares = sum((loss - mean * n) ** 2 for loss, n in per_document.values())
    k = len(per_document)
    error = math.sqrt(squares * k / (k - 1)) / total
    assert (pair["difference"], pair["clusters"]) == (pytest.approx(mean), k)
    assert pair["high"] - pair["low"] == pytest.approx(2 * 2.365 * error, rel=2e-3)  # t of 7 degrees of freedom
    assert k == 8
    assert pair["spread"] is None


def test_seeds_are_averaged_before_the_interval_and_their_spread_is_told():
    rng = np.random.default_rng(1)
    a, b = ([scored(8, lambda w: rng.normal(3, 1, len(w.spans)) * w.counts) for _ in range(3)] for _ in range(2))
    pair = paired(a, b)
    mean = lambda side: Scored(side[0].windows, np.mean([s.losses for s in side], axis=0))  # noqa: E731
    of_means = paired([mean(a)], [mean(b)])
    assert of_means.pop("spread") is None
    assert of_means == pytest.approx({key: value for key, value in pair.items() if key != "spread"})
    total = a[0].windows.counts.sum()
    apart = [(x.losses.sum() - y.losses.sum()) / total for x, y in zip(a, b, strict=True)]
    assert pair["spread"] == pytest.approx(np.std(apart, ddof=1))
    assert pair["difference"] == pytest.approx(np.mean(apart))


def test_lengths_are_paired_only_where_they_score_the_same_tokens():
    loss = lambda windows: windows.counts * 1.0  # noqa: E731
    assert paired([scored(8, loss)], [scored(24, loss)])["difference"] == 0
    # side by side, all tokens but the first are scored at any length, in windows that do not match
    side_by_side = paired([scored(7, loss, protocol="nonoverlapping")], [scored(24, loss, protocol="nonoverlapping")])
    assert side_by_side["difference"] == 0
    assert side_by_side["clusters"] == 4
    assert paired([scored(8, loss)], [scored(8, loss, n_tokens=90)]) is None
    assert paired([scored(8, loss)], [scored(8, loss, protocol="nonoverlapping")]) is None
    capped = Windows(8, scored(8, loss).windows.spans[::2])
    assert paired([Scored(capped, capped.counts * 1.0)], [scored(8, loss)]) is None


def test_windows_over_borders_are_paired_by_stretches_not_by_documents():
    """Across borders a token's document is another one at each length: by documents, the pairing would be lost."""
    rng = np.random.default_rng(5)
    of_token = rng.normal(0, 1, 2401).cumsum()  # neighbouring tokens are alike
    document = lambda windows: np.minimum(windows.spans[:, 1] // 37, 60)  # noqa: E731
    pairs = {}
    for name, clusters in (("documents", document), ("none", None)):
        sides = [
            scored(length, lambda w: [of_token[a:b].sum() for _, a, b in w.spans], clusters, "nonoverlapping", 2401)
            for length in (8, 24)
        ]
        pairs[name] = paired([sides[0]], [sides[1]])
    assert pairs["documents"] == pairs["none"]
    assert pairs["documents"]["difference"] == pytest.approx(0, abs=1e-9)
    assert pairs["documents"]["high"] - pairs["documents"]["low"] < 1e-6


def test_neighbouring_targets_are_one_stretch():
    spans = np.array([[0, 30, 40], [0, 10, 20], [0, 20, 30], [0, 50, 60]])
    assert Scored(Windows(8, spans), np.zeros(4)).targets().tolist() == [[10, 40], [50, 60]]


class Text:
    """Token files of 20 documents of 40 tokens."""

    val, val_offsets = np.arange(800) % 61, np.arange(0, 801, 40)
    meta, fingerprint = {"corpus": "text"}, "f"


class Tokens:
    name, bytes_per_token = "t", np.arange(61)


def job(pos="rope", text=Text, tokens=Tokens, **scoring) -> Job:
    config = GPTConfig(vocab_size=61, n_layer=1, n_head=1, head_dim=8, train_length=8, pos={"name": pos})
    return Job(config, text, tokens, Scoring(**{"lengths": (8, 32), "stride": 4, **scoring}))


def test_windows_stay_inside_documents_where_there_are_enough():
    assert job().documents == "within documents: 20 of 20 hold a window of 32"
    assert job(lengths=(8, 40)).documents == "across the borders of 20 documents"
    few = type("Few", (Text,), {"val": Text.val[:360], "val_offsets": Text.val_offsets[:10]})
    assert job(text=few).documents == "across the borders of 9 documents"
    assert job(text=few, documents="within").documents == "within documents: 9 of 9 hold a window of 32"
    for windows in job(protocols=("sliding", "nonoverlapping"), by_position=True).windows:
        assert (windows.spans[:, 0] // 40 == (windows.spans[:, 2] - 1) // 40).all()


def test_the_curve_by_position_is_of_the_same_text_and_says_where_each_bin_is():
    made = job(by_position=True, max_targets=64)
    losses = np.concatenate([w.counts * float(w.spans[0, 1] - 1 - w.spans[0, 0]) for w in made.windows])
    (found,) = made.measurements(losses, {})
    assert [(row["from"], row["to"]) for row in found.result["by_position"]][:5] == [
        (0, 1),
        (1, 2),
        (2, 3),
        (3, 4),
        (4, 6),
    ]
    assert [row["nll"] for row in found.result["by_position"]][:5] == [0, 1, 2, 3, 4]  # as made up: where a bin begins
    assert sum(row["scored"] for row in found.result["by_position"]) == 64


def test_a_length_is_compared_with_the_training_length_and_not_the_other_way_round():
    made = job()
    losses = np.concatenate([w.counts * (2.5 if w.length == 32 else 2.0) for w in made.windows])
    (found,) = made.measurements(losses, {})
    assert found.result["rows"][1]["against_train_length"]["difference"] == pytest.approx(0.5)
    assert "against_train_length" not in found.result["rows"][0]


def test_what_is_kept_is_known_by_all_that_it_depends_on():
    other_text = type("Other", (Text,), {"fingerprint": "g"})
    other_tokens = type("Other", (Tokens,), {"name": "u"})
    jobs = [job(), job(text=other_text), job(tokens=other_tokens), job(stride=2), job(lengths=(8, 31)), job(pos="none")]
    jobs += [job(max_targets=64), job(documents="across"), job(by_position=True), job(protocols=("nonoverlapping",))]
    assert len({json.dumps(one.identity()) for one in jobs}) == len(jobs)
    assert job().identity() == job().identity()


def measurement(run: str, seed: int, key: str, nll: float, protocol="sliding", **result) -> Measurement:
    one = scored(24, lambda w: w.counts * nll)
    row = {**one.row(np.arange(98) * 2), "stderr": 0.01}
    about = {"run": run, "protocol": protocol, "fingerprint": "f", "tokenizer": "bytes", "train_length": 24}
    return Measurement({**about, **result, "rows": [row]}, {24: one}, seed, key)


def test_groups_have_the_mean_and_the_spread_of_their_seeds():
    runs = [measurement(f"rope_24_seed{seed}", seed, "rope", 1.0 + seed) for seed in range(3)]
    alone = measurement("alibi_24_seed0", 0, "alibi", 1.5)
    group, other = grouped([runs[0], alone, *runs[1:]])
    assert (group.label, len(group.members), other.label) == ("rope_24", 3, "alibi_24_seed0")
    row = group.row(24)
    values = [math.exp(1.0 + seed) for seed in range(3)]
    assert row["perplexity"] == pytest.approx(np.mean(values))
    assert row["perplexity_error"] == pytest.approx(np.std(values, ddof=1))
    assert row["bits_per_byte"] == pytest.approx(2 / math.log(2) / 2)
    assert row["bits_per_byte_error"] == pytest.approx(1 / math.log(2) / 2)
    assert other.row(24)["perplexity_error"] == pytest.approx(math.exp(1.5) * 0.01)  # of its windows
    assert other.row(24)["bits_per_byte_error"] == pytest.approx(0.01 / math.log(2) / 2)
    # only seed 0 is in both
    assert other.against(group, 24)["difference"] == pytest.approx(0.5)


def test_what_is_not_the_same_text_is_not_paired():
    groups = grouped(
        [
            measurement("a", 0, "a", 1.0),
            measurement("b", 0, "b", 1.0, fingerprint="g"),
            measurement("c", 0, "c", 1.0, tokenizer="gpt2"),
            measurement("d", 5, "d", 2.0),
        ]
    )
    assert [groups[0].against(other, 24) is None for other in groups] == [False, True, True, False]


def test_labels_leave_out_the_seed_where_several_share_a_model():
    assert group_labels([("k", "rope_256_seed0"), ("k", "rope_256_seed1"), ("l", "x_seed7")]) == {
        "k": "rope_256",
        "l": "x_seed7",
    }
    two = group_labels([("k", "r_seed0"), ("k", "r_seed1"), ("l", "r_seed2"), ("l", "r_seed3")])
    assert len(set(two.values())) == 2  # another setting differs, the names do not tell which
    assert group_labels([("k", "seed0"), ("k", "seed1")])["k"]
    same = group_labels([("a", "x"), ("b", "x"), ("c", "x"), ("d", "r_seed0"), ("e", "r"), ("d", "r_seed1")])
    assert len(set(same.values())) == 5


def test_seeds_of_one_model_differ_in_nothing_else():
    base = {
        "seed": 0, "name": "a", "wandb": {}, "pos": {"name": "rope"}, "data": {"name": "x", "cache": "~"},
        "train": {"lr": 1.0, "eval_every": 5},
    }  # fmt: skip
    same = {**base, "seed": 1, "name": "b", "data": {"name": "x", "cache": "/else"}}
    assert seedless(base) == seedless({**same, "train": {"lr": 1.0, "eval_every": 7}})
    said_only = {"sharding": "fsdp", "repeat": "outputs/a", "trust": True, "train": {**base["train"], "keep": 9}}
    assert seedless(base) == seedless({**base, **said_only})
    assert seedless(base) != seedless({**base, "train": {"lr": 2.0, "eval_every": 5}})
    assert seedless(base) != seedless({**base, "pos": {"name": "alibi"}})
    assert seedless({**base, "init_from": None}) != seedless({**base, "init_from": "outputs/a"})


def test_a_group_past_its_table_says_so():
    gone = {"length": 48, "nll": None, "perplexity": None, "stderr": None, "scored": 0, "note": "table ends at 24"}
    one = measurement("learned", 0, "learned", 1.0)
    one.result["rows"].append(gone)
    row = Group("learned", [one]).row(48)
    assert (row["perplexity"], row["note"]) == (None, "table ends at 24")
    assert Group("learned", [one]).against(Group("learned", [one]), 48) is None
