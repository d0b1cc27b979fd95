"""``hvkit hosts`` on the command line, and the tables it prints."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from hvkit.cli import arguments, main
from hvkit.cli import hosts as command
from hvkit.cli.hosts import show_table
from hvkit.launching.host_checks.hosts_check import Checked, Examined, HostProblem, HostReport


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("hosts")
    path.write_text("# all\nnode1 slots=2 max_slots=4\nroot@node2 slots=1\nnode3\n")
    return path


def _checked(hosts, system, *problems: HostProblem) -> Checked:
    facts = HostReport("node1", {}, 8, 2**34, 2, (), (), ())
    examined = (Examined(hosts[0], facts, None), *(Examined(h, None, "away") for h in hosts[1:]))
    return Checked(examined, {hosts[0].name: "eth0 10.0.0.1"}, problems)


def test_a_file_is_listed_with_the_ranks_of_each_host(file, capsys):
    assert main(["hosts", "hosts"]) == 0
    assert capsys.readouterr().out == (
        "host       slots  max  user  ranks\n"
        "node1          2    4     -    0-1\n"
        "node2          1    -  root      2\n"
        "node3  its cores    -     -     3-\n"
        "3 hosts, 3 slots, plus the cores of hosts without a slot count\n"
    )


def test_a_list_is_listed(capsys):
    assert main(["hosts", "-H", "node1:2"]) == 0
    assert capsys.readouterr().out == (
        "host   slots  max  user  ranks\n"
        "node1      2    -     -    0-1\n"
        "1 host, 2 slots\n"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("openmpi", "node1 slots=2 max_slots=2\nroot@node2 slots=3\n"),
        ("mpich", "node1:2\nnode2:3 user=root\n"),
    ],
)
def test_hosts_are_printed_in_the_form_of_a_launcher(file, capsys, form, text):
    file.write_text("node1 max_slots=2\nroot@node2 slots=3\n")
    assert main(["hosts", "hosts", "--as", form]) == 0
    assert capsys.readouterr().out == text


def test_hosts_are_printed_for_horovodrun(capsys):
    assert main(["hosts", "-H", "node1:2,node2:1", "--as", "horovodrun"]) == 0
    assert capsys.readouterr().out == "node1:2,node2:1\n"


@pytest.mark.parametrize(
    ("hosts", "form", "message"),
    [
        ("fd00::1", "mpich", "MPICH accepts no IPv6 addresses, got fd00::1: use the host's"),
        ("fd00::1", "horovodrun", "horovodrun accepts no IPv6 addresses, got fd00::1: use the h"),
        ("root@a:1", "horovodrun", "horovodrun does not accept root@a: set User for a in ~/.ssh/"),
    ],
)
def test_hosts_that_a_launcher_would_not_accept_are_refused(capsys, hosts, form, message):
    assert main(["hosts", "-H", hosts, "--as", form]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"hvkit: {message}")


def test_a_repeated_host_is_mentioned_and_its_slots_added_up(file, capsys):
    file.write_text("node1 slots=2\nnode1 slots=1\n")
    assert main(["hosts", "hosts", "--as", "openmpi"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "node1 slots=3\n"
    assert printed.err == (
        "hvkit: hosts: line 2: node1 is named again after line 1: name it once, with all its slots "
        "(3); added up here, but `hvkit run` refuses it\n"
    )


def test_a_check_refuses_a_repeated_host(file, capsys):
    file.write_text("node1 slots=2\nnode1 slots=1\n")
    assert main(["hosts", "hosts", "--check"]) == 2
    assert "line 2: node1 is named again after line 1" in capsys.readouterr().err


def test_a_malformed_file_is_reported_with_its_line(file, capsys):
    file.write_text("node1 slots=2\nnode2 slots=four\n")
    assert main(["hosts", "hosts"]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (
        "",
        "hvkit: hosts: line 2: slots must be a positive integer, got 'four'\n",
    )


def test_without_a_file_the_hosts_are_those_of_the_batch_system(scontrol, capsys, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[1-2]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4(x2)")
    assert main(["hosts", "--as", "openmpi"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "gpu1 slots=4\ngpu2 slots=4\n"
    assert printed.err == "hvkit: hosts from Slurm (SLURM_JOB_NODELIST)\n"


def test_a_check_gets_the_batch_system_of_the_hosts(scontrol, capsys, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[1-2]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4(x2)")
    systems = []
    monkeypatch.setattr(
        command, "check", lambda hosts, system: systems.append(system) or _checked(hosts, system)
    )
    assert main(["hosts", "--check"]) == 0
    assert main(["hosts", "-H", "node1:2", "--check"]) == 0
    assert systems == ["Slurm", None]


def test_without_any_hosts_the_error_explains_how_to_name_them(capsys, monkeypatch):
    monkeypatch.setattr(arguments, "allocation", lambda environ: None)
    assert main(["hosts"]) == 2
    assert capsys.readouterr().err.startswith("hvkit: no hosts: name a hostfile or -H HOST:SLOTS")


def test_a_check_without_problems_ends_with_0(capsys, monkeypatch):
    monkeypatch.setattr(command, "check", _checked)
    assert main(["hosts", "-H", "node1:2", "--check"]) == 0
    assert capsys.readouterr().out == (
        "host   slots  cores  GPUs  free memory      interface  result\n"
        "node1      2      8     2     16.0 GiB  eth0 10.0.0.1    fine\n"
    )


def test_a_check_with_problems_ends_with_1_and_a_line_for_each(capsys, monkeypatch):
    wrong = (
        HostProblem(("node2",), "[away]: is it on?"),
        HostProblem(("node1", "node2"), "torch differs"),
    )
    monkeypatch.setattr(command, "check", lambda hosts, system: _checked(hosts, system, *wrong))
    assert main(["hosts", "-H", "node1:2,node2:2", "--check"]) == 1
    assert capsys.readouterr().out == (
        "host   slots  cores  GPUs  free memory      interface      result\n"
        "node1      2      8     2     16.0 GiB  eth0 10.0.0.1   1 problem\n"
        "node2      2      -     -            -              -  2 problems\n"
        "problem: node2: [away]: is it on?\n"
        "problem: node1, node2: torch differs\n"
    )


@pytest.mark.parametrize("arguments", [["a", "-H", "b:1"], ["a", "--check", "--as", "mpich"]])
def test_arguments_that_exclude_each_other_are_refused(arguments):
    with pytest.raises(SystemExit) as end:
        main(["hosts", *arguments])
    assert end.value.code == 2


_COLUMNS = ("host", "slots")
_ROWS = (("node1", "2"), ("[::1]", "16"))


def _printed(terminal: bool) -> str:
    file = io.StringIO()
    show_table(Console(file=file, force_terminal=terminal, width=60), _COLUMNS, _ROWS)
    return file.getvalue()


def test_without_a_terminal_columns_are_aligned_without_trailing_blanks():
    assert _printed(terminal=False) == "host   slots\nnode1      2\n[::1]     16\n"


def test_without_a_terminal_long_lines_are_not_wrapped():
    file = io.StringIO()
    show_table(Console(file=file, width=10), _COLUMNS, [("n" * 50, "2")])
    assert len(file.getvalue().splitlines()) == 2


def test_on_a_terminal_a_table_is_drawn_and_brackets_stay():
    drawn = _printed(terminal=True)
    assert "━" in drawn
    for word in ("host", "slots", "node1", "[::1]", "16"):
        assert word in drawn
