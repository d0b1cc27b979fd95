"""hvkit's threads: one that fails ends its process, and the others hear why."""

import re
from pathlib import Path

import pytest
from scripts import run_script

import hvkit

STARTS = {
    "at once": "threads.start('hvkit-test', int, 'boom')",
    "later": "threads.later(0.01, 'hvkit-test', int, 'boom')",
}


@pytest.mark.parametrize("how", STARTS)
def test_a_thread_that_fails_ends_its_process_although_the_script_waits(how):
    code = f"""
import time
from hvkit import threads
threads.before_end.append(lambda how: print(how, flush=True))
{STARTS[how]}
time.sleep(60)
"""
    done = run_script(code)
    assert done.returncode == 1
    reason = "failed in its thread hvkit-test with ValueError: invalid literal for int()"
    assert done.stdout.startswith(reason)
    assert done.stderr.startswith("Traceback")
    assert f"hvkit: this process {reason}" in done.stderr
    assert done.stderr.strip().endswith(": it ends, and the run with it")


# These hand the error to the script, which raises it.
RAISED_ELSEWHERE = {"checkpoint/saving.py", "doctor/facts.py", "launching/ssh.py", "threads.py"}


def test_every_thread_of_a_run_is_started_so():
    package = Path(hvkit.__file__).parent
    starts = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"(threading\.|[^\w.])(Thread|ThreadPoolExecutor|Timer)\(", path.read_text())
    }
    assert starts == RAISED_ELSEWHERE
