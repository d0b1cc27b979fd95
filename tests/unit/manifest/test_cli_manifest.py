"""``hvkit manifest`` writes manifests and reports wrong arguments."""

import shlex
import subprocess
import sys

import pytest
import yaml
from mpijob_schema import problems
from mpijobs import container

from hvkit import cli

MPIJOB = "manifest mpijob --image hvkit:1 -np 8 --slots 4"
SLURM = "manifest slurm -np 8 --slots 4"


def written(capsys, line):
    assert cli.main(shlex.split(line)) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def test_an_mpijob_with_all_options(capsys):
    line = (
        f"{MPIJOB} --gpus 1 --name digits --namespace ml --cpus 500m --memory 4Gi --shm-size 1Gi "
        "--env A=1 --env B='x y' --launcher-cpus 2 --launcher-memory 2Gi --retries 2 "
        "--volume d:/data --volume o:/out --log-dir /out/logs --prefix --timestamps "
        "--lost-after 7.5 --show 0,4-7 "
        "-- python train.py --gpus 3 --name x"
    )
    document = yaml.safe_load(written(capsys, line))
    assert problems(document) == []
    assert document["metadata"] == {"name": "digits", "namespace": "ml"}
    assert document["spec"]["runPolicy"]["backoffLimit"] == 2
    launcher, worker = (container(document, which) for which in ("Launcher", "Worker"))
    assert launcher["args"] == shlex.split(
        "run -np 8 -x A -x B --lost-after 7.5 --prefix --timestamps --log-dir=/out/logs "
        "--show 0,4-7 python train.py --gpus 3 --name x"
    )
    for mounts in (launcher["volumeMounts"], worker["volumeMounts"]):
        assert {"/data", "/out"} <= {mount["mountPath"] for mount in mounts}
    assert launcher["env"] == [{"name": "A", "value": "1"}, {"name": "B", "value": "x y"}]
    assert launcher["resources"]["limits"] == {"cpu": "2", "memory": "2Gi"}
    assert worker["resources"]["limits"] == {"cpu": "2000m", "memory": "16Gi", "nvidia.com/gpu": 4}
    assert worker["image"] == launcher["image"] == "hvkit:1"


def test_a_script_with_all_options(capsys):
    line = (
        f"{SLURM} --gpus 1 --cpus 2 --memory 4G --time 1:00:00 --partition a,b --account c "
        "--name d --sbatch=--qos=high --sbatch=--exclusive --env A=1 --env B='x y' --prefix "
        "--timestamps --lost-after 7.5 --log-dir 'my logs' --show 0 python train.py "
        "--time 5"
    )
    script = written(capsys, line)
    assert [text.removeprefix("#SBATCH --") for text in script.splitlines()[1:13]] == [
        "job-name=d",
        "nodes=2",
        "ntasks=8",
        "ntasks-per-node=4",
        "cpus-per-task=2",
        "gres=gpu:4",
        "mem=16G",
        "time=1:00:00",
        "partition=a,b",
        "account=c",
        "qos=high",
        "exclusive",
    ]
    assert script.endswith(
        "exec hvkit run -np 8 -x A=1 -x 'B=x y' --lost-after 7.5 --prefix --timestamps "
        "'--log-dir=my logs' --show 0 python train.py --time 5\n"
    )


