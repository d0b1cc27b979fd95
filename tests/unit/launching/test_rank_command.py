"""The command of every rank: a script gets this Python, and a host sees what it cannot start."""

import os
import sys

import pytest

from hvkit.errors import UsageError
from hvkit.launching.rank_command import NOT_EXECUTABLE, NOT_FOUND, RankCommand, with_python


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with some files; ``tool.py`` and ``tool`` are on PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    _program(programs / "tool.py")
    _program(programs / "no_line.py", "print(1)\n")
    _program(programs / "tool")
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "plain.sh").write_text("#!/bin/sh\n")
    _program(tmp_path / "run.sh")
    _program(tmp_path / "windows.sh", "#!/bin/sh\r\n")
    _program(tmp_path / "text.sh", "echo\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _program(file, text="#!/bin/sh\n"):
    file.write_text(text, newline="")
    file.chmod(0o755)


def _nothing():
    raise AssertionError("standard input is read only if the command says so")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.py", "--lr", "1"], [sys.executable, "train.py", "--lr", "1"]),
        (["./train.py"], [sys.executable, "./train.py"]),
        (["missing.py"], [sys.executable, "missing.py"]),
        (["tool.py"], ["tool.py"]),
        (["bin/tool.py", "-"], ["bin/tool.py", "-"]),
        (["bin/no_line.py"], [sys.executable, "bin/no_line.py"]),
        (["python", "train.py", "-"], ["python", "train.py", "-"]),
        (["sh", "-"], ["sh", "-"]),
        (["python", "-mjson.tool", "-"], ["python", "-mjson.tool", "-"]),
        (["python", "-Ic1", "-"], ["python", "-Ic1", "-"]),
    ],
)
def test_a_script_runs_with_this_python(folder, words, expected):
    assert with_python(words, _nothing) == tuple(expected)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-", "a"], [sys.executable, "-c", "print(2)", "a"]),
        (["python3", "-u", "-W", "error", "-"], ["python3", "-u", "-W", "error", "-c", "print(2)"]),
        (["python3", "-uW", "c", "-"], ["python3", "-uW", "c", "-c", "print(2)"]),
        (["python3", "-Wmodule", "-"], ["python3", "-Wmodule", "-c", "print(2)"]),
    ],
)
def test_all_ranks_run_a_script_on_standard_input(words, expected):
    assert with_python(words, lambda: "print(2)") == tuple(expected)


def test_an_empty_script_on_standard_input_is_refused():
    with pytest.raises(UsageError, match="the script on standard input is empty"):
        with_python(["-"], lambda: "\n")


def test_a_script_on_standard_input_that_fits_in_no_command_is_refused():
    with pytest.raises(UsageError, match="longer than 131071 bytes: write it to a file"):
        with_python(["-"], lambda: "#" * 200_000)


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
        (
            ["python3", "-X", "dev", "no.py"],
            NOT_FOUND,
            "cannot run no.py: there is no such file in ",
        ),
        (["./plain.sh"], NOT_EXECUTABLE, "it is not executable: `chmod +x ./plain.sh`"),
        (["./bin"], NOT_EXECUTABLE, "cannot run ./bin: it is a folder"),
        (
            ["./windows.sh"],
            NOT_EXECUTABLE,
            "its first line names '/bin/sh\\r', which does not exist",
        ),
        (["./text.sh"], NOT_EXECUTABLE, "it is text, and its first line names no program"),
    ],
)
def test_a_host_sees_before_ranks_start_whether_it_can_start_them(folder, words, status, text):
    problem = RankCommand.of(words, os.environ["PATH"]).problem(str(folder))
    assert (problem.status if problem else None) == status
    assert text in (problem.text if problem else "")
