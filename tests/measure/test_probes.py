"""The probes against slow loops, gradients of the whole model and closed forms; and their pictures."""

import math
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from measure import Measurement
from measure.plots import plot_attention, plot_recall
from measure.probes import attention_by_distance, recall, shift
from measure.windows import widening_edges
from model.positions import SCHEMES
from tests.helpers import ABSOLUTE, ALL_SCHEMES, random_tokens, scheme_id, small_model

STRING = 5


@pytest.fixture(scope="module")
def model():
    return small_model({"name": "rope"})


@pytest.fixture(scope="module")
def text(model):
    return random_tokens(model, 1, 400)[0].numpy()


def watched(model):
    """What is fed to the model from here on: a list of (tokens, targets, positions) of every pass."""
    fed = []
    model.register_forward_pre_hook(
        lambda module, inputs, keys: fed.append((inputs[0], keys["targets"], keys.get("positions"))), with_kwargs=True
    )
    return fed


def loss_of(model, context, target):
    """-log p(target | context), from a pass over just these."""
    row = model(torch.tensor([context]))[0, -1].tolist()
    return math.log(sum(math.exp(value) for value in row)) - row[target]


def standard_error(values):
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


def test_recall_shows_a_string_of_the_texts_ids_twice_with_text_between():
    model = small_model({"name": "none"})
    text = np.delete(np.arange(61).repeat(7), slice(70, 140))  # every token tells its place; ids 10 to 19 are missing
    fed, trials = watched(model), 6
    rows = recall(model, text, longest=44, string_length=STRING, trials=trials)
    assert [row["distance"] for row in rows] == [8, 16, 32]  # 32 + 5 - 1 positions fit, 64 + 5 - 1 do not
    assert len(fed) == 3
    shown, begins = [], []
    for row, (tokens, targets, _) in zip(rows, fed, strict=True):
        d = row["distance"]
        whole = torch.cat((tokens, targets[:, -1:]), dim=1)
        assert whole.shape == (2 * trials, d + STRING)
        first, between, second = whole[:, :STRING], whole[:, STRING:d], whole[:, d:]
        assert torch.equal(first[:trials], second[:trials])
        assert torch.equal(second[trials:], second[:trials])
        assert torch.equal(between[trials:], between[:trials])
        assert (first[trials:] != second[trials:]).any(dim=1).all()
        assert set(first.flatten().tolist()) <= set(text.tolist())
        for part in between[:trials]:
            assert any((text[i : i + len(part)] == part.numpy()).all() for i in range(len(text)))
        shown.append(first.tolist())
        begins.append(between[:trials, 0].tolist())
    assert shown[0] == shown[1] == shown[2]
    assert begins[0] == begins[1] == begins[2]
    assert begins[0][0] == 0  # spread over the text
    assert begins[0][-1] == text[-27]
    assert recall(model, text, longest=44, string_length=STRING, trials=trials, seed=1) != rows
    assert [row["distance"] for row in recall(model, text, 36, STRING, 1)] == [8, 16, 32]
    assert [row["distance"] for row in recall(model, text, 35, STRING, 1)] == [8, 16]
    assert [row["distance"] for row in recall(model, text, 11, 4, 1)] == [4, 8]  # 4 has nothing between


def test_recalls_numbers_are_the_slow_loops(text):
    model = small_model({"name": "alibi"})
    fed, trials = watched(model), 3
    rows = recall(model, text, longest=25, string_length=STRING, trials=trials)
    passes = [torch.cat((tokens, targets[:, -1:]), dim=1).tolist() for tokens, targets, _ in fed]
    model._forward_pre_hooks.clear()
    for row, sequences in zip(rows, passes, strict=True):
        d, means = row["distance"], []
        for sequence in sequences:
            losses = [loss_of(model, sequence[:t], sequence[t]) for t in range(d + 1, d + STRING)]
            means.append(sum(losses) / len(losses))
        gains = [control - nll for nll, control in zip(means[:trials], means[trials:], strict=True)]
        expected = {"nll": sum(means[:trials]) / trials, "control_nll": sum(means[trials:]) / trials}
        expected |= {"gain": sum(gains) / trials, "gain_stderr": standard_error(gains)}
        expected |= {"stderr": standard_error(means[:trials])}
        assert row == {"distance": d, **{k: pytest.approx(v, abs=1e-9) for k, v in expected.items()}}


def test_recall_ends_with_a_learned_table(text):
    learned = small_model({"name": "learned"}, train_length=20)
    rows = recall(learned, text, 64, STRING, 4)
    assert [row["distance"] for row in rows] == [8, 16]  # 16 + 5 - 1 positions: all 20
    with pytest.raises(ValueError, match="longest=20: must be at least 31"):
        recall(learned, text, 64, 16, 4)


