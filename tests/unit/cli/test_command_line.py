"""What all subcommands of ``hvkit`` have in common."""

import os
import pwd

import pytest

from hvkit.cli import main


def test_home_is_set_where_it_is_missing_since_open_mpi_does_not_start_without(monkeypatch, capsys):
    for value in ("/somewhere", ""):
        monkeypatch.setenv("HOME", value)
        assert main(["hosts", "-H", "node1:2"]) == 0
        assert os.environ["HOME"] == (value or pwd.getpwuid(os.getuid()).pw_dir)


@pytest.mark.parametrize(
    "words",
    [
        ["run", "-np", "2", "-H", "node1:two", "true"],
        ["run", "-np", "2", "-x", "NOT_SET_HERE", "true"],
        ["run", "-np", "2", "--show", "5", "true"],
        ["run", "-np", "2", "--interfaces", "eth99", "true"],
        ["run", "-np", "3", "-H", "localhost:2", "true"],
        ["run", "--hostfile", "missing", "true"],
        ["hosts", "missing"],
        ["report", "missing"],
    ],
)
def test_wrong_arguments_end_with_2(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert status(words) == 2


def status(words):
    """The exit status of ``hvkit`` with these arguments."""
    try:
        return main(words)
    except SystemExit as end:
        return end.code
