"""What ranks print, in streams of the process that has started them."""

import io
import subprocess
import sys

from hvkit.functions.streams import follow

PRINTS = "import sys; sys.stdout.buffer.write('é✓'.encode()); sys.stderr.write('lost')"


def test_output_ends_no_run_where_it_cannot_be_shown(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="latin-1"))
    monkeypatch.setattr(sys, "stderr", None)  # as in a process that starts with `2>&-`
    process = subprocess.Popen(
        [sys.executable, "-c", PRINTS], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    follow(process)
    assert process.returncode == 0
    assert shown.getvalue() == "é?".encode("latin-1")
