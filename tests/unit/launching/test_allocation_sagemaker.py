"""A host of a SageMaker job that waits for the first one, with a stand-in for ssh."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

import hvkit
from hvkit.errors import LaunchError
from hvkit.launching import allocation
from hvkit.launching.allocation import are_of_a_job, follow, starts_ranks, wait_for_hosts
from hvkit.launching.hosts import Host

HOSTS = (Host("algo-1"), Host("algo-2"))
# Lets log in once there is a file `up`; a session lasts until the file is gone. Counts the tries.
SSH = """#!/bin/sh
cd "$(dirname "$0")"
echo try >> tries
if [ ! -e up ]; then
  echo "ssh: connect to host algo-1 port 22: Connection refused" >&2
  exit 255
fi
for word; do last=$word; done
[ "$last" = true ] && exit 0
echo 'Welcome to algo-1!'
echo hvkit is logged in
echo in >> logins
while [ -e up ]; do sleep 0.02; done
exit 255
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The folder of the stand-in; times are short."""
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(allocation, "_STARTED", 0.3)
    monkeypatch.setattr(allocation, "_ENDED", 0.3)
    monkeypatch.setattr(allocation, "_BETWEEN_TRIES", 0.05)
    return tmp_path


@pytest.fixture(autouse=True)
def _variables(monkeypatch):
    monkeypatch.setenv("SM_HOSTS", '["algo-1", "algo-2"]')
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-2")


def test_the_first_host_starts_the_ranks_and_one_that_gets_none_does_not(monkeypatch):
    assert not starts_ranks(HOSTS)
    assert not starts_ranks(HOSTS[:1])
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-1")
    assert starts_ranks(HOSTS)


def test_without_the_toolkit_sagemakers_file_names_this_host(monkeypatch, tmp_path):
    monkeypatch.delenv("SM_CURRENT_HOST")
    monkeypatch.delenv("SM_HOSTS")
    file = tmp_path / "resourceconfig.json"
    monkeypatch.setattr("hvkit.launching.allocation._SAGEMAKER_RESOURCES", file)
    file.write_text('{"current_host": "algo-2", "hosts": ["algo-1", "algo-2"]}')
    assert not starts_ranks(HOSTS)


@pytest.mark.parametrize(
    ("hosts", "belong"), [(HOSTS, True), (HOSTS[1:], True), ([Host("localhost")], False)]
)
def test_hosts_of_the_job_may_be_named_by_hand(hosts, belong, monkeypatch):
    assert are_of_a_job(hosts) is belong
    monkeypatch.setenv("SM_HOSTS", "algo-1")
    assert not are_of_a_job(hosts)
    monkeypatch.delenv("SM_HOSTS")
    assert not are_of_a_job(hosts)


def test_a_host_that_is_none_of_the_jobs_is_an_error(monkeypatch):
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-3")
    message = "SM_CURRENT_HOST must be one of the job's hosts (algo-1, algo-2), got 'algo-3'"
    with pytest.raises(LaunchError, match=f"^{re.escape(message)}"):
        starts_ranks(HOSTS)


@contextmanager
def running(line):
    """A process that runs this line of Python with short times; killed at the end."""
    code = (
        "from hvkit.launching import allocation\nfrom hvkit.launching.hosts import Host\n"
        f"allocation._ENDED, allocation._BETWEEN_TRIES = 0.3, 0.05\n{line}"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for_lines(file, number):
    deadline = time.monotonic() + 60
    while not file.exists() or file.read_text().count("\n") < number:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_others_stay_until_it_has_ended_whatever_signals_they_get(job):
    with running('allocation.follow(Host("algo-1"))') as process:
        wait_for_lines(job / "tries", 2)  # it is later than this host
        (job / "up").touch()
        wait_for_lines(job / "logins", 1)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        assert process.poll() is None
        (job / "up").unlink()
        assert process.wait(60) == 0
    assert (job / "logins").read_text() == "in\n"


def test_the_first_host_waits_for_logins(job):
    with running('allocation.wait_for_hosts([Host("algo-2")])') as process:
        wait_for_lines(job / "tries", 2)
        assert process.poll() is None
        (job / "up").touch()
        assert process.wait(60) == 0


def test_it_does_not_wait_for_ever(job):
    wait_for_hosts(HOSTS[1:])


@pytest.fixture
def _signals():
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_signals")
def test_a_first_host_that_never_comes_is_an_error(job):
    message = "algo-1, which starts the ranks, cannot be reached: it is up but nothing listens"
    with pytest.raises(LaunchError, match=message):
        follow(HOSTS[0])


def test_a_script_that_launches_on_another_host_waits_for_the_first_and_ends_well(monkeypatch):
    followed = []
    monkeypatch.setenv("SM_NUM_GPUS", "1")
    monkeypatch.setattr(allocation, "follow", followed.append)
    with pytest.raises(SystemExit) as ended:
        hvkit.launch(print)
    assert ended.value.code == 0
    assert [host.name for host in followed] == ["algo-1"]
