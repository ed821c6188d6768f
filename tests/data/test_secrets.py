"""Passwords, signatures and tokens: what is refused repeats none, and what goes on writes none."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from data import DataConfig
from data.corpora import _SECRETS
from tests.data.written import jsonl
from tests.trained import TINY, command

SECRETS = ["hf_S3cretToken", "S3cretPassword", "S3cretSignature"]
URLS = [
    "https://user:S3cretPassword@host/texts/a.txt",
    "https://user:S3cret/Pass@S3cretPassword@host:8080/a.jsonl",
    "s3://key:S3cretPassword@bucket/a.txt",
    "HTTPS://host/a.parquet?X-Amz-Signature=S3cretSignature&X-Amz-Date=1",
    "https://host/a.txt?token=S3cretSignature",
    "https://account.blob.core.windows.net/a/b.txt?sv=1&sig=S3cretSignature",
    "zip://a.txt::https://user:S3cretPassword@host/a.zip",
    "git+ssh://user:S3cretPassword@host/a",
    "https://host/a.txt",
    "./a.zip::https://user:S3cretPassword@host/a.zip",
]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("kind", ["files", "hub", "bin"])
def test_a_url_is_refused_and_not_repeated(kind, url):
    for settings in ({"path": url}, {"path": "a", "cache": url}, {"path": ["a.txt", url]}):
        if kind == "hub" and isinstance(settings["path"], list):
            continue
        with pytest.raises(ValueError, match=r"data\.(path|cache) is a URL") as raised:
            DataConfig("mine", kind, **settings)
        said = str(raised.value)
        assert re.search(r"\w+(?=://)", url)[0] in said
        assert "~/.netrc" in said
        assert "HF_TOKEN" in said
        assert not any(secret in said for secret in ("S3cret", "Pass", "key:", "user", "host/"))


@pytest.mark.parametrize("path", [[["https://a:S3cretPassword@b"]], {"https://a:S3cretPassword@b": 1}])
def test_what_is_no_path_is_not_repeated(path):
    with pytest.raises(ValueError, match=r"data\.path") as raised:
        DataConfig("mine", "files", path)
    assert "S3cret" not in str(raised.value)


def test_a_command_repeats_it_nowhere(tmp_path):
    # Hydra would: in multirun.yaml, and on the terminal where a job fails
    done = command(
        "train.py", "-m", "seed=0,1", "data=files", f"data.path='{URLS[0]}?sig=S3cretSignature'", cwd=tmp_path
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: data.path is a URL (https://…)")
    assert done.stderr.count("\n") == 1
    assert "S3cret" not in done.stdout + done.stderr
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("403 for url 'https://cdn.host/a?X-Amz-Signature=S3cret&b=c' (x)", "403 for url 'https://cdn.host/a?…' (x)"),
        ("at https://user:S3cret@host/a.", "at https://…host/a."),
        ("exceeded with url: /api/a?token=S3cret (Caused by", "exceeded with url: /api/a?… (Caused by"),
        ("is it there? a@b, at https://host/a@b/c", "is it there? a@b, at https://host/a@b/c"),
    ],
)  # fmt: skip
def test_messages_of_the_hub_lose_what_is_secret(message, shown):
    assert _SECRETS.sub("…", message) == shown


class Hub(BaseHTTPRequestHandler):
    """A hub of one data set, whose file lies at a signed address, where it is refused."""

    def do_GET(self):
        self.server.heard.append((self.path, self.headers.get("Authorization")))
        file = {"type": "file", "path": "train.parquet", "size": 100, "oid": "0" * 40}
        known = {"id": "owner/name", "sha": "0" * 40, "siblings": [{"rfilename": "train.parquet"}], "tags": []}
        found = b""
        if "/api/" in self.path and "/tree/" in self.path:
            found = json.dumps([file]).encode()
            self.send_response(200)
        elif "/api/" in self.path and "README" not in self.path:
            found = json.dumps(known).encode()
            self.send_response(200)
        elif "Signature" not in self.path and "train.parquet" in self.path:
            self.send_response(302)
            self.send_header("Location", "/file?X-Amz-Signature=S3cretSignature")
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("ETag", "0")
        else:
            self.send_response(403 if "Signature" in self.path else 404)
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", str(len(found)))
        self.end_headers()
        self.wfile.write(found if self.command == "GET" else b"")

    do_HEAD = do_POST = do_GET

    def log_message(self, *args):
        pass


def contents(folder):
    return "".join(path.read_bytes().decode("latin-1") for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("streaming", ["false", "true"])
def test_a_token_is_used_and_not_written_where_the_hub_refuses(tmp_path, home, monkeypatch, streaming):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.heard = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_TOKEN", SECRETS[0])
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    settings = [word for word in TINY if word != "data=files"]
    place = ["data=hub", "data.path=owner/name", f"data.streaming={streaming}", "data.max_documents=9", "data.cache=c"]
    try:
        done = command("train.py", *settings, *place, cwd=tmp_path)
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 1
    assert "error: data=hub: could not read owner/name from the Hugging Face hub" in done.stderr
    everything = done.stdout + done.stderr + contents(tmp_path) + contents(home)
    assert any("Signature" in path for path, _ in server.heard)
    assert f"Bearer {SECRETS[0]}" in {authorization for _, authorization in server.heard}
    assert not [secret for secret in SECRETS if secret in everything]


def test_a_run_does_not_write_the_tokens_of_its_environment(tmp_path, home, monkeypatch):
    (tmp_path / "set").mkdir()
    jsonl(tmp_path / "set" / "train.jsonl", *({"text": f"{i} and some more words of text"} for i in range(40)))
    monkeypatch.setenv("HF_TOKEN", SECRETS[0])
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", SECRETS[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRETS[1])
    settings = [word for word in TINY if word not in ("data=files", "wandb.mode=disabled")]
    place = ["data=hub", f"data.path={tmp_path / 'set'}", "data.cache=cache", "wandb.mode=offline"]
    done = command("train.py", *settings, *place, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("outputs/wandb/*/*.wandb"))
    everything = done.stdout + done.stderr + contents(tmp_path) + contents(home)
    assert not [secret for secret in SECRETS if secret in everything]
