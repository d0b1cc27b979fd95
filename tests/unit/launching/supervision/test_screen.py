"""What several write to one terminal stays apart, and what has failed has colour there."""

import os
import subprocess
import sys

import pytest

from hvkit.launching.supervision.screen import Screen

BEGIN = """
from hvkit.launching.supervision.protocol import Frame
from hvkit.launching.supervision.screen import Screen
screen = Screen()
"""
BARS = """
screen.show(Frame.STDERR, b"\\r 50%", 0)
screen.show(Frame.STDERR, b"\\r 60%", 0)
screen.show(Frame.STDOUT, b"epoch 1\\n", 1)
screen.show(Frame.STDERR, b"\\r 70%", 0)
screen.show(Frame.STDERR, b"\\r 7%", 1)
screen.say("hvkit run: ended by SIGINT")
"""


def in_terminal(code, **environ):
    """What a terminal gets from code whose output and errors go there."""
    clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    ours, theirs = os.openpty()
    words = [sys.executable, "-c", BEGIN + code]
    given = clean | {"TERM": "xterm"} | environ
    subprocess.run(words, stdout=theirs, stderr=theirs, check=True, timeout=60, env=given)
    os.close(theirs)
    with os.fdopen(ours, "rb") as terminal:
        return os.read(terminal.fileno(), 10_000).decode().replace("\r\n", "\n")


def in_pipes(code):
    """What two pipes get from code."""
    words = [sys.executable, "-c", BEGIN + code]
    done = subprocess.run(words, capture_output=True, check=True, timeout=60)
    return done.stdout, done.stderr


def test_a_line_of_another_does_not_stand_behind_a_progress_bar():
    assert in_terminal(BARS) == "\r 50%\r 60%\nepoch 1\n\r 70%\r 7%\nhvkit run: ended by SIGINT\n"
    bars = b"\r 50%\r 60%\r 70%\r 7%\nhvkit run: ended by SIGINT\n"
    assert in_pipes(BARS) == (b"epoch 1\n", bars)


def test_a_pipe_gets_other_output_byte_for_byte():
    shows = "for each in (0, 1, 0, 'launcher'): screen.show(Frame.STDOUT, bytes(4), each)\n"
    assert in_pipes(f"{shows}screen.say('hvkit run: ended')") == (bytes(16), b"hvkit run: ended\n")


@pytest.mark.parametrize(
    ("environ", "coloured"),
    [
        ({}, True),
        ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True),
    ],
)
def test_failures_have_colour_on_a_terminal_that_takes_it(environ, coloured):
    first = "\x1b[1;31mrank 1 failed\x1b[0m" if coloured else "rank 1 failed"
    code = r"screen.say('rank 1 failed\n    x', failed=True)"
    assert in_terminal(code, **environ) == f"{first}\n    x\n"


def test_a_file_gets_no_colour_unless_forced(capfd, monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    Screen().say("failed", failed=True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    Screen().say("failed", failed=True)
    assert capfd.readouterr().err == "failed\n\x1b[1;31mfailed\x1b[0m\n"
