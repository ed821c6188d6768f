"""wandb: what an offline run holds, read back by wandb's own reader; and that a wandb that fails costs nothing."""

import logging

import pytest
import wandb
from omegaconf import OmegaConf

from runs.folder import read_run
from runs.settings import scheme_name
from runs.tracking import is_logged_in, start_wandb, wandb_identity
from tests.trained import TINY, composed, metrics, records, run

OFFLINE = [*TINY[:-1], "wandb.mode=offline"]


def history(folder) -> list[dict]:
    """The rows that were logged, without what wandb adds."""
    rows = [record["history"]["item"] for record in records(folder) if record["type"] == "history"]
    return [{k: v for k, v in row.items() if not k.startswith(("_", "speed/"))} for row in rows]


def rows(folder) -> list[dict]:
    """metrics.jsonl without what is null."""
    return [{key: value for key, value in row.items() if value is not None} for row in metrics(folder)]


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def settings(mode):
    return OmegaConf.create({"mode": mode, "project": "p"})


def test_an_offline_run_holds_every_row_and_a_resumed_run_keeps_its_id(corpus, tmp_path):
    run(tmp_path / "run", *OFFLINE, *corpus)
    run_id = read_run(tmp_path / "run")[1]["wandb_id"]
    (folder,) = (tmp_path / "wandb").glob(f"offline-run-*-{run_id}")
    assert history(folder) == rows(tmp_path / "run")
    found = records(folder)
    (begin,) = [record["run"] for record in found if record["type"] == "run"]
    assert (begin["display_name"], begin["run_group"], begin["job_type"]) == ("rope_16_seed0", "rope", "train")
    assert set(begin["tags"]) == {"pos=rope", "layers=1", "train_length=16"}
    text = str(found)
    for name in ("train/*", "val/*", "extrapolation/*", "extrapolation/final"):
        assert name in text
    run(tmp_path / "run", *OFFLINE, *corpus, "train.max_steps=6", resume=True)
    assert read_run(tmp_path / "run")[1]["wandb_id"] == run_id
    first, second = sorted((tmp_path / "wandb").glob(f"offline-run-*-{run_id}"))
    assert first == folder
    again = [row for row in rows(tmp_path / "run") if row["step"] > 4 or (row["step"] == 4 and "val/loss" in row)]
    assert history(second) == again


@pytest.fixture(autouse=True)
def ask_again():
    is_logged_in.cache_clear()
    yield
    is_logged_in.cache_clear()


@pytest.mark.slow
def test_a_server_that_refuses_leaves_an_offline_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    wandb.teardown()  # it reads the environment only once
    with caplog.at_level(logging.WARNING):
        online = start_wandb(settings("auto"), tmp_path / "run", "abcd1234", {"a": 1})
    online.log({"x": 1.0})
    online.finish()
    wandb.teardown()
    (warning,) = warnings(caplog)
    assert warning.startswith("wandb goes on offline (metrics.jsonl has every number): ")
    (folder,) = (tmp_path / "wandb").glob("offline-run-*-abcd1234")
    assert history(folder) == [{"x": 1.0}]


def test_without_an_account_wandb_is_offline_and_does_not_ask(tmp_path, caplog):
    assert not wandb.login(prompt=False, verify=False)
    quiet = start_wandb(settings("auto"), tmp_path / "run", "abcd1234")
    assert warnings(caplog) == []
    quiet.finish()
    loud = start_wandb(settings("online"), tmp_path / "run", "abcd1234")
    loud.finish()
    (warning,) = warnings(caplog)
    assert "wandb goes on offline" in warning
    assert "wandb login" in warning


def test_a_wandb_that_cannot_start_at_all_is_a_disabled_run(tmp_path, monkeypatch, caplog):
    real = wandb.init

    def init(mode, **keys):
        if mode != "disabled":
            raise RuntimeError(f"no {mode}")
        return real(mode=mode, **keys)

    monkeypatch.setattr(wandb, "init", init)
    with start_wandb(settings("offline"), tmp_path / "run", "abcd1234") as disabled:
        disabled.log({"x": 1})
        disabled.summary.update({"y": 1})
    (warning,) = warnings(caplog)
    assert warning == "wandb goes on disabled (metrics.jsonl has every number): no offline"


def test_a_service_that_is_gone_is_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_SERVICE", "3-1-unix-/tmp/wandb-gone/socket")
    wandb.teardown()
    start_wandb(settings("offline"), tmp_path / "run", "abcd1234").finish()
    (warning,) = warnings(caplog)
    assert warning.startswith("wandb goes on disabled")
    monkeypatch.delenv("WANDB_SERVICE")
    wandb.teardown()


def test_the_group_is_the_scheme_unless_given():
    for words, group in (
        (["pos=alibi"], "alibi"),
        (["scaling=yarn"], "rope_yarn"),
        (["pos=none", "model.attention=linear"], "none_linear"),
        (["layers=command_r7b"], "rope[3·window,nope]"),
        (["layers=llama4", "pos.turning=0.75"], "rope0.75[3·full,nope]+log_nope"),
        (["model.sinks=true", "model.layers=[full,nope]"], "rope[full,nope]+sinks"),
        (["wandb.group=mine"], "mine"),
    ):
        config = composed(*TINY, "data.path=x", *words)
        assert wandb_identity(config, scheme_name(config))["group"] == group
        if "mine" not in group and "yarn" not in group:
            assert config.name == f"{group}_16_seed0"
