"""The process that supervises ranks, the ranks' command, and where their output is shown."""

import io
import os
import signal
import subprocess
import sys

from hvkit.functions.supervised import begin, follow
from hvkit.launching.prepare import Request


def test_an_early_ctrl_c_ends_the_process_without_a_traceback(tmp_path):
    process = begin(Request(("true",), np=1), tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == 128 + signal.SIGINT
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_ranks_get_the_options_of_this_python():
    code = "from hvkit.functions.rank import command_of_rank; print(*command_of_rank(len))"
    command = [sys.executable, "-O", "-W", "ignore", "-X", "dev", "-c", code]
    environ = {**os.environ, "PYTHONWARNINGS": ""}
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    words = printed.stdout.split()
    assert {"-O", "-Wignore"} <= set(words)
    assert words[words.index("-X") + 1] == "dev"
    assert words[-3:] == ["-m", "hvkit.functions.rank", "len"]


def test_output_ends_no_run_where_it_cannot_be_shown(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="latin-1"))
    monkeypatch.setattr(sys, "stderr", None)  # as in a process that starts with `2>&-`
    code = "import sys; sys.stdout.buffer.write('é✓'.encode()); sys.stderr.write('lost')"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1)
    follow(process)
    assert process.returncode == 0
    assert shown.getvalue() == "é?".encode("latin-1")
