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


HERE = sys.executable
SCRIPT = ["-c", "print(2)"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.py", "--lr", "1"], [HERE, "train.py", "--lr", "1"]),
        (["./train.py"], [HERE, "./train.py"]),
        (["missing.py"], [HERE, "missing.py"]),
        (["tool.py"], ["tool.py"]),
        (["bin/tool.py", "-"], ["bin/tool.py", "-"]),
        (["bin/no_line.py"], [HERE, "bin/no_line.py"]),
        (["python", "train.py", "-"], ["python", "train.py", "-"]),
        (["sh", "-"], ["sh", "-"]),
        (["python", "-mjson.tool", "-"], ["python", "-mjson.tool", "-"]),
        (["python", "-Ic1", "-"], ["python", "-Ic1", "-"]),
        (["-", "a"], [HERE, *SCRIPT, "a"]),
        (["python3", "-u", "-W", "error", "-"], ["python3", "-u", "-W", "error", *SCRIPT]),
        (["python3", "-uW", "c", "-"], ["python3", "-uW", "c", *SCRIPT]),
        (["python3", "-Wmodule", "-"], ["python3", "-Wmodule", *SCRIPT]),
    ],
)
def test_a_script_runs_with_this_python_and_so_does_one_on_standard_input(folder, words, expected):
    read = []
    assert with_python(words, lambda: read.append(1) or "print(2)") == tuple(expected)
    assert bool(read) == ("print(2)" in expected)  # else standard input is left alone


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("\n", "the script on standard input is empty"),
        ("#" * 200_000, "longer than 131071 bytes: write it to a file"),
    ],
)
def test_a_script_on_standard_input_that_no_command_can_hold_is_refused(script, message):
    with pytest.raises(UsageError, match=message):
        with_python(["-"], lambda: script)


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
        (["python3", "-X", "dev", "no.py"], NOT_FOUND, "run no.py: there is no such file in "),
        (["./plain.sh"], NOT_EXECUTABLE, "it is not executable: `chmod +x ./plain.sh`"),
        (["./bin"], NOT_EXECUTABLE, "cannot run ./bin: it is a folder"),
        (["./windows.sh"], NOT_EXECUTABLE, "names '/bin/sh\\r', which does not exist"),
        (["./text.sh"], NOT_EXECUTABLE, "it is text, and its first line names no program"),
    ],
)
def test_a_host_sees_before_ranks_start_whether_it_can_start_them(folder, words, status, text):
    problem = RankCommand.of(words, os.environ["PATH"]).problem(str(folder))
    assert (problem.status if problem else None) == status
    assert text in (problem.text if problem else "")
