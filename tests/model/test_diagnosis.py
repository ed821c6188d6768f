"""The diagnosis of RoPE against closed forms in Python's floats, slow loops, and the known scores."""

import cmath
import math
import subprocess
import sys

import pytest
import torch
from PIL import Image

from model.diagnosis import complete_planes, decay_bound, main, planes, precision
from model.rope import rope_frequencies


def thetas(head_dim, base=10000.0):
    return [base ** (-2 * i / head_dim) for i in range(head_dim // 2)]


def diagnose(head_dim, train_length, length, scaling=None, base=10000.0):
    trained, _ = rope_frequencies(head_dim, base)
    used, _ = rope_frequencies(head_dim, base, scaling, train_length, length)
    return planes(trained, used, train_length, length)


# --- planes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("head_dim", "base", "train_length"), [(64, 10000.0, 256), (128, 500000.0, 8192), (8, 3.0, 6)])
def test_planes_are_their_closed_forms(head_dim, base, train_length):
    rows = diagnose(head_dim, train_length, 4 * train_length, base=base)
    assert len(rows) == head_dim // 2
    for theta, row in zip(thetas(head_dim, base), rows, strict=True):
        assert row.theta == pytest.approx(theta, rel=1e-12)
        assert row.period == pytest.approx(2 * math.pi / theta, rel=1e-12)
        assert row.turns == pytest.approx(train_length * theta / 6.283185307179586, rel=1e-12)
        assert row.slowdown == 1
        assert row.new_from == (None if theta * train_length >= 2 * math.pi else train_length)


def test_planes_have_the_known_ends():
    rows = diagnose(64, 256, 1024)
    assert rows[0].theta == 1
    assert rows[0].period == pytest.approx(6.28, abs=0.005)
    assert rows[31].theta == pytest.approx(0.000133, abs=5e-7)
    assert rows[31].period == pytest.approx(47117, abs=1)


def test_46_of_64_planes_complete_a_turn_at_head_width_128_and_length_4096():
    rows = diagnose(128, 4096, 8192)
    assert len(rows) == 64
    assert complete_planes(rows) == sum(theta * 4096 >= 2 * math.pi for theta in thetas(128)) == 46


def test_a_turn_is_complete_when_the_next_position_would_start_another():
    # plane 0 turns by one radian a token: 6 of them are less than 2π, 7 are more; the others hardly turn
    assert [complete_planes(diagnose(4, length, 99)) for length in (6, 7)] == [0, 1]
    exactly_once = torch.tensor([2 * math.pi / 256], dtype=torch.float64)
    [row] = planes(exactly_once, exactly_once, 256, 512)
    assert (row.turns, row.new_from, complete_planes([row])) == (1.0, None, 1)


def test_plain_rope_is_new_in_the_incomplete_planes_and_only_past_the_training_length():
    for row in diagnose(64, 256, 1024):
        assert row.new_from == (None if row.turns >= 1 else 256)
    assert all(row.new_from is None for row in diagnose(64, 256, 256))
    assert [row.new_from for row in diagnose(64, 256, 257)] == [row.new_from for row in diagnose(64, 256, 1024)]


@pytest.mark.parametrize("train_length", [10, 256, 1000])
@pytest.mark.parametrize("factor", [1.1, 2.0, 3.3, 4.0])
def test_interpolation_shows_nothing_new_up_to_factor_times_the_training_length(train_length, factor):
    scaling, reach = {"name": "linear", "factor": factor}, math.ceil(round(factor * train_length, 6))
    assert all(row.new_from is None for row in diagnose(64, train_length, reach, scaling))
    for row in diagnose(64, train_length, reach + 1, scaling):
        assert row.slowdown == pytest.approx(factor)
        assert row.new_from == (None if row.turns >= 1 else reach)


@pytest.mark.parametrize(
    "scaling",
    [
        {"name": "ntk", "factor": 3.0},
        {"name": "yarn", "factor": 3.0, "beta_fast": 4.0, "beta_slow": 0.05},
        {"name": "longrope", "factor": 3.0, "short": [1.0] * 32, "long": [0.5 + 0.125 * i for i in range(32)]},
    ],
)
def test_the_first_new_position_is_the_first_past_the_trained_angles(scaling):
    train_length, length = 256, 1024
    trained = thetas(64)
    used = rope_frequencies(64, 10000.0, scaling, train_length, length)[0].tolist()
    found = [row.new_from for row in diagnose(64, train_length, length, scaling)]
    for old, new, new_from in zip(trained, used, found, strict=True):
        past = [p for p in range(length) if p * new >= train_length * old * (1 - 1e-9)]
        assert new_from == (past[0] if past and train_length * old < 2 * math.pi else None)
    assert len({*found}) > 2


# --- precision --------------------------------------------------------------------------------------------------------

FAR = (1_000_007, 1_000_003)


def at(m, n):
    torch.manual_seed(0)
    q, k = torch.randn(64, dtype=torch.float64), torch.randn(64, dtype=torch.float64)
    return precision(q, k, m, n, rope_frequencies(64)[0])


def test_scores_have_the_known_values():
    for pair in ((7, 3), (107, 103), FAR):
        assert at(*pair)["all float64"][:2] == (0, pytest.approx(5.617582, abs=5e-7))
    assert at(107, 3)["all float64"][1] == pytest.approx(2.444756, abs=1e-6)
    assert at(*FAR)["all float32"][1] == pytest.approx(5.653579, abs=2e-6)
    assert at(*FAR)["all bfloat16"][1] == 7.34375


def test_errors_are_against_float64_and_grow_with_the_position_except_ropewalks():
    for pair in ((7, 3), (107, 103), FAR):
        ways = at(*pair)
        for _, score, error in ways.values():
            assert math.isnan(score) or error == abs(score - ways["all float64"][1])
        assert ways["Ropewalk, float32 q and k"][2] < 1e-5
        assert ways["Ropewalk, bfloat16 q and k"][2] < 0.05  # of q and k themselves, at any position
    near, middle, far = at(7, 3), at(107, 103), at(*FAR)
    for way in ("all float32", "all bfloat16"):
        assert near[way][0] < middle[way][0] < far[way][0]
    assert far["all bfloat16"][2] > 1.5


def test_angle_errors_are_those_of_rounding_twice():
    def rounded(x, bits):  # to bits significant binary digits, ties to even
        unit = 2.0 ** (math.floor(math.log2(x)) + 1 - bits)
        return round(x / unit) * unit

    for name, bits in (("all float32", 24), ("all bfloat16", 8)):
        for pair in ((107, 103), FAR):
            errors = [abs(rounded(p * rounded(t, bits), bits) - p * t) for p in pair for t in thetas(64)]
            assert at(*pair)[name][0] == pytest.approx(max(errors), rel=1e-6)


def test_float16_overflows():
    angle, score, error = at(*FAR)["all float16"]
    assert angle == math.inf
    assert math.isnan(score)
    assert math.isnan(error)
    assert at(107, 103)["all float16"][2] < 0.1


# --- decay ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [2, 8, 64])
def test_decay_bound_is_the_slow_sum(head_dim):
    distances = [0, 1, 2, 7, 256, 1000, 100_000]
    expected = []
    for distance in distances:
        sums = []
        for i in range(head_dim // 2):
            sums.append(sum(cmath.exp(1j * distance * theta) for theta in thetas(head_dim)[: i + 1]))
        expected.append(sum(abs(s) for s in sums) / len(sums))
    found = decay_bound(torch.tensor(distances), rope_frequencies(head_dim)[0])
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(expected, rel=1e-9)


def test_decay_bound_starts_at_half_of_the_planes_and_decays():
    bound = decay_bound(torch.tensor([0, 1, 10, 100]), rope_frequencies(128)[0]).tolist()
    assert bound[0] == 65 / 2
    assert bound[0] > bound[1] > bound[2] > bound[3]


# --- the command ------------------------------------------------------------------------------------------------------


def lines_of(capsys, *words):
    main(list(words))
    return capsys.readouterr().out.splitlines()


def test_main_prints_a_row_a_plane_and_the_known_numbers(capsys):
    lines = lines_of(capsys, "head_dim=128", "train_length=4096")
    head = next(i for i, line in enumerate(lines) if line.startswith("plane"))
    rows = lines[head + 1 : head + 65]
    assert lines[head].endswith("  unseen angles up to length 16,384")
    assert [line.split()[0] for line in rows] == [str(i) for i in range(64)]
    assert [line.endswith("  no") for line in rows] == [True] * 46 + [False] * 18
    assert all(line.endswith("  new angles from position 4,096") for line in rows[46:])
    assert rows[0].split()[1:4] == ["1.00", "6.28", "652"]
    assert rows[63].split()[1:4] == ["0.000115", "54,410", "0.0753"]
    assert "46 of 64 planes complete a turn within 4,096 tokens." in lines
    assert max(map(len, lines)) <= 110
    distances = lines[next(i for i, line in enumerate(lines) if line.startswith("distance")) + 1 :]
    assert [line.split()[0] for line in distances] == [f"{2**j:,}" for j in range(15)]


def test_main_prints_the_known_scores(capsys):
    text = "\n".join(lines_of(capsys, "head_dim=64", "train_length=256"))
    assert text.count("all float64") == text.count("5.617582            0\n") == 3
    assert "5.6535" in text
    assert "7.343750" in text
    assert "1,000,007 and 1,000,003" in text
    assert text.count("overflows") == 3
    assert not any(word in text for word in ("nan", "inf"))


def test_main_takes_every_key(capsys):
    scaling = ["scaling=yarn", "factor=8", "beta_fast=16", "beta_slow=2", "attention_scale=null"]
    lines = lines_of(capsys, "head_dim=8", "train_length=100", "base=500", "length=800", "positions=0,50", *scaling)
    assert "yarn at length 800, scores times 1.46" in lines[0]  # (0.1 ln 8 + 1)²
    used, _ = rope_frequencies(8, 500.0, {"name": "yarn", "factor": 8, "beta_fast": 16, "beta_slow": 2}, 100, 800)
    slower = [theta / new for theta, new in zip(thetas(8, 500.0), used.tolist(), strict=True)]
    assert slower[0] < slower[-1] == 8
    assert [float(line.split()[4]) for line in lines[3:7]] == pytest.approx(slower, rel=5e-3)
    assert [line.split()[:3] for line in lines if "all float64" in line] == [["4", "and", "0"], ["54", "and", "50"]]
    torch.manual_seed(0)
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    scores = [precision(q, k, n + 4, n, used)["all float64"][1] for n in (0, 50)]
    assert [float(line.split()[6]) for line in lines if "all float64" in line] == pytest.approx(scores, abs=1e-6)
    last = lines[-1].split()
    assert last[0] == "400"
    assert float(last[2]) == pytest.approx(decay_bound(torch.tensor([400]), used).item(), abs=0.005)
    lists = lines_of(capsys, "head_dim=6", "train_length=64", "scaling=longrope", "short=1,1,2", "long=2,2.5,4")
    assert [line.split()[4] for line in lists[3:6]] == ["2.00", "2.50", "4.00"]
    assert lines_of(capsys, "head_dim=8", "train_length=64", "scaling=none") == lines_of(
        capsys, "head_dim=8", "train_length=64"
    )


@pytest.mark.parametrize("scaling", [[], ["scaling=linear", "factor=4"]])
def test_plot_is_a_picture_and_nothing_is_left_beside_it(capsys, tmp_path, scaling):
    path = tmp_path / "decay.png"
    assert lines_of(capsys, "head_dim=16", "train_length=64", f"plot={path}", *scaling)[-1] == f"plot: {path}"
    assert [*tmp_path.iterdir()] == [path]
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        assert picture.width >= 600
        assert picture.height >= 400


@pytest.mark.parametrize("words", [[], ["--help"], ["head_dim=64", "-h"]])
def test_help_is_printed(capsys, words):
    text = "\n".join(lines_of(capsys, *words))
    assert "usage: python -m model.rope head_dim=64 train_length=256" in text
    assert all(key in text for key in ("base", "scaling", "length", "positions", "plot"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train_length=256", "head_dim=missing"),
        ("head_dim=64", "train_length=missing"),
        ("head_dim=63 train_length=256", "head_dim=63"),
        ("head_dim=0 train_length=256", "head_dim=0"),
        ("head_dim=64 train_length=", "train_length="),
        ("head_dim=64 train_length=1.5", "train_length=1.5"),
        ("head_dim=64 train_length=256,512", "train_length=[256, 512]"),
        ("head_dim=64 train_length=256 length=0", "length=0"),
        ("head_dim=64 train_length=256 positions=1,000,007", "positions=1,000,007"),
        ("head_dim=64 train_length=256 positions=3,-1", "positions=-1"),
        ("head_dim=64 train_length=256 base=ten", "base=ten"),
        ("head_dim=64 train_length=256 base=1", "base=1"),
        ("head_dim=64 train_length=256 base=NaN", "base=nan"),
        ("head_dim=64 train_length=256 base=1e300 scaling=linear factor=1e300", "at most 1e+09"),
        (f"head_dim=64 train_length=256 base=1{'0' * 400}", "must be a finite number"),
        ("head_dim=64 train_length=256 widht=3", "'widht'"),
        ("head_dim=64 train_length=256 oops", "'oops'"),
        ("head_dim=64 train_length=256 factor=4", "'factor'"),
        ("head_dim=64 train_length=256 scaling=none factor=4", "'factor'"),
        ("head_dim=64 train_length=256 scaling=yarm", "yarn"),
        ("head_dim=64 train_length=256 scaling=1,2", "yarn"),
        ("head_dim=64 train_length=256 scaling=yarn low=2", "beta_fast"),
        ("head_dim=64 train_length=256 scaling=yarn factor=four", "factor='four'"),
        ("head_dim=64 train_length=256 scaling=longrope short=1,2", "list of 32"),
        ("head_dim=64 train_length=256 plot=decay.pdf", "plot=decay.pdf"),
        ("head_dim=64 train_length=256 plot=no/such/folder/decay.png", "no/such/folder"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(capsys, words, message):
    with pytest.raises(SystemExit) as exit_:
        main(words.split())
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_the_command_is_reached_through_the_module():
    command = [sys.executable, "-m", "model.rope", "head_dim=8", "train_length=64"]
    right, wrong = (
        subprocess.run(words, capture_output=True, text=True, encoding="utf-8", timeout=120)
        for words in (command, [*command, "oops=1"])
    )
    assert (right.returncode, right.stderr) == (0, "")
    assert "planes complete a turn within 64 tokens" in right.stdout
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: 'oops'")
    assert wrong.stderr.count("\n") == 1
