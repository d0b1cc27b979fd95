"""The report: JSON with stable keys, one screen of text, an exit status, nothing private."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from machine_facts import GIB, NO_SSH, machine
from rich.console import Console

from hvkit import cli
from hvkit.doctor import report
from hvkit.doctor.report import json_report, show


def self_test(*results):
    empty = {"command": "mpirun x", "error": None, "output": [], "seconds": None, "bandwidth": None}
    return {
        "launcher": "Open MPI 5.0.11",
        "error": None,
        "results": [empty | each for each in results],
        "ranks": 2,
        "bytes": 64 * 1024**2,
        "rounds": 9,
    }


PASSED = self_test(
    {"framework": "torch", "seconds": 0.05, "bandwidth": 64 * 1024**2 / 0.05},
    {"framework": "tensorflow", "seconds": 0.1, "bandwidth": 64 * 1024**2 / 0.1},
)
FAILED = self_test(
    *(
        {"framework": name, "error": "it ended with status 3", "output": [f"line of {name}", *"12"]}
        for name in ("torch", "tensorflow")
    )
)
GPU = {"name": "NVIDIA H200", "memory": 141 * GIB, "driver": "535.1"}
BAD = machine(
    addresses=[],
    mpi=None,
    launchers=[],
    shared_memory={"size": 64 * 1024**2, "free": 0},
    cores={"usable": 8, "host": 16, "limit": 1.5},
    memory={"total": GIB, "available": 1024**2},
    limits={"open_files": 256, "locked_memory": 65536},
    infiniband=True,
    gpus=[{"index": number, **GPU} for number in range(8)],
    driver_cuda="12.0",
    interfaces=[
        {"name": f"veth{n}", "address": f"10.0.{n}.1", "network": f"10.0.{n}.0/24"}
        for n in range(30)
    ],
    ssh=NO_SSH,
    _launched="one of 2, started by mpirun",
)
"""A machine with many problems at once."""
ON_TERMINAL = {"force_terminal": True, "color_system": "standard"}


def without_colours(text):
    """The lines of a text, without colours and without blanks at their ends."""
    return [line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()]


def text_of(facts, test=None, verbose=False, **options):
    screen = io.StringIO()
    report = json_report(facts | {"self_test": test})
    show(report, Console(file=screen, **options), verbose=verbose)
    return screen.getvalue()


def test_the_text_is_one_screen():
    assert text_of(machine(), PASSED).count("\n") < 45
    assert text_of(BAD, FAILED).count("\n") < 45


def test_the_text_is_plain_unless_on_a_terminal():
    plain = text_of(BAD, FAILED)
    assert "\x1b" not in plain
    coloured = text_of(BAD, FAILED, width=1000, **ON_TERMINAL)
    assert "\x1b[1;31mproblem:" in coloured
    assert without_colours(coloured) == [line.rstrip() for line in plain.splitlines()]


def test_a_terminal_gets_lines_that_fit_and_go_on_below_their_beginning():
    lines = without_colours(text_of(BAD, FAILED, width=60, **ON_TERMINAL))
    assert max(map(len, lines)) <= 60
    number = next(n for n, line in enumerate(lines) if line.startswith("packages"))
    start = lines[number].index("hvkit")
    assert lines[number + 1][:start].isspace()
    assert not lines[number + 1][start].isspace()


def test_values_are_aligned_and_bandwidth_is_shown_with_its_measurement():
    text = text_of(machine(), PASSED)
    lines = text.splitlines()
    start = lines[0].index("node1")
    assert all(line[start - 2 : start] == "  " and line[start] != " " for line in lines[:-1])
    assert (
        "passed on 2 ranks started by Open MPI 5.0.11; allreduce of 64 MiB float32 in host "
        "memory: 50 ms (median of 9), 1.34 GB/s per rank"
    ) in text


def test_a_failed_self_test_shows_its_last_lines():
    text = text_of(machine(), FAILED)
    assert "problem: the self-test of torch failed: it ended with status 3\n" in text
    assert "last lines of the self-test of torch:\n    line of torch\n    1\n    2\n" in text
    # One screen has no room for both frameworks.
    assert "line of tensorflow" not in text
    assert text.endswith("2 problems, no notes\n")


def test_variables_of_ranks_are_one_line_and_with_reasons_on_request():
    settings = (("A", "one"), ("B", "two"), ("C", "two"))
    ranks = [{"variable": name, "value": "1", "reason": why} for name, why in settings]
    facts = machine(set_by_ranks=ranks, threads={"OMP_NUM_THREADS": "2"})
    lines = text_of(facts).splitlines()
    here = next(number for number, line in enumerate(lines) if line.startswith("set in"))
    assert re.split(" {2,}", lines[here]) == ["set in this shell", "OMP_NUM_THREADS=2"]
    assert lines[here + 1].endswith("A=1, B=1, C=1 (--verbose says why)")
    assert lines[here + 2 :] == ["no problems, no notes"]
    lines = text_of(facts, verbose=True).splitlines()[here + 1 :]
    assert re.split(" {2,}", lines[0]) == ["set by each rank", "A=1: one"]
    assert lines[1].strip() == "B=1, C=1: two"
    assert "set by each rank" not in text_of(machine())


def test_brackets_are_shown_as_they_are_and_gpus_and_interfaces_summed_up():
    text = text_of({**BAD, "hostname": "[red]host"})
    assert "[red]host" in text
    assert "8 x NVIDIA H200, 141 GiB, driver 535.1, CUDA 12.0" in text
    assert "veth3 10.0.3.1, 26 more; ssh: none" in text


def test_every_key_of_the_json_is_described():
    page = Path(__file__).parents[3] / "docs" / "install.md"
    described = page.read_text().partition("### The report as JSON")[2]
    contents = json_report(machine(self_test=PASSED))
    parts = ("horovod", "platform", "cores", "memory", "shared_memory", "limits", "ssh")
    nested = [contents[part] for part in (*parts, "mpi", "self_test")]
    lists = [contents["horovod"]["libraries"], contents["interfaces"]]
    nested += [one[0] for one in (*lists, contents["self_test"]["results"])]
    for keys in (contents, *nested):
        assert [key for key in keys if f"`{key}`" not in described] == []
    assert json.loads(json.dumps(contents)) == contents
    # Facts for the findings alone are left out.
    assert "_first_line" not in str(contents)
    assert not [key for key in contents if key.startswith("_")]


def test_findings_in_the_json_are_problems_and_notes():
    contents = json_report({**BAD, "self_test": FAILED})
    for severity in ("problems", "notes"):
        assert contents[severity]
        assert all(one.keys() == {"what", "fix"} for one in contents[severity])


@pytest.mark.parametrize(("addresses", "status"), [(["10.0.0.1"], 0), ([], 1)])
def test_the_exit_status_is_1_for_problems(monkeypatch, capsys, addresses, status):
    # A note does not count.
    monkeypatch.setattr(report, "gather", lambda: machine(ssh=NO_SSH, addresses=addresses))
    assert cli.main(["doctor", "--no-self-test", "--json"]) == status
    assert len(json.loads(capsys.readouterr().out)["problems"]) == status
    assert cli.main(["doctor", "--no-self-test"]) == status
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"{'1 problem' if status else 'no problems'}, 1 note"


def test_frameworks_are_not_imported():
    code = (
        "import sys; from hvkit.doctor.report import examine; examine(False); "
        "print([m for m in ('torch', 'tensorflow', 'keras', 'horovod') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/ann/venv/bin/python", "~/venv/bin/python"),
        ("/home/ann", "~"),
        ("/home/anna/x", "/home/anna/x"),
        ("/scratch/ann/venv: not found", "/scratch/USER/venv: not found"),
        ("an annual banner", "an annual banner"),
    ],
)
def test_home_and_user_are_hidden(monkeypatch, text, shown):
    monkeypatch.setattr(Path, "home", lambda: Path("/home/ann"))
    monkeypatch.setattr("getpass.getuser", lambda: "ann")
    assert report.without_user({"a": [text], "b": 3}) == {"a": [shown], "b": 3}


@pytest.mark.parametrize("home", [Path("/"), None])
def test_a_user_without_a_home_or_a_name_hides_nothing(monkeypatch, home):
    def find_home():
        if home is None:
            raise RuntimeError("Could not determine home directory.")
        return home

    def find_user():
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr(Path, "home", find_home)
    monkeypatch.setattr("getpass.getuser", find_user)
    assert report.without_user("/opt/venv/bin") == "/opt/venv/bin"
