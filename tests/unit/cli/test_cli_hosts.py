"""``hvkit hosts`` on the command line, and the tables it prints."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from hvkit.cli import arguments, main
from hvkit.cli import hosts as command
from hvkit.cli.hosts import show_table
from hvkit.launching.hosts_check import Checked, Examined, HostProblem


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("hosts")
    path.write_text("# all\nnode1 slots=2 max_slots=4\nroot@node2 slots=1\nnode3\n")
    return path


@pytest.fixture
def printed(capsys):
    """What ``hvkit hosts`` prints with these arguments, to both streams."""

    def run(*words, status=0):
        assert main(["hosts", *words]) == status
        return capsys.readouterr()

    return run


def checked(hosts, system, *problems):
    memory, cores = {"available": 2**34}, {"usable": 8, "limit": None}
    report = {"cores": cores, "memory": memory, "gpus": [{}, {}]}
    examined = (Examined(hosts[0], report), *(Examined(h, None, "away") for h in hosts[1:]))
    return Checked(examined, {hosts[0].name: "eth0 10.0.0.1"}, problems)


def test_a_file_is_listed_with_the_ranks_of_each_host(file, printed):
    assert printed("hosts").out == (
        "host       slots  user  ranks\n"
        "node1          2     -    0-1\n"
        "node2          1  root      2\n"
        "node3  its cores     -     3-\n"
        "3 hosts, 3 slots, plus the cores of hosts without a slot count\n"
    )


def test_a_list_is_listed(printed):
    expected = "host   slots  user  ranks\nnode1      2     -    0-1\n1 host, 2 slots\n"
    assert printed("-H", "node1:2").out == expected


def test_a_host_that_is_named_twice_is_refused(file, printed):
    file.write_text("node1 slots=2\nnode1 slots=1\n")
    again = "hosts: line 2: node1 is named again after line 1: name it once, with all its slots"
    assert printed("hosts", status=2) == ("", f"hvkit: {again}\n")


def test_a_malformed_file_is_reported_with_its_line(file, printed):
    file.write_text("node1 slots=2\nnode2 slots=four\n")
    message = "hvkit: hosts: line 2: slots must be a positive integer, got 'four'\n"
    assert printed("hosts", status=2) == ("", message)


def test_without_a_file_the_hosts_are_those_of_the_batch_system(scontrol, printed, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[1-2]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4(x2)")
    systems = []
    check = lambda hosts, system: systems.append(system) or checked(hosts, system)  # noqa: E731
    monkeypatch.setattr(command, "check", check)
    said = "hvkit: hosts from Slurm (SLURM_JOB_NODELIST)\n"
    out, err = printed()
    assert (out.splitlines()[1:3], err) == (
        ["gpu1      4     -    0-3", "gpu2      4     -    4-7"],
        said,
    )
    printed("--check")
    printed("-H", "node1:2", "--check")
    assert systems == ["Slurm", None]


def test_without_any_hosts_the_error_explains_how_to_name_them(printed, monkeypatch):
    monkeypatch.setattr(arguments, "allocation", lambda environ: None)
    said = printed(status=2).err
    assert said.startswith("hvkit: no hosts: name a hostfile or -H HOST:SLOTS")


def test_a_check_without_problems_ends_with_0(printed, monkeypatch):
    monkeypatch.setattr(command, "check", checked)
    assert printed("-H", "node1:2", "--check").out == (
        "host   slots  cores  GPUs  free memory      interface  result\n"
        "node1      2      8     2     16.0 GiB  eth0 10.0.0.1    fine\n"
    )


def test_a_check_with_problems_ends_with_1_and_a_line_for_each(printed, monkeypatch):
    away = HostProblem(("node2",), "[away]: is it on?")
    differs = HostProblem(("node1", "node2"), "torch differs")
    monkeypatch.setattr(command, "check", lambda *given: checked(*given, away, differs))
    assert printed("-H", "node1:2,node2:2", "--check", status=1).out == (
        "host   slots  cores  GPUs  free memory      interface      result\n"
        "node1      2      8     2     16.0 GiB  eth0 10.0.0.1   1 problem\n"
        "node2      2      -     -            -              -  2 problems\n"
        "problem: node2: [away]: is it on?\n"
        "problem: node1, node2: torch differs\n"
    )


def test_arguments_that_exclude_each_other_are_refused():
    with pytest.raises(SystemExit) as end:
        main(["hosts", "a", "-H", "b:1"])
    assert end.value.code == 2


def table(width, slots=("2", "16"), **terminal):
    file = io.StringIO()
    console = Console(file=file, width=width, **terminal)
    show_table(console, ("host", "slots"), [*zip(("node1", "[::1]" * 10), slots, strict=True)])
    assert console.width == width
    return file.getvalue()


def test_without_a_terminal_columns_are_aligned_neither_wrapped_nor_filled_with_blanks():
    head, *rows = table(width=10).splitlines()
    assert head == f"{'host':50}  slots"
    assert rows == [f"{'node1':50}      2", "[::1]" * 10 + "     16"]
    assert table(width=10, slots=("2", "")).endswith("[::1]\n")


def test_on_a_terminal_a_table_is_drawn_and_brackets_stay():
    drawn = table(width=100, force_terminal=True)
    for word in ("━", "host", "slots", "node1", "[::1]" * 10, "16"):
        assert word in drawn