@pytest.mark.parametrize("name", ["learned", "rope", "sinusoidal"])
def test_shifts_numbers_are_the_slow_loops(name):
    model = small_model({"name": name}, train_length=12)  # windows of 9 tokens, shifted by 0, 3, 12 and 96
    text = random_tokens(model, 1, 60)[0].tolist()
    rows = shift(model, np.array(text), windows=4)
    starts = [0, 17, 33, 50]  # of 0 to 60 - 10, evenly

    def losses(first):
        all_of_them = []
        for start in starts:
            logits = model(torch.tensor([text[start : start + 9]]), positions=torch.arange(first, first + 9))[
                0
            ].tolist()
            targets = text[start + 1 : start + 10]
            for row, target in zip(logits, targets, strict=True):
                all_of_them.append(math.log(sum(math.exp(value) for value in row)) - row[target])
        return all_of_them

    base = losses(0)
    assert [row["shift"] for row in rows] == ([0, 3] if name == "learned" else [0, 3, 12, 96])
    for row in rows:
        first = row["shift"]
        moved = losses(first)
        change = [a - b for a, b in zip(moved, base, strict=True)]
        by_window = [sum(change[i : i + 9]) / 9 for i in range(0, 36, 9)]
        expected = {"nll": sum(moved) / 36, "difference": sum(change) / 36, "stderr": standard_error(by_window)}
        expected |= {"mean_change": sum(map(abs, change)) / 36, "max_change": max(map(abs, change))}
        assert row == {"shift": first, "length": 9, **{k: pytest.approx(v, abs=1e-9) for k, v in expected.items()}}


@pytest.mark.parametrize("attention", ["softmax", "linear"])
@pytest.mark.parametrize("pos", ALL_SCHEMES, ids=scheme_id)
def test_shift_moves_only_schemes_of_absolute_positions(pos, attention):
    if attention == "linear" and SCHEMES[pos["name"]].biased:
        return
    model = small_model(pos, torch.float32, attention=attention)
    rows = shift(model, random_tokens(model, 1, 300)[0], windows=5)
    assert rows[0]["max_change"] == rows[0]["difference"] == rows[0]["stderr"] == 0
    for row in rows[1:]:
        if pos["name"] == "fire":  # past a threshold its distances are measured by the query's own position
            assert rows[-1]["max_change"] > 0.001
        elif pos["name"] in ABSOLUTE:
            assert row["max_change"] > 0.01
        else:
            assert row["max_change"] < 1e-4


def test_shift_measures_without_autocast_and_leaves_no_trace(text):
    model = small_model({"name": "rope"}, torch.float32, dropout=0.5).train()
    plain, state = shift(model, text), torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        assert shift(model, text) == plain
        attention_by_distance(model, text, 20)
        recall(model, text, 31)
        assert torch.is_autocast_enabled("cpu")
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_pre_hooks for module in model.modules())


def weights_by_gradient(model, tokens):
    """Attention weights (n_layer, H, T, T) of one sequence: the gradient of each head's output by each value row.

    Nothing but the projections that values come from and outputs go to is looked at, so whatever a scheme does to the
    scores is in it.
    """
    c, T = model.config, tokens.shape[1]
    group, values, outputs = c.n_head // c.n_kv_head, [], []

    def keep(module, inputs, made):
        made = made.detach().requires_grad_()
        values.append(made)
        return made

    hooks = [block.attention.qkv.register_forward_hook(keep) for block in model.blocks]
    hooks += [
        block.attention.out.register_forward_pre_hook(lambda m, i: outputs.append(i[0])) for block in model.blocks
    ]
    with torch.enable_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    weights = torch.zeros(c.n_layer, c.n_head, T, T, dtype=torch.float64)
    for layer, (value, output) in enumerate(zip(values, outputs, strict=True)):
        heads = output[0].view(T, c.n_head, c.head_dim)
        for i in range(T):
            picked = sum(heads[i, h, h % group] for h in range(c.n_head))  # heads that share values: a dimension each
            gradient = torch.autograd.grad(picked, value, retain_graph=True)[0][0]
            gradient = gradient.view(T, -1, c.head_dim)[:, c.n_head + c.n_kv_head :]  # (T, Hkv, head_dim)
            for h in range(c.n_head):
                weights[layer, h, i] = gradient[:, h // group, h % group]
    return weights


def binned(weights, edges):
    """Mean over the pairs of each bin, one at a time: weights (windows, n_layer, H, T, T)."""
    means = []
    for low, high in pairwise(edges):
        pairs = [(i, i - d) for d in range(low, high) for i in range(d, edges[-1])]
        means.append(sum(weights[..., i, j].mean(dim=0) for i, j in pairs) / len(pairs))
    return torch.stack(means, dim=-1)


@pytest.mark.parametrize("pos", ALL_SCHEMES, ids=scheme_id)
def test_attention_weights_are_those_the_model_uses(pos, monkeypatch):
    monkeypatch.setattr("measure.probes.ROWS", 8)  # so that there are several blocks
    settings = {"scaling": {"name": "yarn", "factor": 4.0}} if pos == {"name": "rope"} else {}
    model = small_model(pos, n_kv_head=2 if len(pos) == 1 else 4, train_length=21, **settings)
    text = random_tokens(model, 1, 60)[0]
    found = attention_by_distance(model, text, 21, windows=2)
    assert found["edges"] == [0, 1, 2, 3, 4, 6, 8, 12, 16, 21]
    assert (found["windows"], found["length"]) == (2, 21)
    weights = torch.stack([weights_by_gradient(model, text[None, start : start + 21]) for start in (0, 39)])
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 2, 4, 21, dtype=torch.float64))
    expected = binned(weights, found["edges"])
    torch.testing.assert_close(torch.tensor(found["weights"], dtype=torch.float64), expected, rtol=0, atol=1e-9)


