"""``hvkit run`` makes a command line and an environment from a request, or rejects it."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest

import hvkit
from hvkit.errors import CannotRunError, LaunchError
from hvkit.host.network import Interface
from hvkit.launching import launchers, prepare, start
from hvkit.launching.host_checks import preflight
from hvkit.launching.host_checks.probe import Facts
from hvkit.launching.hosts import Host
from hvkit.launching.launchers import Launcher
from hvkit.launching.prepare import Request, prepared, shown
from hvkit.launching.rank_command import NOT_FOUND, CommandProblem
from hvkit.launching.ssh import Answer
from hvkit.launching.supervision.rank_output import Style
from hvkit.launching.supervision.supervised_run import Outcome

NODES = (Host("node1", slots=2), Host("node2", slots=2))
DOCKER = Interface("docker0", "172.17.0.1", "172.17.0.0/16")


def facts(number, **changes):
    own = Interface("eth0", f"10.0.0.{number}", "10.0.0.0/24")
    known = {
        "version": hvkit.__version__,
        "hostname": f"node{number}",
        "cpus": 2,
        "interfaces": (DOCKER, own),
        "has_folder": True,
    }
    return Facts(**{**known, **changes})


@pytest.fixture
def hosts(monkeypatch, tmp_path):
    """The facts of node1, this host, and of node2; tests may change them."""
    answers = {"node1": facts(1), "node2": facts(2)}

    def run_on_hosts(others, command, timeout, shell):
        return [_answer(host, answers[host.name]) for host in others]

    monkeypatch.setattr(preflight, "run_on_hosts", run_on_hosts)
    monkeypatch.setattr(Facts, "here", lambda *_: answers["node1"])
    monkeypatch.setattr(preflight, "is_local", lambda name: name == "node1")
    monkeypatch.setattr(preflight, "addresses_of", lambda name: [f"10.0.0.{name[-1]}"])
    monkeypatch.setattr(preflight, "source_address", lambda name: "10.0.0.1")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(preflight, "interfaces", lambda: answers["node1"].interfaces)
    monkeypatch.setenv("HOME", str(tmp_path))
    mpirun = str(tmp_path / "mpi" / "bin" / "mpirun")
    found = Launcher("Open MPI 5.0.11", "mpirun", launchers.openmpi_arguments(5, mpirun))
    monkeypatch.setattr(prepare, "find_launcher", lambda name: found)
    return answers


def _answer(host, answer):
    if isinstance(answer, Facts):
        return Answer(host, 0, f"Welcome!\n{answer.printed()}\nBye\n", "", None)
    return Answer(host, *answer)


def request(**changes):
    return Request(**{"command": ("python", "x.py"), "hosts": NODES, "size": 3, **changes})


def test_ranks_on_two_hosts_use_the_network_between_them_and_never_docker(hosts):
    run = prepared(request())
    line = shlex.join(run.command)
    assert "--host node1:2,node2:1" in line
    assert "--prtemca prte_if_include 10.0.0.0/24 --mca btl_tcp_if_include 10.0.0.0/24" in line
    assert run.environ["NCCL_SOCKET_IFNAME"] == "=eth0"
    assert run.addresses == ("10.0.0.1",)
    assert run.lost_after == 30.0
    assert line.endswith("python x.py")


def test_ranks_to_show_that_do_not_exist_are_refused(hosts):
    assert prepared(request(style=Style(ranks=(range(3),)))).size == 3
    with pytest.raises(LaunchError, match=r"--show 3: there is no such rank: .* from 0 to 2"):
        prepared(request(style=Style(ranks=(range(1), range(2, 4)))))


def test_on_this_host_alone_no_host_is_given_up_and_no_network_is_named(hosts):
    run = prepared(request(size=2))
    assert run.addresses == ("127.0.0.1",)
    assert run.lost_after is None
    assert "if_include" not in shlex.join(run.command)


@pytest.mark.parametrize("name", ["ib0", "192.168.0.0/16"])
def test_interfaces_that_the_user_names_win(hosts, monkeypatch, name):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib9")
    monkeypatch.setenv("OMPI_MCA_btl_tcp_if_exclude", "ib0")
    for number in (1, 2):
        fabric = Interface("ib0", f"192.168.3.{number}", "192.168.3.0/24")
        hosts[f"node{number}"] = facts(number, interfaces=(*facts(number).interfaces, fabric))
    run = prepared(request(interfaces=(name,), variables={"PRTE_MCA_prte_if_exclude": "ib0"}))
    line = shlex.join(run.command)
    named = "--prtemca prte_if_include 192.168.3.0/24 --mca btl_tcp_if_include 192.168.3.0/24"
    assert named in line
    assert "exclude" not in line
    assert not [name for name in run.environ if name.endswith("exclude")]
    assert run.environ["NCCL_SOCKET_IFNAME"] == "ib9"


def test_interfaces_that_no_host_has_are_refused_with_a_list_of_those_it_has(hosts):
    message = r"--interfaces eht0: no host has it; use one of docker0 .*, eth0 \(10\.0\.0\.0/24\)$"
    with pytest.raises(LaunchError, match=message):
        prepared(request(interfaces=("eth0", "eht0")))
    with pytest.raises(LaunchError, match="--interfaces eht0: no host has it"):
        prepared(request(interfaces=("eht0",), size=2))


@pytest.mark.parametrize(
    ("variable", "left"),
    [
        ("OMPI_MCA_btl_tcp_if_include", "--prtemca prte_if_include 10.0.0.0/24"),
        ("OMPI_MCA_btl_tcp_if_exclude", "--prtemca prte_if_include 10.0.0.0/24"),
        ("PRTE_MCA_prte_if_exclude", "--mca btl_tcp_if_include 10.0.0.0/24"),
        ("PRTE_MCA_oob_tcp_if_include", "--mca btl_tcp_if_include 10.0.0.0/24"),
    ],
)
def test_where_the_environment_sets_open_mpis_interfaces_hvkit_does_not(
    hosts, monkeypatch, variable, left
):
    monkeypatch.setenv(variable, "eth1")
    run = prepared(request())
    words = [word for word in run.command if "if_include" in word and word != variable]
    assert words == [left.split()[1]]
    assert left in shlex.join(run.command)
    assert run.environ[variable] == "eth1"


def test_a_host_that_starts_ranks_in_another_network_is_reached_by_the_daemons(hosts, monkeypatch):
    here = Interface("eth0", "10.0.7.1", "10.0.7.0/24")
    monkeypatch.setattr(preflight, "interfaces", lambda: (DOCKER, here))
    monkeypatch.setattr(preflight, "source_address", lambda name: here.address)
    monkeypatch.setattr(preflight, "is_local", lambda name: False)
    line = shlex.join(prepared(request()).command)
    assert "--prtemca prte_if_include 10.0.0.0/21 --mca btl_tcp_if_include 10.0.0.0/24" in line


def test_a_host_may_greet_without_an_end_of_line(hosts):
    hosts["node2"] = (0, f"Welcome{facts(2).printed()}\nBye", "", None)
    assert prepared(request()).size == 3


def test_a_removed_working_directory_is_an_error(hosts, monkeypatch, tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(
        LaunchError, match=r"the working directory, .*, was removed .*`cd` to a folder"
    ):
        prepared(request())


def test_secrets_stay_here_and_variables_that_the_user_names_are_sent(hosts, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "t")
    monkeypatch.setenv("MY_FLAG", "f")
    run = prepared(request(variables={"MY_FLAG": None, "OTHER": "7"}))
    words = list(run.command)
    sent = {words[i + 1] for i, word in enumerate(words) if word == "-x"}
    assert {"MY_FLAG", "OTHER", "PATH", "NCCL_SOCKET_IFNAME"} <= sent
    assert "MY_TOKEN" not in sent
    assert run.environ["OTHER"] == "7"


def test_hyperparameters_that_stay_here_are_named(hosts, monkeypatch, caplog):
    monkeypatch.setenv("SM_HP_MAX_TOKENS", "512")
    monkeypatch.setenv("SM_HP_LR", "0.1")
    prepared(request())
    assert "-x SM_HP_MAX_TOKENS sends it" in caplog.text
    assert "SM_HP_LR" not in caplog.text
    caplog.clear()
    prepared(request(variables={"SM_HP_MAX_TOKENS": None}))
    assert "SM_HP_MAX_TOKENS" not in caplog.text


def test_launchers_that_send_everything_are_started_without_secrets(hosts, monkeypatch):
    found = Launcher("MPICH 5.0.2", "mpirun", launchers.mpich_arguments, sends_all=True)
    monkeypatch.setattr(prepare, "find_launcher", lambda name: found)
    monkeypatch.setenv("MY_TOKEN", "t")
    run = prepared(request())
    assert "MY_TOKEN" not in run.environ
    assert {"PATH", "HOME", "NCCL_SOCKET_IFNAME"} <= run.environ.keys()


def test_a_bare_host_has_as_many_slots_as_cpus(hosts):
    run = prepared(request(hosts=(Host("node1"), Host("node2", slots=1)), size=None))
    assert "--host node1:2,node2:1" in shlex.join(run.command)


def test_more_ranks_than_cpus_on_a_host(hosts, capsys):
    run = prepared(request(hosts=(Host("node1", slots=4), Host("node2", slots=1)), size=5))
    assert "mpi_yield_when_idle" in shlex.join(run.command)
    said = "hvkit: more ranks than cores, so they take turns: 4 ranks on 2 cores of node1\n"
    assert capsys.readouterr().err == said
    prepared(request(), least=1)
    assert capsys.readouterr().err == ""


def test_a_host_without_ranks_is_not_checked(hosts):
    hosts["node2"] = (None, "", "", "no route to it")
    assert prepared(request(size=2)).size == 2


def test_all_problems_of_all_hosts_are_in_one_error(hosts):
    hosts["node1"] = facts(1, has_folder=False)
    hosts["node2"] = (None, "", "", "no route to it: switch it on")
    with pytest.raises(LaunchError) as caught:
        prepared(request())
    lines = str(caught.value).splitlines()
    assert lines[0] == "nothing was started"
    assert "  node2: no route to it: switch it on" in lines
    assert any(line.startswith("  node1: has no folder") for line in lines)


MISSING = CommandProblem(NOT_FOUND, "cannot run x.py: there is no such file in /data")


def test_a_host_without_the_script_is_named_before_anything_starts(hosts):
    hosts["node2"] = facts(2, command=MISSING)
    with pytest.raises(CannotRunError, match=r"^cannot run x\.py: .* in /data on node2$") as caught:
        prepared(request())
    assert caught.value.exit_status == 127
    assert prepared(request(), least=1).hosts == ("node1", "node1")


def test_a_script_that_no_host_has_is_said_once(hosts):
    hosts.update(node1=facts(1, command=MISSING), node2=facts(2, command=MISSING))
    for least in (None, 1):
        with pytest.raises(CannotRunError) as caught:
            prepared(request(), least=least)
        assert str(caught.value) == MISSING.text


def test_a_missing_script_is_one_of_several_problems(hosts):
    hosts.update(node1=facts(1, command=MISSING), node2=(None, "", "", "no route to it"))
    with pytest.raises(LaunchError, match="nothing was started") as caught:
        prepared(request())
    assert caught.value.exit_status == 1
    lines = str(caught.value).splitlines()
    assert sorted(lines[1:]) == [f"  node1: {MISSING.text}", "  node2: no route to it"]


def test_a_host_that_takes_no_temporary_files_is_named(hosts):
    hosts["node2"] = facts(2, temporary="cannot write temporary files to /tmp")
    with pytest.raises(LaunchError, match="node2: cannot write temporary files to /tmp"):
        prepared(request())


def test_a_host_with_too_few_open_files_for_its_ranks_is_named_with_the_number_it_takes(hosts):
    hosts["node1"] = facts(1, open_files=31)
    expected = (
        "node1 allows a process 31 open files, but starting 2 ranks there takes 32: .*ulimit -n"
    )
    with pytest.raises(LaunchError, match=expected):
        prepared(request())
    assert prepared(request(size=1)).size == 1


def test_in_a_shell_of_srun_the_step_of_mpirun_shares_its_cores(hosts, monkeypatch):
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)
    assert "SLURM_OVERLAP" not in prepared(request(system="Slurm")).environ
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert prepared(request(system="Slurm")).environ["SLURM_OVERLAP"] == "1"


def test_a_host_with_another_environment_is_named(hosts):
    hosts["node2"] = (1, "", "Traceback\nModuleNotFoundError: No module named 'hvkit'\n", None)
    with pytest.raises(LaunchError, match=r"node2: .* cannot import this hvkit .*No module named"):
        prepared(request())


def test_another_hvkit_on_a_host_is_named(hosts):
    hosts["node2"] = facts(2, version="0.0.1")
    with pytest.raises(LaunchError, match=r"node2: it has hvkit 0\.0\.1, not "):
        prepared(request())


def test_a_host_that_prints_no_facts_is_named(hosts):
    hosts["node2"] = (0, "Welcome!\n", "", None)
    with pytest.raises(LaunchError, match="node2: it printed no facts"):
        prepared(request())


def test_hosts_that_reach_each_other_over_ipv6_alone_are_refused(hosts):
    six = [Interface("eth0", f"fd00::{n}", "fd00::/64") for n in (1, 2)]
    for number, one in enumerate(six, start=1):
        hosts[f"node{number}"] = facts(number, interfaces=(DOCKER, one))
    with pytest.raises(LaunchError, match="over fd00::/64, but Open MPI is built without IPv6"):
        prepared(request())


def test_without_a_route_to_the_hosts_they_may_try_all_addresses_of_this_one(hosts, monkeypatch):
    monkeypatch.setattr(preflight, "source_address", lambda name: None)
    own = [Interface("lo", "127.0.0.1", "127.0.0.0/8"), DOCKER, *hosts["node1"].interfaces[1:]]
    monkeypatch.setattr(preflight, "interfaces", lambda: own)
    monkeypatch.setattr(preflight, "within_host", lambda: ["docker0"])
    assert prepared(request()).addresses == ("10.0.0.1",)


def test_in_slurm_whose_srun_sends_everything_secrets_are_taken_out(hosts, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "t")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run = prepared(request(system="Slurm"))
    assert "MY_TOKEN" not in run.environ
    assert run.environ["SLURM_JOB_ID"] == "7"


def test_rank_variables_of_another_launcher_are_removed(hosts, monkeypatch):
    monkeypatch.setenv("HOROVOD_RANK", "0")
    assert "HOROVOD_RANK" not in prepared(request()).environ


def test_two_names_of_one_host_are_refused(hosts):
    hosts["node2"] = hosts["node1"]
    with pytest.raises(LaunchError, match="node1 and node2 are the same host, node1"):
        prepared(request())


def test_ipv6_addresses_are_refused_with_the_fix(hosts):
    with pytest.raises(
        LaunchError, match=r"fd00::1: .*use the host\'s name, and add it to DNS or /etc/hosts"
    ):
        prepared(request(hosts=(Host("fd00::1", slots=4),)))


def test_horovodrun_and_users_are_refused(hosts):
    with pytest.raises(LaunchError, match="ann@node1: horovodrun accepts no users: set User ann"):
        prepared(request(hosts=(Host("node1", slots=4, user="ann"),), launcher="gloo"))


def test_a_dry_run_shows_the_variables_that_hvkit_adds_and_no_others(hosts, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    for name in ("NCCL_SOCKET_IFNAME", "PRTE_MCA_pmix_tool_support"):
        monkeypatch.delenv(name, raising=False)
    line = shown(prepared(request(variables={"A": "b c"}), supervised=False))
    added = "NCCL_SOCKET_IFNAME==eth0 PRTE_MCA_pmix_tool_support=0 A='b c'"
    assert line.startswith(f"{added} mpirun -np 3 ")
    assert "HVKIT_RUN" not in line
    assert " -x NCCL_DEBUG " in line


def test_words_that_launchers_read_reach_the_script_as_they_are():
    words = ["a", ":", "-np", "1", "echo", "--map-by", "core", "--mca", "+", "", "$HOME"]
    show = [sys.executable, "-c", "import sys; print(sys.argv[1:])", *words]
    run = prepared(Request(tuple(show), size=1), supervised=False)
    done = subprocess.run(shown(run), shell=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.endswith(f"{words}\n"), done.stderr


@pytest.mark.parametrize("verbose", [True, False])
def test_a_verbose_run_lists_what_ranks_set_with_reasons(hosts, monkeypatch, capsys, verbose):
    monkeypatch.setattr(start, "supervise", lambda run: Outcome(0))
    monkeypatch.setenv("HVKIT_BLOCKING_WAITS", "0")
    monkeypatch.setenv("PRTE_MCA_pmix_tool_support", "1")  # the user's own, too
    for name in ("OMPI_MCA_mpi_yield_when_idle", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    start.start(request(verbose=verbose))
    printed = capsys.readouterr().err
    assert ("hvkit: starts NCCL_SOCKET_IFNAME==eth0 mpirun -np 3 " in printed) == verbose
    line = "hvkit: ranks set OMPI_MCA_mpi_yield_when_idle=1: a rank that waits"
    assert (line in printed) == verbose
    assert "ranks set HVKIT_BLOCKING_WAITS" not in printed  # the user's own


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


LEFT = Outcome(143, "got SIGTERM", restartable=True, preempted=True, saved=5, replicas=True)


@pytest.mark.parametrize(
    ("names", "least", "terminated", "then"),
    [
        (["node1", "node2", "node3"], None, {1}, ("node1", "node3")),
        (["node1", "node2"], None, {1}, ("node1", "node2")),  # the others do not suffice
        (["node1", "node2"], 1, {0}, ("node2",)),
        (["node1", "node2"], 1, {0, 1}, ("node1", "node2")),
    ],
)
def test_hosts_that_got_sigterm_are_left_out_of_the_restart_if_the_others_suffice(
    hosts, monkeypatch, capsys, names, least, terminated, then
):
    hosts["node3"] = facts(3)
    left = replace(LEFT, terminated=frozenset(terminated))
    assert _tries(monkeypatch, left, names, least) == [("node1", "node2"), then]
    said = "goes on without" in capsys.readouterr().err
    assert said == bool({"node1", "node2"} - set(then))


def test_without_copies_in_memory_rank_0_stays_on_its_host(hosts, monkeypatch):
    """Its disk may be the only one with the checkpoints."""
    left = replace(LEFT, terminated=frozenset({0}), replicas=False)
    assert _tries(monkeypatch, left, ["node1", "node2"], 1) == [("node1", "node2")] * 2


def _tries(monkeypatch, first, names, least):
    """By try, the hosts of the ranks, in a run of two ranks whose second try ends well."""
    tries = []

    def supervise(run):
        tries.append(run.hosts)
        return Outcome(0) if tries[1:] else first

    monkeypatch.setattr(start, "supervise", supervise)
    monkeypatch.setattr(start, "_free_memory", lambda *args, **options: None)
    monkeypatch.setattr(start.time, "sleep", lambda seconds: None)
    nodes = tuple(Host(name, slots=1) for name in names)
    assert start.start(request(hosts=nodes, size=2, min_size=least, max_restarts=1)).status == 0
    return tries


def test_the_line_of_a_dry_run_removes_the_variables_that_the_run_removes(hosts, monkeypatch):
    found = Launcher("MPICH 5.0.2", "mpirun", launchers.mpich_arguments, sends_all=True)
    monkeypatch.setattr(prepare, "find_launcher", lambda name: found)
    monkeypatch.setenv("MY_TOKEN", "t")
    monkeypatch.setenv("HVKIT_RUN", "that of another run")
    run = prepared(request())
    dump = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
    line = shown(replace(run, command=[*dump, *run.command]))
    printed = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout
    seen = json.loads(printed)
    expected = run.environ
    assert "HVKIT_RUN" not in seen
    assert {name: seen[name] for name in expected} == expected
    own = {"PWD", "OLDPWD", "SHLVL", "_", "LC_CTYPE"}
    assert not (os.environ.keys() & seen.keys()) - expected.keys() - own


def test_a_dry_run_shows_the_locale_that_python_has_set_itself(hosts, monkeypatch):
    monkeypatch.setattr("psutil.Process.environ", lambda process: {})
    monkeypatch.setenv("LC_CTYPE", "C.UTF-8")
    assert "LC_CTYPE=C.UTF-8 " in shown(prepared(request())).split("mpirun")[0]


@pytest.mark.parametrize("size", [2, 3])
def test_options_of_the_users_own_command_are_not_taken_for_those_of_hvkit(hosts, size):
    command = ("env", "-x", "HVKIT_RUN")
    line = shown(prepared(request(command=command, size=size), supervised=False))
    assert line.endswith(" env +-x HVKIT_RUN")


def test_mpich_gets_the_interface_by_name(hosts, monkeypatch):
    found = Launcher("MPICH 5.0.2", "mpirun", launchers.mpich_arguments)
    monkeypatch.setattr(prepare, "find_launcher", lambda name: found)
    assert "-iface eth0" in shlex.join(prepared(request()).command)


@pytest.mark.parametrize("system", [None, "Slurm"])
def test_a_list_of_gpus_applies_to_this_host_only(hosts, monkeypatch, system):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    run = prepared(Request(("true",), NODES, system=system))
    assert run.here == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert "CUDA_VISIBLE_DEVICES" not in run.command
    named = {"CUDA_VISIBLE_DEVICES": None}
    run = prepared(Request(("true",), NODES, system=system, variables=named))
    assert run.here == {}
    assert "CUDA_VISIBLE_DEVICES" in run.command


def test_a_variable_that_is_not_set_cannot_be_given(hosts, monkeypatch):
    monkeypatch.delenv("MINE", raising=False)
    with pytest.raises(LaunchError, match="-x MINE: it is not set here: write -x MINE=VALUE"):
        prepared(Request(("true",), NODES, variables={"MINE": None}))
