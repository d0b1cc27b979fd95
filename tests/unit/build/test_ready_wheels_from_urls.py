"""Wheels behind a URL: over https alone, and the user's rights reach the server and no message."""

import base64
import functools
import http.server
import threading
import zipfile
from contextlib import contextmanager
from typing import ClassVar

import pytest
from fake_wheels import wheel_of

from hvkit import cli
from hvkit.build import BuildOptions, installer, ready_wheels
from hvkit.build.ready_wheels import read, require_source
from hvkit.errors import BuildError


@contextmanager
def serving(handler):
    """A server on this host; yields its port."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_a_changed_file_behind_a_url_is_refused(abi, machine, tmp_path):
    made = ready_wheels.add(wheel_of(abi, tmp_path, "0.28.1+hvkit1"), tmp_path / "wheels")
    folder = http.server.SimpleHTTPRequestHandler
    with serving(functools.partial(folder, directory=str(made.parent))) as port:
        url = f"http://127.0.0.1:{port}"
        (one,), _ = ready_wheels.fitting(url, machine)
        kept = ready_wheels.fetch(one, url, tmp_path)
        assert kept.read_bytes() == made.read_bytes()
        with zipfile.ZipFile(made, "a") as wheel:
            wheel.writestr("horovod/evil.py", "")
        with pytest.raises(BuildError, match=r"is not the file of wheels\.json: its SHA-256 is"):
            ready_wheels.fetch(one, url, tmp_path)


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers as the first folder of the path says."""

    asked: ClassVar[list] = []

    def do_GET(self):
        self.asked.append((self.path, self.headers.get("Authorization")))
        kind = self.path.split("/")[1]
        if kind == "garbage":
            self.wfile.write(b"garbage\r\n\r\n")
            return
        self.send_response(302 if kind in ("plain", "moved", "other") else 200)
        if kind == "plain":
            self.send_header("Location", "http://user:secret@wheels.example.com/wheels.json?sig=s3")
        if kind == "moved":
            self.send_header("Location", "/there/wheels.json")
        if kind == "other":
            port = self.server.server_address[1]
            self.send_header("Location", f"http://localhost:{port}/there/wheels.json")
        self.send_header("Content-Length", "100" if kind == "cut" else "2")
        self.end_headers()
        self.wfile.write(b"[]")

    def log_message(self, *_):
        """Print nothing."""


@pytest.fixture
def answers():
    """The port of a server, and what it was asked for."""
    with serving(Answers) as port:
        Answers.asked.clear()
        yield port, Answers.asked


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("plain", r"leads to http://wheels\.example\.com/wheels\.json\?\.\.\., which is not https"),
        ("cut", "more expected"),
        ("garbage", "garbage"),
    ],
)
def test_a_server_leads_to_https_only_and_its_faults_are_named(answers, kind, why):
    with pytest.raises(BuildError, match=f"cannot fetch http://127.0.0.1:.*{why}") as caught:
        read(require_source(f"http://127.0.0.1:{answers[0]}/{kind}"), "wheels.json")
    assert "s3" not in str(caught.value)


def test_a_password_and_a_signature_reach_the_server_and_no_message(answers, steps, capsys):
    port, asked = answers
    given = f"http://ann:s%40cret@127.0.0.1:{port}/moved/a b/?sig=a%2Bb"
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        installer.install_horovod(BuildOptions(wheels=require_source(given)))
    right = "Basic " + base64.b64encode(b"ann:s@cret").decode()
    assert asked == [("/moved/a%20b/wheels.json?sig=a%2Bb", right), ("/there/wheels.json", right)]
    shown = capsys.readouterr().out
    assert f"no wheel in http://127.0.0.1:{port}/moved/a b/?... fits" in shown
    assert "cret" not in shown
    asked.clear()
    read(f"http://ann:s%40cret@127.0.0.1:{port}/other", "wheels.json")
    assert asked == [("/other/wheels.json", right), ("/there/wheels.json", None)]


@pytest.mark.parametrize(
    ("option", "place", "complaint"),
    [
        ("--wheels", "http://wheels.example.com", "URL, got 'http://wheels.example.com': without"),
        ("--wheels", "ftp://me:s3cret@127.0.0.1/wheels", "URL, got 'ftp://127.0.0.1/wheels'"),
        ("--wheels", "file:///wheels", "URL, got 'file:///wheels': without https"),
        ("--wheels", "https://me:s3cret@example:x/y", "this URL has no valid host"),
        ("--wheels", "", "must be a folder or an https:// URL, got ''"),
        ("--wheel-dir", "https://example.com", "must be a folder of this machine, got 'https"),
    ],
)
def test_other_places_are_refused(option, place, complaint, capsys):
    with pytest.raises(SystemExit):
        cli.main(["install-horovod", option, place])
    printed = capsys.readouterr().err
    assert complaint in printed
    assert "s3cret" not in printed