def test_attention_weights_are_those_of_every_kind_of_layer():
    kinds = {"layers": ["window", "nope"], "window": 5, "query_scale": "ssmax", "sinks": True}
    model = small_model({"name": "rope"}, train_length=21, **kinds)
    text = random_tokens(model, 1, 21)
    found, weights = attention_by_distance(model, text[0], 21), weights_by_gradient(model, text)
    torch.testing.assert_close(torch.tensor(found["weights"]).double(), binned(weights[None], found["edges"]))


@pytest.mark.parametrize(
    ("probe", "change", "words"),
    [
        (recall, {"longest": 11}, r"longest=11: must be at least 12 for string_length=5"),
        (recall, {"longest": 600}, r"window of 507 tokens .* 400"),
        (recall, {"tokens": np.zeros((2, 50), dtype=np.int64)}, "one dimension"),
        (recall, {"tokens": np.full(50, 61)}, "token id 61"),
        (shift, {"tokens": np.zeros(50)}, "integers"),
        (attention_by_distance, {"length": 401}, "window of 401 tokens .* 400"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_probes_refuse(model, text, probe, change, words):
    given = {recall: {"longest": 44, "string_length": STRING}, shift: {}, attention_by_distance: {"length": 20}}[probe]
    with pytest.raises(ValueError, match=words):
        probe(model, **{"tokens": text, **given, **change})


def test_linear_attention_has_no_weights_and_a_table_ends(text):
    with pytest.raises(ValueError, match=r"model\.attention=linear: has no attention weights"):
        attention_by_distance(small_model({"name": "rope"}, attention="linear"), text, 20)
    assert attention_by_distance(small_model({"name": "learned"}), text, 33)["length"] == 32


def probed(run, **probes):
    return Measurement({"run": run, "train_length": 40}, (), {}, np.zeros(0), np.zeros(0), limit=40, probes=probes)


def recalled(run="rope", distances=(16, 32, 64)):
    losses = {"nll": 2.0, "stderr": 0.1, "control_nll": 5.5, "gain": 3.5, "gain_stderr": 0.2}
    return probed(run, recall=[{"distance": distance, **losses} for distance in distances])


def attended(n_layer=2, n_head=3, length=64, run="rope"):
    edges = widening_edges(length)
    weights = np.random.default_rng(0).uniform(0, 1, (n_layer, n_head, len(edges) - 1)).tolist()
    weights[0][0][-1] = 0.0 if length > 1 else 1.0  # as under ALiBi far away
    return probed(run, attention={"edges": edges, "weights": weights, "length": length})


LOOKS = defaultdict(lambda: {"color": "#0072B2", "marker": "o"})


@pytest.fixture
def drawn(monkeypatch):
    figures, real = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **keys: (figures.append(self), real(self, *a, **keys)))
    return figures


def test_recalls_plot_has_a_curve_a_run(drawn, tmp_path):
    plot_recall([recalled(), recalled("learned", (16, 32))], LOOKS).save(tmp_path / "plot.png")
    (axes,) = drawn[0].axes
    assert axes.get_xscale() == "log"
    curves = [line.get_xydata().tolist() for line in axes.lines if line.get_marker() in ("o", "s")]
    assert curves == [[[d, 3.5] for d in (16, 32, 64)], [[d, 3.5] for d in (16, 32)]]
    assert any(line.get_linestyle() == "--" and set(line.get_xdata()) == {40} for line in axes.lines)
    labels = [text.get_text().strip("\u200b") for text in drawn[0].legends[0].get_texts()]
    assert labels == ["rope", "learned", "training length 40", "± one standard error"]


def test_attentions_plot_has_a_row_a_head(drawn, tmp_path):
    plot_attention([attended()]).save(tmp_path / "plot.png")
    axes = drawn[0].axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()][-3:] == ["24", "32", "48"]
    cells = axes.images[0].get_array()
    assert cells.shape == (6, 12)
    assert cells[4, 3] == attended().probes["attention"]["weights"][1][1][3]
    assert axes.images[0].norm.vmin == 1e-6


@pytest.mark.parametrize(
    "plot",
    [
        plot_recall([recalled(f"_cost$\\alp$ {i}") for i in range(9)], LOOKS),
        plot_attention([attended(12, 12, 1024)]),
        plot_attention([attended(1, 1, 1, run="a_b$^{x")] * 3),
    ],
    ids=["many", "large", "one"],
)
def test_anything_can_be_drawn(plot, tmp_path):
    plot.save(tmp_path / "plot.svg")
    assert b"<svg" in (tmp_path / "plot.svg").read_bytes()[:1000]
    assert [path.name for path in tmp_path.iterdir()] == ["plot.svg"]
