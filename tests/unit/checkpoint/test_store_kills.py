"""A run that is killed at any moment of a save loses no complete checkpoint.

Each script runs in a process of its own, which forks the runs that it kills.
"""

import json

import pytest
from cases import cases
from scripts import run_script

# Kills before every single operation on files, one run after the other. Every run starts with the
# complete checkpoint of the last one that was not killed, and what the killed one left behind.
EVERY_OPERATION = """
import json, os, signal, sys
import filelock  # here, so that its import is not among the operations of a save
from hvkit.checkpoint import Checkpoint

class Thing:
    def __init__(self, value=None):
        self.value = value
    def state_dict(self):
        return {"value": self.value, "much": [self.value] * 2000}
    def load_state_dict(self, state):
        self.value = state["value"]
        assert state["much"] == [self.value] * 2000

directory, replace = sys.argv[1], sys.argv[2] == "replace"

def save(step, value):
    Checkpoint(directory, keep=1, thing=Thing(value)).save(epoch=0, step=step)

def restore():
    thing = Thing()
    return Checkpoint(directory, thing=thing).restore().step, thing.value

def forked(run, *arguments):
    child = os.fork()
    if child == 0:
        run(*arguments)
        os._exit(0)
    return os.waitpid(child, 0)[1]

def killed_at(number, step, value):
    left = [number]
    def count(*_):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    fsync = os.fsync
    def counted_fsync(handle):
        count()
        fsync(handle)
    os.fsync = counted_fsync
    inside = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "open", "os.listdir")
    sys.addaudithook(
        lambda event, arguments: count()
        if event in inside and (event != "open" or directory in str(arguments[0])) else None
    )
    save(step, value)

outcomes, number = [], 0
while True:
    step = 1 if replace else 2 * number + 1
    before = (step, 2 * number)
    forked(save, *before)
    clean = sorted(os.listdir(directory))
    assert clean == [".lock", f"step-{step:09d}"], clean
    assert restore() == before
    after = (step if replace else step + 1, 2 * number + 1)
    status = forked(killed_at, number, *after)
    found = restore()
    assert found in (before, after), (number, found, before, after)
    if os.WIFEXITED(status):
        assert found == after
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
    outcomes.append(found == after)
    number += 1
print(json.dumps(outcomes))
"""


@pytest.mark.parametrize("kind", cases(["new", "replace"]))
def test_killed_before_any_operation_on_files_the_run_resumes_with_the_old_or_the_new(
    kind, tmp_path
):
    done = run_script(EVERY_OPERATION, tmp_path, kind)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert len(outcomes) > 20
    assert not outcomes[0]
    assert outcomes[-1]
    assert outcomes == sorted(outcomes), "once the new one is in place, it stays"
