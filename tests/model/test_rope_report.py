"""The report on RoPE against closed forms in Python's floats, slow loops, and the known scores."""

import cmath
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model.rope import rope_frequencies
from model.rope_report import decay_bound, main, planes, precision


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
    for theta, (found, period, turns, slowdown, new_from) in zip(thetas(head_dim, base), rows, strict=True):
        assert found == pytest.approx(theta, rel=1e-12)
        assert period == pytest.approx(2 * math.pi / theta, rel=1e-12)
        assert turns == pytest.approx(train_length * theta / 6.283185307179586, rel=1e-12)
        assert slowdown == 1
        assert new_from == (None if theta * train_length >= 2 * math.pi else train_length)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"name": "linear", "factor": 3.3},
        {"name": "ntk", "factor": 3.0},
        {"name": "yarn", "factor": 3.0, "beta_fast": 4.0, "beta_slow": 0.05},
        {"name": "longrope", "factor": 3.0, "short": [1.0] * 32, "long": [0.5 + 0.125 * i for i in range(32)]},
    ],
)
def test_the_first_new_position_is_the_first_past_the_trained_angles(scaling):
    train_length, length = 256, 1024
    used = rope_frequencies(64, 10000.0, scaling, train_length, length)[0].tolist()
    found = [row[4] for row in diagnose(64, train_length, length, scaling)]
    for old, new, new_from in zip(thetas(64), used, found, strict=True):
        past = [p for p in range(length) if p * new >= train_length * old * (1 - 1e-9)]
        assert new_from == (past[0] if past and train_length * old < 2 * math.pi else None)
    if scaling is None:
        assert {*found} == {None, 256}


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
    angle, score, error = at(*FAR)["all float16"]
    assert angle == math.inf
    assert math.isnan(score)
    assert math.isnan(error)


def test_ropewalks_errors_do_not_grow_with_the_position():
    for pair in ((7, 3), (107, 103), FAR):
        assert at(*pair)["Ropewalk, float32 q and k"][2] < 1e-5
        assert at(*pair)["Ropewalk, bfloat16 q and k"][2] < 0.05  # of q and k themselves, at any position
    assert at(*FAR)["all bfloat16"][2] > 1.5


def test_angle_errors_are_those_of_rounding_twice():
    def rounded(x, bits):  # to bits significant binary digits, ties to even
        unit = 2.0 ** (math.floor(math.log2(x)) + 1 - bits)
        return round(x / unit) * unit

    for name, bits in (("all float32", 24), ("all bfloat16", 8)):
        for pair in ((107, 103), FAR):
            errors = [abs(rounded(p * rounded(t, bits), bits) - p * t) for p in pair for t in thetas(64)]
            assert at(*pair)[name][0] == pytest.approx(max(errors), rel=1e-6)


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
    assert found.tolist() == pytest.approx(expected, rel=1e-9)
    assert expected[0] == pytest.approx((head_dim // 2 + 1) / 2)


# --- the command ------------------------------------------------------------------------------------------------------


def lines_of(capsys, *words):
    main(list(words))
    return capsys.readouterr().out.splitlines()


def test_the_report_has_a_row_a_plane_and_the_known_numbers(capsys):
    lines = lines_of(capsys, "128", "4096")
    head = next(i for i, line in enumerate(lines) if line.startswith("plane"))
    rows = lines[head + 1 : head + 65]
    assert [line.endswith("  no") for line in rows] == [True] * 46 + [False] * 18
    assert all(line.endswith("  from position 4,096") for line in rows[46:])
    assert rows[0].split()[:4] == ["0", "1", "6.28", "651.899"]
    assert rows[63].split()[:4] == ["63", "0.000115", "54,410.14", "0.075"]
    assert "46 of 64 planes complete a turn within 4,096 tokens." in lines
    assert max(map(len, lines)) <= 110
    text = "\n".join(lines_of(capsys, "64", "256"))
    assert text.count("5.617582            0\n") == 3
    assert "7.343750" in text
    assert "1,000,007 and 1,000,003" in text


def test_the_command_takes_every_key(capsys, tmp_path):
    yarn = {"name": "yarn", "factor": 8, "beta_fast": 16, "attention_scale": None}
    words = ["8", "100", "--base", "500", "--scaling", json.dumps(yarn), "--length", "800"]
    lines = lines_of(capsys, *words, "--plot", str(tmp_path / "decay.png"))
    assert "'yarn'" in lines[0]
    assert "at length 800, scores times 1.46" in lines[0]  # (0.1 ln 8 + 1)²
    used, _ = rope_frequencies(8, 500.0, yarn, 100, 800)
    slower = [theta / new for theta, new in zip(thetas(8, 500.0), used.tolist(), strict=True)]
    assert [float(line.split()[4]) for line in lines[2:6]] == pytest.approx(slower, abs=5e-3)
    last = lines[-1].split()
    assert last[0] == "256"
    assert float(last[2]) == pytest.approx(decay_bound(torch.tensor([256]), used).item(), abs=0.005)
    assert [path.name for path in tmp_path.iterdir()] == ["decay.png"]
    assert (tmp_path / "decay.png").read_bytes().startswith(b"\x89PNG")
    lists = lines_of(capsys, "6", "64", "--scaling", '{"name": "longrope", "short": [1, 1, 2], "long": [2, 2.5, 4]}')
    assert [line.split()[4] for line in lists[2:5]] == ["2.00", "2.50", "4.00"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "usage: python -m model.rope_report"),
        ("63 256", "head_dim=63"),
        ("64 1.5", "'1.5'"),
        ("64 256 --length -1", "length=-1"),
        ("64 256 --length 0", "length=0"),
        ("64 256 --base 1", "base=1"),
        ("64 256 --scaling yarn", "invalid loads value: 'yarn'"),
        ('64 256 --scaling {"name":"yarm"}', "yarn"),
        ('64 256 --scaling {"name":"yarn","low":2}', "beta_fast"),
        ('64 256 --scaling {"name":"longrope","short":[1,2]}', "list of 32"),
        ("64 256 --plot no/such/folder/decay.png", "no/such/folder"),
    ],
)
def test_what_a_user_can_mend_is_named(capsys, words, message):
    with pytest.raises(SystemExit) as exited:
        main(words.split())
    assert exited.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_is_reached_through_the_module():
    words = [sys.executable, "-m", "model.rope_report", "8", "64"]
    done = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "planes complete a turn within 64 tokens" in done.stdout
