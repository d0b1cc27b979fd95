"""The command of every rank: a host sees what it cannot start."""

import os

import pytest

from hvkit.launching.probe import NOT_EXECUTABLE, NOT_FOUND, RankCommand


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with some files; ``tool`` is on PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    _program(programs / "tool")
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "plain.sh").write_text("#!/bin/sh\n")
    _program(tmp_path / "run.sh")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _program(file):
    file.write_text("#!/bin/sh\n")
    file.chmod(0o755)


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["tool"], None, ""),
        (["./run.sh"], None, ""),
        (["python3", "train.py"], None, ""),
        (["python3", "-c", "missing.py"], None, ""),
        (["python3", "-um", "missing.py"], None, ""),
        (["python3", "-cprint(1)", "missing.py"], None, ""),
        (["python3", "-mtimeit", "-n1", "pass"], None, ""),
        (["sh", "missing.py"], None, ""),
        (["nothing"], NOT_FOUND, "cannot run nothing: there is no such program on PATH"),
        (["run.sh"], NOT_FOUND, "there is no such program on PATH: write ./run.sh for the file in"),
        (["python9"], NOT_FOUND, "on PATH: `hvkit run ... script.py` takes the Python of hvkit"),
        (["./nothing"], NOT_FOUND, "cannot run ./nothing: there is no such file in "),
        (["python3", "-"], NOT_FOUND, "cannot run -: ranks have no standard input: write the scr"),
        (["python3", "-X", "dev", "no.py"], NOT_FOUND, "run no.py: there is no such file in "),
        (["./plain.sh"], NOT_EXECUTABLE, "it is not executable: `chmod +x ./plain.sh`"),
        (["./bin"], NOT_EXECUTABLE, "cannot run ./bin: it is a folder"),
    ],
)
def test_a_host_sees_before_ranks_start_whether_it_can_start_them(folder, words, status, text):
    problem = RankCommand.of(words, os.environ["PATH"]).problem(str(folder))
    if status is None:
        assert problem is None
    else:
        assert problem[0] == status
        assert text in problem[1]
