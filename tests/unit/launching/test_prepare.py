"""``hvkit run`` makes a command line and an environment from a request, or rejects it."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest

from hvkit.errors import LaunchError
from hvkit.host.network import Interface
from hvkit.launching import launchers, preflight, prepare
from hvkit.launching.hosts import Host
from hvkit.launching.launchers import Launcher
from hvkit.launching.prepare import Request, prepared, shown
from hvkit.launching.supervision.rank_output import Style

NODES = (Host("node1", slots=2), Host("node2", slots=2))
NETWORKS = "--prtemca prte_if_include 10.0.0.0/24 --mca btl_tcp_if_include 10.0.0.0/24"


def request(**changes):
    return Request(**{"command": ("python", "x.py"), "hosts": NODES, "np": 3, **changes})


def line_of(**changes):
    return shlex.join(prepared(request(**changes)).command)


def test_ranks_on_two_hosts_use_the_network_between_them_and_never_docker(hosts):
    run = prepared(request())
    line = shlex.join(run.command)
    assert "--host node1:2,node2:1" in line
    assert NETWORKS in line
    assert line.endswith("python x.py")
    assert run.environ["NCCL_SOCKET_IFNAME"] == "=eth0"
    assert (run.agents.addresses, run.agents.lost_after) == (("10.0.0.1",), 30.0)


def test_on_this_host_alone_no_host_is_given_up_and_no_network_is_named(hosts):
    run = prepared(request(np=2, style=Style(ranks=(range(2),))))
    assert (run.agents.addresses, run.agents.lost_after) == (("127.0.0.1",), None)
    assert "if_include" not in shlex.join(run.command)


@pytest.mark.parametrize("name", ["ib0", "192.168.0.0/16"])
def test_interfaces_that_the_user_names_win(hosts, monkeypatch, name):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib9")
    monkeypatch.setenv("OMPI_MCA_btl_tcp_if_exclude", "ib0")
    for number in (1, 2):
        fabric = Interface("ib0", f"192.168.3.{number}", "192.168.3.0/24")
        hosts.change(number, interfaces=(*hosts.facts(number).interfaces, fabric))
    run = prepared(request(interfaces=(name,), variables={"PRTE_MCA_prte_if_exclude": "ib0"}))
    line = shlex.join(run.command)
    assert NETWORKS.replace("10.0.0.0", "192.168.3.0") in line
    assert "exclude" not in line
    assert not [name for name in run.environ if name.endswith("exclude")]
    assert run.environ["NCCL_SOCKET_IFNAME"] == "ib9"


def test_a_host_that_starts_ranks_in_another_network_is_reached_by_the_daemons(hosts, monkeypatch):
    here = Interface("eth0", "10.0.7.1", "10.0.7.0/24")
    monkeypatch.setattr(preflight, "interfaces", lambda: (hosts.docker, here))
    monkeypatch.setattr(preflight, "source_address", lambda name: here.address)
    monkeypatch.setattr(preflight, "is_local", lambda name: False)
    assert NETWORKS.replace("10.0.0.0/24", "10.0.0.0/21", 1) in line_of()


def test_a_host_without_slots_has_one_for_each_cpu_and_more_ranks_take_turns(
    hosts, capsys, monkeypatch
):
    monkeypatch.delenv("OMPI_MCA_mpi_yield_when_idle", raising=False)
    line = line_of(hosts=(Host("node1"), Host("node2", slots=1)), np=None)
    assert "--host node1:2,node2:1" in line
    assert "mpi_yield_when_idle" not in line
    assert "mpi_yield_when_idle" in line_of(hosts=(Host("node1", 4), Host("node2", 1)), np=5)
    said = "hvkit: more ranks than cores, so they take turns: 4 ranks on 2 cores of node1\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("sends_all", "system"), [(False, None), (True, None), (False, "Slurm")], ids=str
)
def test_secrets_stay_here_and_variables_that_the_user_names_are_sent(
    hosts, monkeypatch, sends_all, system
):
    """By Open MPI with -x; MPICH sends its whole environment, and so does Slurm's srun."""
    for name in ("MY_TOKEN", "MY_FLAG", "HOROVOD_RANK", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "7")
    if sends_all:
        found = Launcher("MPICH 5.0.2", "mpirun", launchers.mpich_arguments, sends_all=True)
        monkeypatch.setattr(prepare, "find_launcher", lambda name: found)
    run = prepared(request(system=system, variables={"MY_FLAG": None, "OTHER": "8"}))
    words = list(run.command)
    sent = {words[i + 1] for i, word in enumerate(words) if word == "-x"}
    assert sends_all == ("-iface" in words) == (sent == set())
    whole = {*run.environ} if sends_all or system else sent
    assert {"MY_FLAG", "OTHER", "PATH", "NCCL_SOCKET_IFNAME"} <= whole
    assert not {"MY_TOKEN", "HOROVOD_RANK"} & whole
    assert run.environ["OTHER"] == "8"
    assert ("SLURM_JOB_ID" in run.environ) == (not sends_all)


