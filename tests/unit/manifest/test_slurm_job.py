"""The batch script: the resources it requests from Slurm, and the command it runs."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvkit.manifest import slurm_job
from hvkit.manifest.fields import HvkitRun, Size, slurm_memory

SIZE = Size.of(8, 4)
COMMAND = ("python", "recipes/mnist_torch.py", "--epochs", "2")


def job(*, size=SIZE, command=COMMAND, variables=None, run_options=(), **changes):
    """The script of a job of 8 ranks on 2 hosts, everything else at its default."""
    defaults = {
        "name": "mnist",
        "gpus": None,
        "cpus": None,
        "memory": None,
        "time": None,
        "partition": None,
        "account": None,
        "sbatch": [],
        "max_restarts": 0,
    }
    assert changes.keys() <= defaults.keys()
    run = HvkitRun(size, command, variables or {}, run_options)
    return slurm_job.script({**defaults, **changes}, run)


def options(job):
    """The script's options as Slurm reads them: up to the first command."""
    first, *lines = job.splitlines()
    assert first == "#!/bin/bash"
    found = {}
    for line in lines:
        if not line.startswith("#"):
            break
        name, value = line.removeprefix("#SBATCH --").split("=", 1)
        assert name not in found
        found[name] = value
    return found


def test_by_default_it_requests_hosts_and_ranks_and_nothing_else():
    assert options(job()) == {
        "job-name": "mnist",
        "nodes": "2",
        "ntasks": "8",
        "ntasks-per-node": "4",
    }


def test_a_host_gets_the_resources_of_all_its_slots():
    requested = options(
        job(
            gpus=1,
            cpus=6,
            memory=slurm_memory("16G"),
            time="02:00:00",
            partition="gpu,long",
            account="teaching",
        )
    )
    assert requested == {
        **options(job()),
        "cpus-per-task": "6",
        "gres": "gpu:4",
        "mem": "64G",
        "time": "02:00:00",
        "partition": "gpu,long",
        "account": "teaching",
    }


@pytest.mark.parametrize(
    ("ranks", "slots", "nodes", "per_node"),
    [(7, 4, 2, 4), (4, 4, 1, 4), (3, 4, 1, 3), (9, 4, 3, 4)],
)
def test_there_are_as_few_hosts_as_possible(ranks, slots, nodes, per_node):
    requested = options(job(size=Size.of(ranks, slots), gpus=2))
    assert requested["ntasks"] == str(ranks)
    assert requested["nodes"] == str(nodes)
    assert requested["ntasks-per-node"] == str(per_node)
    assert requested["gres"] == f"gpu:{2 * per_node}"


def test_with_restarts_the_job_outlives_a_host_and_gets_sigterm_before_its_end():
    script = job(max_restarts=3)
    assert "#SBATCH --no-kill\n" in script
    assert "#SBATCH --signal=B:TERM@60\n" in script
    assert "--no-kill" not in job()


def test_programs_of_this_python_come_first_on_path():
    folder = Path(sys.executable).parent
    assert f'export PATH={folder}:"$PATH"\n' in job()


def executed(job, folder):
    """The arguments that ``hvkit`` gets when bash runs the script."""
    fake = folder / "hvkit"
    fake.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n", encoding="utf-8")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    script = job.replace(f"export PATH={Path(sys.executable).parent}:", f"PATH={folder}:")
    assert f"PATH={folder}:" in script
    ran = subprocess.run(
        ["bash"],
        input=script.encode(),
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
        env={"PATH": os.environ["PATH"]},
    )
    return ran.stdout.decode().split("\0")[:-1]


def test_further_sbatch_options_come_last():
    script = job(sbatch=["--qos=high", "--exclusive", "--constraint=a&b"])
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert lines[-3:] == ["#SBATCH --qos=high", "#SBATCH --exclusive", "#SBATCH --constraint=a&b"]
    assert len(lines) == len(options(job())) + 3


def test_options_that_the_script_has_already_are_refused():
    with pytest.raises(ValueError, match="--sbatch --nodes=3: the script already has --nodes=2"):
        job(sbatch=["--nodes=3"])
    with pytest.raises(
        ValueError, match="--sbatch --gres x:1: the script already has --gres=gpu:4"
    ):
        job(gpus=1, sbatch=["--gres x:1"])
    assert "#SBATCH --gres=x:1\n" in job(sbatch=["--gres=x:1"])


def test_it_runs_hvkit_run_in_the_allocation(tmp_path):
    assert executed(job(), tmp_path) == ["run", "-np", "8", *COMMAND]


def test_hvkit_run_gets_variables_and_options_unchanged(tmp_path):
    value = "a b $HOME `id` ' \" \\ \n#SBATCH --nodes=9 = *"
    changed = job(variables={"A": value, "B": ""}, run_options=("--prefix", "--log-dir=my logs"))
    passed_on = ["-x", f"A={value}", "-x", "B=", "--prefix", "--log-dir=my logs"]
    assert executed(changed, tmp_path) == ["run", "-np", "8", *passed_on, *COMMAND]
    assert options(changed) == options(job())


WORDS = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), max_size=3)


@example(["", "a b", "$HOME", "`id`", "'", '"', "\\", "a\n#SBATCH --nodes=9\n", "*", "~", "!!"])
@settings(max_examples=25)
@given(words=WORDS)
def test_words_of_the_command_reach_it_unchanged(tmp_path_factory, words):
    folder = tmp_path_factory.mktemp("programs")
    assert executed(job(command=("python", *words)), folder) == [
        "run",
        "-np",
        "8",
        "python",
        *words,
    ]
    assert options(job(command=("python", *words))) == options(job())


@given(words=WORDS)
@settings(max_examples=25)
def test_bash_accepts_it(words):
    script = job(command=("python", *words), gpus=1, time="1:00:00")
    checked = subprocess.run(
        ["bash", "-n"], input=script.encode(), capture_output=True, check=False, timeout=60
    )
    assert checked.returncode == 0
    assert checked.stderr == b""


def test_it_ends_at_the_first_error():
    lines = [line for line in job().splitlines() if not line.startswith("#")]
    assert lines[0] == "set -euo pipefail"
    assert lines[-1].startswith("exec hvkit run ")
