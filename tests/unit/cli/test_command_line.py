"""What all subcommands of ``hvkit`` have in common."""

import os
import pwd
import re
import subprocess
import sys

import pytest

from hvkit.cli import main, run
from hvkit.launching import prepare
from hvkit.launching.hosts import Host
from hvkit.launching.supervision.supervised_run import Outcome


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
        ["install-horovod", "--force", "--wheels", "build/wheels"],
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


@pytest.fixture
def started(monkeypatch):
    """The requests that ``hvkit run`` makes; it starts nothing on this host of four cores."""
    requests = []
    monkeypatch.setattr(run, "start", lambda found: requests.append(found) or Outcome(0))
    monkeypatch.setattr(run, "hosts_of", lambda args: ((), None))
    monkeypatch.setattr(prepare, "usable_cores", lambda: 4)
    monkeypatch.setattr(prepare, "visible_gpus", lambda environ: 0)
    return requests


@pytest.mark.usefixtures("started")
def test_the_exit_status_is_that_of_the_run(monkeypatch):
    monkeypatch.setattr(run, "start", lambda request: Outcome(7))
    assert main(["run", "-np", "2", "train.py"]) == 7


@pytest.mark.parametrize(
    "words", [["-np", "3"], ["--np", "3"], ["-n3"], ["-np3"], ["--num-proc=3"]]
)
def test_the_number_of_ranks_has_the_names_of_other_launchers(started, words):
    assert main(["run", *words, "train.py", "-n", "7"]) == 0
    assert started[0].np == 3
    assert started[0].command == (sys.executable, "train.py", "-n", "7")


def test_without_a_number_there_is_a_rank_for_each_gpu(started, monkeypatch, capsys):
    given = []
    monkeypatch.setattr(prepare, "visible_gpus", lambda environ: given.append(environ) or 8)
    assert main(["run", "-x", "CUDA_VISIBLE_DEVICES=1", "train.py"]) == 0
    assert started[0].np == 8
    assert given[0]["CUDA_VISIBLE_DEVICES"] == "1"
    assert "hvkit: starts 8 ranks, one for each GPU\n" in capsys.readouterr().err


BEFORE = "before COMMAND, which gets all options after it, such as -np"
NOT_OURS = "is not an option of hvkit run"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.py"], "-np is missing: this host has 4 cores and no GPU; .* such as -np 4"),
        (["train.py", "-np", "2"], BEFORE),
        (["train.py", "-n", "2"], BEFORE),
        (["train.py", "--np=2"], BEFORE),
        (["-np", "33", "x"], "-np 33 is too many: .* most -np 32, or write -H localhost:33"),
        (["--nproc-per-node", "2", "x"], f"--nproc-per-node {NOT_OURS}: -np N is the n"),
        (["--nproc_per_node=2", "x"], f"--nproc_per_node {NOT_OURS}: -np N is the num"),
        (["--nnodes=2", "x"], f"--nnodes {NOT_OURS}: name hosts .* -H host1:4,host2:4"),
        (["--num_processes", "2", "x"], f"--num_processes {NOT_OURS}: -np N is the num"),
        (["-hostfile", "x"], f"-hostfile {NOT_OURS}: name the file with --hostfile"),
        (["--max_restarts", "2", "x"], f"--max_restarts {NOT_OURS}: write --max-restarts"),
        (["--hostfle", "2", "x"], r"unrecognized arguments: --hostfle \(did you mean --hostfile\?"),
        (["--slots-per-host", "2", "x"], "--slots-per-host is not .*: name hosts with their ranks"),
        (["--min-num-proc", "2", "x"], "--min-num-proc is not .*: write --min-np$"),
        (["--check-build"], "--check-build is not .*: run `hvkit doctor`$"),
        (["--fusion-threshold-mb=4", "x"], r"variable HOROVOD_FUSION_THRESHOLD \(in bytes\)"),
        (["--autotune", "x"], "variable HOROVOD_AUTOTUNE=1, which"),
        (["-p", "22", "x"], "-p is not .*: for horovodrun's --ssh-port, set Port for the host in"),
        (["-np", "2", "-c", "print(1)"], "for Python's, write `python -c CODE` as COMMAND; for sr"),
        (["-bind", "x"], "unrecognized arguments: -bind"),
        (["-N2", "x"], "-N is not .*: name hosts with their ranks"),
        (["-t", "10:00", "x"], "for srun's --time, the time limit belongs in `hvkit manifest slu"),
        (["--mca", "plm_x", "y", "x"], "plm, ras, rmaps, prte.*, PRTE_MCA_NAME=VALUE"),
        (["-np", "2"], "COMMAND is missing"),
        (["-np", "2", ""], "COMMAND must begin with a script or program, such as `script.py`"),
    ],
)
def test_errors_are_below_the_usage_of_hvkit_run_and_name_its_option(
    started, capsys, words, message
):
    assert status(["run", *words]) == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: hvkit run [-np N]")
    assert re.search(f"^hvkit run: error: .*{message}", error)
    assert started == []


