"""``hvkit manifest`` hands options on, and names what is wrong with them."""

import shlex
import subprocess
import sys

import pytest

from hvkit import cli


@pytest.mark.parametrize("system", ["mpijob --image a", "slurm"])
def test_hvkit_run_gets_no_options_by_default(written, system):
    words = written(f"{system} -np 8 --slots 4 python train.py").split()
    for option in ("-x", "--lost-after", "--prefix", "--timestamps", "--log-dir", "--show"):
        assert option not in words


MPIJOB = "mpijob --image hvkit:1 -np 8 --slots 4"
SLURM = "slurm -np 8 --slots 4"
BAD_NUMBER = "must be a positive integer, got"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("", "arguments are required: SYSTEM"),
        ("pbs", "'pbs' (choose from"),
        (f"{MPIJOB}", "COMMAND is missing: give the script or program that every rank runs, such"),
        (f"{MPIJOB} --", "COMMAND is missing"),
        (f"{MPIJOB} -- --epochs 2", "COMMAND must begin with a script"),
        (f"{MPIJOB} ''", "COMMAND must begin with a script"),
        ("mpijob -np 8 --slots 4 python", "--image is missing"),
        ("mpijob --image a --slots 4 python", "-np is missing"),
        ("slurm -np 8 python", "--slots is missing"),
        ("mpijob --imag a -np 8 --slots 4 python", "unrecognized arguments: --imag"),
        (f"{SLURM} --image a python", "unrecognized arguments: --image"),
        (f"{MPIJOB} --image A/b python", "argument --image: must be an image"),
        (f"{MPIJOB} --slots 0 python", f"argument --slots: {BAD_NUMBER} '0'"),
        (f"{MPIJOB} -np four python", f"--num-proc: {BAD_NUMBER} 'four'"),
        (f"{MPIJOB} --gpus 0 python", f"argument --gpus: {BAD_NUMBER} '0'"),
        (f"{MPIJOB} --name Big python", "argument --name: must be 1 to 63 lower-case"),
        (f"{MPIJOB} --namespace a_b python", "argument --namespace: must be 1 to 63"),
        (f"{MPIJOB} --cpus 4Gi python", "argument --cpus: must be a number of cores"),
        (f"{MPIJOB} --memory 16 python", "argument --memory: must be a number and a unit"),
        (f"{MPIJOB} --shm-size 0Gi python", "argument --shm-size: must be a number and"),
        (f"{MPIJOB} --env A python", "argument --env: must be NAME=VALUE"),
        (f"{MPIJOB} --env A=1 --env A=2 python", "argument --env: A is set 2 times: set it once"),
        (f"{MPIJOB} --volume data python", "argument --volume: must be CLAIM:PATH"),
        (f"{MPIJOB} --volume a:/x --volume b:/x python", "argument --volume: /x is set 2 times"),
        (f"{MPIJOB} --lost-after 1 python", "argument --lost-after: must be a number of seconds"),
        (f"{MPIJOB} --show x python", "--show: must be ranks, such as 0 or 0,4-7, got 'x'"),
        (f"{MPIJOB} --retries -1 python", "argument --retries:"),
        (f"{MPIJOB} --retries x python", "must be a whole number, such as 0 or 3, got 'x'"),
        (f"{MPIJOB} --show 0,,3 python", "--show: must be ranks, such as 0 or 0,4-7, got '0,,3'"),
        (f"{MPIJOB} --show 1- python", "--show: must be ranks, such as 0 or 0,4-7, got '1-'"),
        (f"{MPIJOB} --show 4-7-9 python", "--show: must be ranks, such as 0 or 0,4-7, got '4-7-9'"),
        (f"{SLURM} --show 4-0 python", "a range must begin with its smaller rank, got '4-0'"),
        (f"{SLURM} --show 0,8 python", "argument --show: there is no rank 8: ranks are numbered"),
        (f"{SLURM} --lost-after soon python", "from 2 to 86400, got 'soon'"),
        (f"{SLURM} --log-dir '\udcff' python", "must be text in UTF-8"),
        (f"{SLURM} --sbatch=qos=high python", "argument --sbatch: must be one option on one line"),
        (f"{SLURM} --sbatch=--nodes=9 python", "--sbatch --nodes=9: -np and --slots set this"),
        (f"{SLURM} --sbatch='--ntasks 9' python", "--sbatch --ntasks 9: -np and --slots set"),
        (f"{SLURM} --sbatch=--ntasks-per-node=1 python", "--ntasks-per-node=1: -np and --slots"),
        (f"{SLURM} --cpus 0.5 python", f"argument --cpus: {BAD_NUMBER} '0.5'"),
        (f"{SLURM} --memory 16Gi python", "argument --memory: must be a whole number and"),
        (f"{SLURM} --time 30 python", "argument --time: must be HH:MM:SS"),
        (f"{SLURM} --partition 'a b' python", "argument --partition: must be letters"),
        (f"{SLURM} --account '' python", "argument --account: must be letters"),
        (f"{SLURM} --name 'a b' python", "argument --name: must be letters"),
        (f"{SLURM} python '\udcff'", "must be text in UTF-8"),
    ],
)
def test_wrong_arguments_are_named_and_nothing_is_written(refusal, line, complaint):
    assert complaint in refusal(line)


def test_slots_that_stay_idle_are_mentioned(capsys):
    assert cli.main(["manifest", "slurm", "-np", "7", "--slots", "4", "python", "train.py"]) == 0
    assert capsys.readouterr().err == (
        "hvkit: note: 7 ranks on 2 x 4 slots; idle slots on the last host: 1, with the resources "
        "that are reserved for them\n"
    )


def test_no_framework_is_imported():
    code = (
        "import sys; from hvkit import cli; cli.main(sys.argv[1:]); "
        "print(sorted({'torch', 'tensorflow', 'keras', 'horovod'} & sys.modules.keys()))"
    )
    words = shlex.split(f"manifest {SLURM} python train.py")
    ran = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout.splitlines()[-1] == "[]"
