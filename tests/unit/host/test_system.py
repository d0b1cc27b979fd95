"""Commands that fail, hang or are missing; a lock that one process holds until it ends."""

import uuid

import pytest
from cases import MORE
from scripts import run_script

from hvkit.host.rank_variables import rank_id
from hvkit.host.system import Output, claim, run


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["sh", "-c", "echo out; echo err >&2; exit 3"], Output(3, "out\n", "err\n")),
        (["sleep", "60"], Output(None)),
        (["/not-there"], None),
    ],
)
def test_commands_that_fail_hang_or_are_missing(words, output):
    assert run(words, timeout=0.5) == output


# The second process calls hvkit while the first still trains, which a test may end.
TWO = """
import time, torch, torch.multiprocessing, hvkit

context = torch.multiprocessing.get_context("fork")
first, second = context.Event(), context.Event()


def train(index, ends):
    if index:
        first.wait()
    model = torch.nn.Linear(2, 1)
    hvkit.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    (second if index else first).set()
    print("trains", index, flush=True)
    second.wait()

"""
SPAWNED = TWO + (
    "torch.multiprocessing.start_processes(train, (True,), nprocs=2, start_method='fork')"
)
SEPARATE = (
    TWO
    + """
both = [context.Process(target=train, args=(index, False)) for index in range(2)]
for each in both:
    each.start()
for each in both:
    each.join()
raise SystemExit(any(each.exitcode for each in both))
"""
)


def test_processes_that_pytorch_spawns_do_not_train_apart():
    done = run_script(SPAWNED)
    assert done.returncode == 1
    assert done.stdout == "trains 0\n"
    assert "Process 1 terminated with the following error" in done.stderr
    said = "LaunchError: processes that the script has started train separately"
    assert said in done.stderr
    assert "start the script with `hvkit run -np N script.py`" in done.stderr


@MORE
def test_other_processes_may_train_apart_and_one_says_so():
    done = run_script(SEPARATE)
    assert (done.returncode, done.stdout) == (0, "trains 0\ntrains 1\n")
    assert done.stderr.count("processes that the script has started train separately") == 1


def test_of_the_processes_of_a_rank_one_is_the_rank():
    rank = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
    launch = rank | {"PMIX_NAMESPACE": str(uuid.uuid4())}
    assert claim(f"rank {rank_id(launch)}")
    done = run_script("import hvkit\nhvkit.rank()", **launch)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "LaunchError: the script starts several processes that call hvkit" in last
    other = launch | {"OMPI_COMM_WORLD_RANK": "0"}
    assert rank_id(other) != rank_id(launch)


# A fork lives on, as a worker would.
CLAIMS = """
import os, sys, time
from hvkit.host.system import claim
assert claim(sys.argv[1]) and claim(sys.argv[1])
read, write = os.pipe()
if not os.fork():
    os.closerange(1, 3)
    os.write(write, b'forked')
    time.sleep(5)
    os._exit(0)
os.read(read, 9)
"""


@pytest.mark.parametrize("ends", ["", "os.kill(os.getpid(), 9)"], ids=["by itself", "killed"])
def test_a_claim_is_free_as_soon_as_its_process_has_ended(ends):
    name = str(uuid.uuid4())
    run_script(CLAIMS + ends, name)
    assert claim(name)
