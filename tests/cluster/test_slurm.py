"""Scripts of ``hvkit manifest slurm`` run in a real Slurm, on two hosts."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import slurm_cluster
from monitored import Monitored
from rig import Rig
from slurm_cluster import Slurm, slurm_on

CHECKOUT = Path(__file__).parents[2]
# Until a job has ended that was cancelled, or until its ranks have started.
SECONDS = 120

WHO = "import os, socket; print(socket.gethostname(), os.environ['OMPI_COMM_WORLD_RANK'], 'of 4')"


@pytest.fixture(scope="session", autouse=True)
def _slurm_is_there() -> None:
    lacks = "; ".join(slurm_cluster.missing())
    if lacks and os.environ.get("HVKIT_REQUIRE_CLUSTER") == "1":
        pytest.fail(f"no Slurm on this machine: {lacks}")
    if lacks:
        pytest.skip(f"no Slurm on this machine: {lacks}")


@pytest.fixture
def hosts(rig: Callable[[list[str]], Rig]) -> Rig:
    return rig(["node1", "node2"])


@pytest.fixture
def slurm(hosts: Rig, tmp_path: Path) -> Iterator[Slurm]:
    with slurm_on(hosts, tmp_path) as running:
        yield running


def script(*arguments: str) -> str:
    """What ``hvkit manifest slurm`` writes."""
    hvkit = [sys.executable, "-m", "hvkit", "manifest", "slurm"]
    return subprocess.run(
        [*hvkit, *arguments], check=True, capture_output=True, text=True, timeout=60
    ).stdout


@pytest.mark.every_combination
def test_ranks_start_on_all_hosts_of_the_allocation(slurm: Slurm, tmp_path: Path) -> None:
    asked = ["--cpus", "1", "--memory", "500M", "--time", "00:05:00", "--partition", "main"]
    job = slurm.run(
        script("-np", "4", "--slots", "2", *asked, "python", "-c", WHO), timeout=180, cwd=tmp_path
    )
    assert sorted(job.output.splitlines()) == [
        "node1 0 of 4",
        "node1 1 of 4",
        "node2 2 of 4",
        "node2 3 of 4",
    ]
    assert job.status == 0


@pytest.mark.every_combination
def test_variables_and_options_arrive(slurm: Slurm, tmp_path: Path) -> None:
    value = "good 'day' $HOME"
    command = ["python", "-c", "import os; print(os.environ['GREETING'])"]
    asked = ["--env", f"GREETING={value}", "--log-dir", "my logs", "--prefix"]
    asked += ["--sbatch=--nice=7", "--sbatch", "--comment mine"]
    job = slurm.run(script("-np", "2", "--slots", "1", *asked, *command), 180, cwd=tmp_path)
    assert job.status == 0, job.output
    assert sorted(job.output.splitlines()) == [f"[0 node1] {value}", f"[1 node2] {value}"]
    logs = sorted((tmp_path / "my logs").iterdir())
    assert [log.read_text() for log in logs] == [f"[{r} node{r + 1}] {value}\n" for r in (0, 1)]
    told = slurm.first.run(["scontrol", "--oneliner", "show", "job"]).stdout
    assert "Comment=mine" in told
    assert "Nice=7 " in told


def test_ranks_start_where_slurm_alone_leads_to_the_hosts(
    slurm: Slurm, hosts: Rig, tmp_path: Path
) -> None:
    # Nobody logs in anywhere any more, as where sites forbid it.
    for host in hosts.hosts:
        host.run(["rm", "/etc/ssh/authorized_keys"]).check_returncode()
    job = slurm.run(
        script("-np", "4", "--slots", "2", "python", "-c", WHO), timeout=180, cwd=tmp_path
    )
    assert job.status == 0, job.output
    assert len(job.output.splitlines()) == 4


@pytest.mark.every_combination
def test_hosts_are_checked_where_slurm_alone_leads_to_them(
    slurm: Slurm, hosts: Rig, tmp_path: Path
) -> None:
    for host in hosts.hosts:
        host.run(["rm", "/etc/ssh/authorized_keys"]).check_returncode()
    check = [sys.executable, "-m", "hvkit", "hosts", "--check"]
    lines = ["#!/bin/sh", "#SBATCH --nodes=2 --ntasks-per-node=1", f"exec {shlex.join(check)}"]
    job = slurm.run("\n".join(lines), timeout=300, cwd=tmp_path)
    rows = {words[0]: words for words in map(str.split, job.output.splitlines()) if words}
    for host in hosts.hosts:
        assert rows[host.name][-3:-1] == ["eth0", host.address], job.output
    assert "log in" not in job.output


@pytest.mark.every_combination
def test_a_recipe_trains_in_the_allocation(slurm: Slurm, tmp_path: Path) -> None:
    flags = ["--dataset", "digits", "--epochs", "3", "--output-dir", str(tmp_path / "run")]
    recipe = ["python", "recipes/mnist_torch.py", *flags]
    job = slurm.run(script("-np", "2", "--slots", "1", *recipe), timeout=300, cwd=CHECKOUT)
    assert job.status == 0, job.output
    monitored = Monitored.read(tmp_path / "run")
    assert monitored.ranks == 2
    assert monitored.tests[-1]["test_accuracy"] > 0.7


def test_slurm_learns_that_a_rank_failed(slurm: Slurm, tmp_path: Path) -> None:
    failing = "import os, sys; sys.exit(os.environ['OMPI_COMM_WORLD_RANK'] == '1' and 7)"
    job = slurm.run(
        script("-np", "2", "--slots", "1", "python", "-c", failing), timeout=180, cwd=tmp_path
    )
    assert job.status != 0
    assert "hvkit run: rank 1 on node2 ended with exit status 7" in job.output


def test_a_cancelled_job_leaves_no_process_behind(slurm: Slurm, hosts: Rig, tmp_path: Path) -> None:
    sleeping = "import time; print('started', flush=True); time.sleep(1000)"
    before = {host.name: {process.pid for process in host.processes()} for host in hosts.hosts}
    number = slurm.submit(
        script("-np", "2", "--slots", "1", "python", "-c", sleeping), cwd=tmp_path
    )
    wait_until(lambda: slurm.output().count("started") == 2)
    slurm.first.run(["scancel", number]).check_returncode()
    wait_until(
        lambda: all(
            {process.pid for process in host.processes()} == before[host.name]
            for host in hosts.hosts
        )
    )


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.2)
