"""The batch script: the resources it requests from Slurm, and the command it runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scripts import write_program

from hvkit.manifest import systems

COMMAND = "python recipes/mnist_torch.py --epochs 2"


@pytest.fixture
def script(written):
    return lambda options="", size="-np 8 --slots 4": written(f"slurm {size} {options} {COMMAND}")


def options(script):
    """The script's options as Slurm reads them: up to the first command."""
    first, *lines = script.splitlines()
    assert first == "#!/bin/bash"
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return [line.removeprefix("#SBATCH --") for line in lines[:end]]


def test_without_options_it_requests_hosts_and_ranks_and_nothing_else(script):
    found = script("--name mnist")
    assert options(found) == ["job-name=mnist", "nodes=2", "ntasks=8", "ntasks-per-node=4"]
    assert found.splitlines()[-3:] == [
        "set -euo pipefail",
        # Programs of this Python come first on PATH.
        f'export PATH={Path(sys.executable).parent}:"$PATH"',
        f"exec hvkit run -np 8 {COMMAND}",
    ]


def test_a_host_gets_the_resources_of_all_its_slots_and_further_options_come_last(script):
    found = script(
        "--gpus 1 --cpus 2 --memory 4G --time 1:00:00 --partition a,b --account c --name d "
        "--sbatch=--qos=high --sbatch=--exclusive --sbatch='--constraint=a&b' --prefix "
        "--timestamps --lost-after 7.5 --log-dir 'my logs' --show 0 --env A=1 --env B='x y'"
    )
    size = ["job-name=d", "nodes=2", "ntasks=8", "ntasks-per-node=4"]
    resources = ["cpus-per-task=2", "gres=gpu:4", "mem=16G", "time=1:00:00"]
    queue = ["partition=a,b", "account=c", "qos=high", "exclusive", "constraint=a&b"]
    assert options(found) == [*size, *resources, *queue]
    assert found.endswith(
        "exec hvkit run -np 8 -x A=1 -x 'B=x y' --lost-after 7.5 --prefix --timestamps "
        f"'--log-dir=my logs' --show 0 {COMMAND}\n"
    )


@pytest.mark.parametrize(
    ("ranks", "slots", "nodes", "per_node"), [(7, 4, 2, 4), (4, 4, 1, 4), (3, 4, 1, 3)]
)
def test_there_are_as_few_hosts_as_possible(script, ranks, slots, nodes, per_node):
    size = [f"nodes={nodes}", f"ntasks={ranks}", f"ntasks-per-node={per_node}"]
    found = options(script("--gpus 2", f"-np {ranks} --slots {slots}"))
    assert found == ["job-name=hvkit", *size, f"gres=gpu:{2 * per_node}"]


def test_with_restarts_the_job_outlives_a_host_and_gets_sigterm_before_its_end(script):
    assert {"no-kill", "signal=B:TERM@60"} <= {*options(script("--max-restarts 3"))}


def executed(script, folder):
    """The arguments that ``hvkit`` gets when bash runs the script."""
    write_program(folder / "hvkit", "printf '%s\\0' \"$@\"")
    script = script.replace(f"export PATH={Path(sys.executable).parent}:", f"PATH={folder}:")
    assert f"PATH={folder}:" in script
    ran = subprocess.run(
        ["bash"],
        input=script.encode(),
        capture_output=True,
        check=True,
        timeout=60,
        env={"PATH": os.environ["PATH"]},
    )
    assert ran.stderr == b""
    return ran.stdout.decode().split("\0")[:-1]


WORDS = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), max_size=3)


@example(["", "a b", "$HOME", "`id`", "'", '"', "\\", "a\n#SBATCH --nodes=9\n", "*", "~", "!!"])
@settings(max_examples=10)
@given(words=WORDS)
def test_words_and_variables_reach_the_command_unchanged(tmp_path_factory, words):
    values = dict.fromkeys(("gpus", "cpus", "memory", "time", "partition", "account"))
    values |= {"name": "a", "sbatch": [], "max_restarts": 0, "np": 8, "slots": 4, "hosts": 2}
    values |= {"env": {"A": "".join(words), "B": ""}, "command": ("python", *words)}
    values["run_options"] = ("--prefix", "--log-dir=my logs")
    script = systems.slurm(values, None)
    passed_on = ["-x", f"A={''.join(words)}", "-x", "B=", *values["run_options"]]
    expected = ["run", "-np", "8", *passed_on, "python", *words]
    assert executed(script, tmp_path_factory.mktemp("programs")) == expected
    assert options(script) == ["job-name=a", "nodes=2", "ntasks=8", "ntasks-per-node=4"]