@pytest.mark.parametrize("system", ["slurm", "mpijob"])
def test_manifests_have_advice_for_the_options_of_other_launchers(capsys, system):
    assert status(["manifest", system, "--nodes", "2", "-np", "4", "--slots", "2", "x"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"--nodes is not an option of hvkit manifest {system}: --slots N is the" in error


def test_a_number_of_ranks_that_is_too_many_is_for_hosts_that_are_named(started, monkeypatch):
    named = (Host("localhost", slots=500),)
    monkeypatch.setattr(run, "hosts_of", lambda args: (named, None))
    assert main(["run", "-np", "500", "-H", "localhost:500", "train.py"]) == 0
    assert started[0].np == 500


@pytest.mark.parametrize("word", ["train.py", "./train.py", "python", "train.sh"])
def test_a_script_of_python_runs_with_this_python(started, word):
    assert main(["run", "-np", "2", word, "--lr", "1"]) == 0
    python = [sys.executable] if word.endswith(".py") else []
    assert started[0].command == (*python, word, "--lr", "1")


def test_versions_and_help(capsys):
    for words in (["-V"], ["--version"]):
        assert status(words) == 0
        assert re.fullmatch(r"hvkit \d+\.\d+\.\d+\n", capsys.readouterr().out)
    assert status([]) == 0
    assert "\ncommands:\n" in capsys.readouterr().out
    assert status(["run", "--help"]) == 0
    text = capsys.readouterr().out
    assert "\nwhen something fails:\n  --max-restarts R " in text
    assert "\nexamples:\n  hvkit run -np 4 train.py --epochs 3\n      four ranks" in text
    assert "nproc" not in text


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_commands_options_and_files(capsys, shell):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "--max-restarts" in script
    assert "--nproc" not in script
    if shell == "bash":
        asked = "COMP_WORDS=(hvkit run --launcher g); COMP_CWORD=3; _shtab_hvkit; echo $COMPREPLY"
        done = subprocess.run(["bash", "-c", f"{script}\n{asked}"], capture_output=True, text=True)
        assert done.stdout == "gloo\n"


def unread():
    """A pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


HOSTS, MANIFEST = ["hosts", "-H", "node1:2"], ["manifest", "slurm", "-np", "2", "--slots", "1", "x"]
FULL = "hvkit: cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize(
    ("words", "output", "status", "said"),
    [(HOSTS, None, 141, ""), (MANIFEST, None, 141, ""), (HOSTS, "/dev/full", 1, FULL)],
)
def test_output_that_nobody_reads_ends_a_command_quietly_and_a_full_disk_does_not(
    words, output, status, said
):
    with open(output or unread(), "wb") as out:
        words = [sys.executable, "-m", "hvkit", *words]
        done = subprocess.run(words, stdout=out, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (status, said)