@pytest.mark.parametrize("system", ["mpijob --image a", "slurm"])
def test_hvkit_run_gets_no_options_by_default(capsys, system):
    text = written(capsys, f"manifest {system} -np 8 --slots 4 python train.py")
    for option in ("-x", "--lost-after", "--prefix", "--timestamps", "--log-dir", "--show"):
        assert option not in text.replace("\n", " ").split()


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("manifest", "arguments are required: SYSTEM"),
        ("manifest pbs", "'pbs' (choose from"),
        (
            f"{MPIJOB}",
            "COMMAND is missing: give the script or program that every rank runs, such as `scr",
        ),
        (f"{MPIJOB} --", "COMMAND is missing"),
        (f"{MPIJOB} -- --epochs 2", "COMMAND must begin with a script"),
        (f"{MPIJOB} ''", "COMMAND must begin with a script"),
        ("manifest mpijob -np 8 --slots 4 python", "--image is missing"),
        ("manifest mpijob --image a --slots 4 python", "-np is missing"),
        ("manifest slurm -np 8 python", "--slots is missing"),
        (f"{MPIJOB} --gpu 1 python", "unrecognized arguments: --gpu"),
        ("manifest mpijob --imag a -np 8 --slots 4 python", "unrecognized arguments: --imag"),
        (f"{SLURM} --image a python", "unrecognized arguments: --image"),
        (f"{MPIJOB} --image A/b python", "argument --image: must be an image"),
        (f"{MPIJOB} --slots 0 python", "argument --slots: must be a positive integer, got '0'"),
        (f"{MPIJOB} -np four python", "--num-proc: must be a positive integer, got 'four'"),
        (f"{MPIJOB} --gpus 0 python", "argument --gpus: must be a positive integer, got '0'"),
        (f"{MPIJOB} --name Big python", "argument --name: must be 1 to 63 lower-case"),
        (f"{MPIJOB} --namespace a_b python", "argument --namespace: must be 1 to 63"),
        (f"{MPIJOB} --cpus 4Gi python", "argument --cpus: must be a number of cores"),
        (f"{MPIJOB} --memory 16 python", "argument --memory: must be a number and a unit"),
        (f"{MPIJOB} --memory 100Mi python", "--shm-size 2Gi must be less than"),
        (f"{MPIJOB} --shm-size 0Gi python", "argument --shm-size: must be a number and"),
        (f"{MPIJOB} --env A python", "argument --env: must be NAME=VALUE"),
        (f"{MPIJOB} --env A=1 --env A=2 python", "argument --env: A is set twice"),
        (f"{MPIJOB} --env K_MPI_JOB_ROLE=1 python", "--env K_MPI_JOB_ROLE: the MPI operator sets"),
        (f"{MPIJOB} --volume data python", "argument --volume: must be CLAIM:PATH"),
        (
            f"{MPIJOB} --volume a:/dev/shm python",
            "argument --volume: PATH /dev/shm overlaps /dev/shm",
        ),
        (f"{MPIJOB} --volume a:/x --volume b:/x python", "--volume: /x is used 2 times"),
        (f"{MPIJOB} --lost-after 1 python", "argument --lost-after: must be a number of seconds"),
        (
            f"{MPIJOB} --show x python",
            "argument --show: must be ranks, such as 0 or 0,4-7, got 'x'",
        ),
        (f"{SLURM} --show 4-0 python", "a range must begin with its smaller rank, got '4-0'"),
        (f"{SLURM} --show 0,8 python", "argument --show: there is no rank 8: ranks are numbered"),
        (f"{SLURM} --lost-after soon python", "from 2 to 86400, got 'soon'"),
        (f"{SLURM} --log-dir '\udcff' python", "must be text in UTF-8"),
        (f"{SLURM} --env A=1 --env A=2 python", "argument --env: A is set twice"),
        (f"{SLURM} --env A python", "argument --env: must be NAME=VALUE"),
        (f"{SLURM} --sbatch=qos=high python", "argument --sbatch: must be one option on one line"),
        (
            f"{SLURM} --sbatch=--nodes=9 python",
            "--sbatch --nodes=9: the script already has --nodes=2",
        ),
        (f"{MPIJOB} --retries -1 python", "argument --retries:"),
        (f"{MPIJOB} --retries x python", "must be 0 or a positive integer, got 'x'"),
        (f"{SLURM} --cpus 0.5 python", "argument --cpus: must be a positive integer, got '0.5'"),
        (f"{SLURM} --memory 16Gi python", "argument --memory: must be a whole number and"),
        (f"{SLURM} --time 30 python", "argument --time: must be HH:MM:SS"),
        (f"{SLURM} --partition 'a b' python", "argument --partition: must be letters"),
        (f"{SLURM} --account '' python", "argument --account: must be letters"),
        (f"{SLURM} --name 'a b' python", "argument --name: must be letters"),
        (f"{SLURM} python '\udcff'", "must be text in UTF-8"),
    ],
)
def test_wrong_arguments_are_named_and_nothing_is_written(capsys, line, complaint):
    with pytest.raises(SystemExit) as caught:
        cli.main(shlex.split(line))
    assert caught.value.code == 2
    output = capsys.readouterr()
    assert complaint in output.err
    assert output.out == ""


@pytest.mark.parametrize("system", ["mpijob --image a", "slurm"])
def test_slots_that_stay_idle_are_mentioned(capsys, system):
    assert cli.main(shlex.split(f"manifest {system} -np 7 --slots 4 python train.py")) == 0
    assert capsys.readouterr().err == (
        "hvkit: note: 7 ranks on 2 x 4 slots; idle slots on the last host: 1, with the resources "
        "that are reserved for them\n"
    )


def test_no_framework_is_imported():
    code = (
        "import sys; from hvkit import cli; cli.main(sys.argv[1:]); "
        "print(sorted({'torch', 'tensorflow', 'keras', 'horovod'} & sys.modules.keys()))"
    )
    words = shlex.split(f"{SLURM} python train.py")
    ran = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout.splitlines()[-1] == "[]"