def test_hyperparameters_that_stay_here_are_named(hosts, monkeypatch, caplog):
    monkeypatch.setenv("SM_HP_MAX_TOKENS", "512")
    monkeypatch.setenv("SM_HP_LR", "0.1")
    prepared(request())
    assert "-x SM_HP_MAX_TOKENS sends it" in caplog.text
    assert "SM_HP_LR" not in caplog.text
    caplog.clear()
    prepared(request(variables={"SM_HP_MAX_TOKENS": None}))
    assert "SM_HP_MAX_TOKENS" not in caplog.text


def test_in_a_shell_of_srun_the_step_of_mpirun_shares_its_cores(hosts, monkeypatch):
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)
    assert "SLURM_OVERLAP" not in prepared(request(system="Slurm")).environ
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert prepared(request(system="Slurm")).environ["SLURM_OVERLAP"] == "1"


@pytest.mark.parametrize("system", [None, "Slurm"])
def test_a_list_of_gpus_applies_to_this_host_only(hosts, monkeypatch, system):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    run = prepared(request(system=system))
    assert run.agents.variables == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert "CUDA_VISIBLE_DEVICES" not in run.command
    run = prepared(request(system=system, variables={"CUDA_VISIBLE_DEVICES": None}))
    assert run.agents.variables == {}
    assert "CUDA_VISIBLE_DEVICES" in run.command


@pytest.mark.parametrize(
    ("changes", "greetings"),
    [
        ({}, False),
        ({"verbose": True}, True),
        ({"variables": {"TF_CPP_MIN_LOG_LEVEL": "0"}}, True),
        ({"variables": {"TF_CPP_MIN_LOG_LEVEL": "2"}}, False),
        ({"variables": {"TF_CPP_VMODULE": "gpu_device=1"}}, True),
    ],
)
def test_greetings_of_libraries_are_shown_to_who_wants_them(hosts, monkeypatch, changes, greetings):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    assert prepared(request(**changes)).style.greetings is greetings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"style": Style(ranks=(range(1), range(2, 4)))}, r"--show 3: there is no .* from 0 to 2"),
        (
            {"interfaces": ("eth0", "eht0")},
            r"--interfaces eht0: no host has it; use one of docker0 .*, eth0 \(10\.0\.0\.0/24\)$",
        ),
        ({"interfaces": ("eht0",), "np": 2}, "--interfaces eht0: no host has it"),
        (
            {"hosts": (Host("node1", slots=4, user="ann"),), "launcher": "gloo"},
            "ann@node1: horovodrun accepts no users: set User ann",
        ),
        ({"variables": {"MINE": None}}, "-x MINE: it is not set here: write -x MINE=VALUE"),
    ],
)
def test_requests_that_cannot_be_met_are_refused_with_the_fix(hosts, monkeypatch, changes, message):
    monkeypatch.delenv("MINE", raising=False)
    with pytest.raises(LaunchError, match=message):
        prepared(request(**changes))


def test_words_that_launchers_read_reach_the_script_as_they_are():
    words = ["a", ":", "-np", "1", "echo", "--map-by", "core", "--mca", "+", "", "$HOME"]
    show = [sys.executable, "-c", "import sys; print(sys.argv[1:])", *words]
    run = prepared(Request(tuple(show), np=1), supervised=False)
    done = subprocess.run(shown(run), shell=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.endswith(f"{words}\n"), done.stderr


def test_a_dry_run_shows_the_variables_that_hvkit_adds_and_no_others(hosts, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    for name in ("NCCL_SOCKET_IFNAME", "PRTE_MCA_pmix_tool_support"):
        monkeypatch.delenv(name, raising=False)
    # An option of the user's own command is none of the launcher's.
    given = request(command=("env", "-x", "HVKIT_RUN"), variables={"A": "b c"})
    line, _, command = shown(prepared(given, supervised=False)).rpartition(" env ")
    assert command == "+-x HVKIT_RUN"
    added = "NCCL_SOCKET_IFNAME==eth0 PRTE_MCA_pmix_tool_support=0 A='b c'"
    assert line.startswith(f"{added} mpirun -np 3 ")
    assert "HVKIT_RUN" not in line
    assert " -x NCCL_DEBUG " in line


def test_the_line_of_a_dry_run_makes_the_environment_of_the_run(hosts, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "t")
    monkeypatch.setenv("HVKIT_RUN", "that of another run")
    run = prepared(request(system="Slurm"))
    dump = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
    line = shown(replace(run, command=[*dump, *run.command]))
    printed = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout
    seen, expected = json.loads(printed), run.environ
    assert not {"HVKIT_RUN", "MY_TOKEN"} & seen.keys()
    assert {name: seen[name] for name in expected} == expected
    own = {"PWD", "OLDPWD", "SHLVL", "_", "LC_CTYPE"}
    assert not (os.environ.keys() & seen.keys()) - expected.keys() - own
    # Python has set this itself.
    monkeypatch.setattr("psutil.Process.environ", lambda process: {})
    monkeypatch.setenv("LC_CTYPE", "C.UTF-8")
    assert "LC_CTYPE=C.UTF-8 " in shown(prepared(request())).split("mpirun")[0]
