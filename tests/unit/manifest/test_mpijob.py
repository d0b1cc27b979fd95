"""The resources that an MPIJob requests from the cluster, and what its pods run."""

import shlex

import pytest
import yaml
from manifest_lines import COMMAND, MPIJOB

from hvkit.cli import run
from hvkit.cli.command_line import CommandParser

POD = """
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  seccompProfile: {type: RuntimeDefault}
  fsGroup: 1000
  fsGroupChangePolicy: OnRootMismatch
imagePullSecrets: [{name: registry}]
tolerations:
- {key: nvidia.com/gpu, operator: Exists}
- {key: pool, operator: Equal, value: train, effect: NoSchedule}
"""
CONTAINER = """
image: hvkit:1
securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
"""
MOUNTS = """
- {name: claim-1, mountPath: /data}
- {name: claim-2, mountPath: /out}
- {name: claim-1, mountPath: /more}
"""
CLAIMS = """
- {name: claim-1, persistentVolumeClaim: {claimName: d}}
- {name: claim-2, persistentVolumeClaim: {claimName: o.a}}
"""
LAUNCHER = """
name: launcher
resources: {limits: {cpu: "2", memory: "2Gi"}}
command: [hvkit]
env:
- {name: RATE, value: "1e-3"}
- {name: TOKEN, valueFrom: {secretKeyRef: {name: tracker, key: api-token}}}
"""
# The resources are those of all of a worker's slots.
WORKER = """
name: worker
resources: {limits: {cpu: "2000m", memory: "6Gi", nvidia.com/gpu: 4}}
command: [hvkit-sshd]
ports: [{name: ssh, containerPort: 2222}]
startupProbe: {tcpSocket: {port: 2222}, periodSeconds: 1, failureThreshold: 60}
lifecycle: {preStop: {exec: {command: [hvkit-leave]}}}
"""
SHARED_MEMORY = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "512M"}}


@pytest.fixture
def job(documents):
    def make(options="", size="-np 8 --slots 4"):
        (document,) = documents(f"mpijob --image hvkit:1 {size} {options} {COMMAND}")
        return document

    return make


def pod(document, which):
    return document["spec"]["mpiReplicaSpecs"][which]["template"]["spec"]


def container(document, which):
    (found,) = pod(document, which)["containers"]
    return found


def test_a_job_with_every_option(documents):
    (document,) = documents(f"{MPIJOB} {COMMAND}")
    common, of_pods, mounts, claims, launcher, worker = map(
        yaml.safe_load, (CONTAINER, POD, MOUNTS, CLAIMS, LAUNCHER, WORKER)
    )
    labels = {"kueue.x-k8s.io/queue-name": "training"}
    assert document["metadata"] == {"name": "digits", "namespace": "ml", "labels": labels}
    spec = document["spec"]
    replicas = spec.pop("mpiReplicaSpecs")
    assert spec == {
        "slotsPerWorker": 4,
        "mpiImplementation": "OpenMPI",
        "sshAuthMountPath": "/home/hvkit/.ssh",
        "launcherCreationPolicy": "WaitForWorkersReady",
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 2},
    }
    words = (
        "run -np 8 -x RATE -x TOKEN --lost-after 7.5 --grace 60 --prefix --timestamps "
        f"--log-dir=/out/logs --show 0,4-7 {COMMAND}"
    )
    launcher |= {**common, "args": shlex.split(words), "volumeMounts": mounts}
    template = {"spec": {**of_pods, "containers": [launcher], "volumes": claims}}
    assert replicas["Launcher"] == {"replicas": 1, "restartPolicy": "Never", "template": template}
    at_memory = {"name": "shared-memory", "mountPath": "/dev/shm"}
    worker |= {**common, "volumeMounts": [at_memory, *mounts]}
    template["spec"] |= {
        "containers": [worker],
        "volumes": [SHARED_MEMORY, *claims],
        "nodeSelector": {"example.com/gpu": "a100"},
        "terminationGracePeriodSeconds": 60,
    }
    assert replicas["Worker"] == {"replicas": 2, "restartPolicy": "OnFailure", "template": template}
    # `hvkit run` understands its words.
    parser = CommandParser()
    run.add_to(parser.add_subparsers())
    args = parser.parse_args(launcher["args"])
    assert (args.np, args.lost_after, args.command) == (8, 7.5, COMMAND.split())
    assert [name for name, _ in args.variables] == ["RATE", "TOKEN"]


def test_a_job_without_options(job):
    document = job()
    assert document["metadata"] == {"name": "hvkit"}
    assert document["spec"]["runPolicy"]["backoffLimit"] == 0
    launcher, worker = (container(document, which) for which in ("Launcher", "Worker"))
    assert launcher["args"] == ["run", "-np", "8", *COMMAND.split()]
    assert launcher["resources"]["limits"] == {"cpu": "1", "memory": "1Gi"}
    assert "env" not in launcher
    assert "resources" not in worker
    assert worker["volumeMounts"] == [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    for which in ("Launcher", "Worker"):
        assert "fsGroup" not in pod(document, which)["securityContext"]
        assert "terminationGracePeriodSeconds" not in pod(document, which)
    (memory,) = pod(document, "Worker")["volumes"]
    assert memory["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}


@pytest.mark.parametrize(
    ("ranks", "slots", "workers", "slots_per_worker"),
    [(8, 4, 2, 4), (4, 4, 1, 4), (3, 4, 1, 3)],
)
def test_there_are_as_few_workers_as_possible(job, ranks, slots, workers, slots_per_worker):
    document = job("--gpus 2", size=f"-np {ranks} --slots {slots}")
    assert document["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] == workers
    assert document["spec"]["slotsPerWorker"] == slots_per_worker
    limits = container(document, "Worker")["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": 2 * slots_per_worker}


@pytest.mark.parametrize(("grace", "seconds"), [(30.0, None), (119.5, 120)])
def test_a_worker_lives_as_long_as_its_ranks_may_take_to_leave(job, grace, seconds):
    document = job(f"--grace {grace}")
    assert pod(document, "Worker").get("terminationGracePeriodSeconds") == seconds
    assert "terminationGracePeriodSeconds" not in pod(document, "Launcher")


def test_command_and_variables_are_escaped(documents):
    words = "-np 8 --slots 4 --env 'A=$(B)' sh -c 'echo $(HOME)'"
    (document,) = documents(f"mpijob --image hvkit:1 {words}")
    launcher = container(document, "Launcher")
    assert launcher["args"][-1] == "echo $$(HOME)"
    assert launcher["env"] == [{"name": "A", "value": "$$(B)"}]


def test_names_and_sizes_up_to_their_limits_are_accepted(job):
    job(f"--name {'a' * 54}")
    job(f"--name {'a' * 53}", size="-np 11 --slots 1")
    job("--memory 513Mi")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (f"-np 1 --slots 1 --name {'a' * 55}", "-launcher would have 64 characters, 63 are allow"),
        (f"-np 11 --slots 1 --name {'a' * 54}", "-worker-10 would have 64 characters, 63 are"),
        (
            "-np 8 --slots 4 --memory 512Mi",
            "--shm-size 2Gi must be less than the memory of a worker, 2048Mi (512Mi for each of 4 "
            "ranks), because it counts towards that memory: lower --shm-size or raise --memory",
        ),
        (
            "-np 1 --slots 1 --env NVIDIA_VISIBLE_DEVICES=1",
            "--env NVIDIA_VISIBLE_DEVICES: the MPI operator sets this",
        ),
        (
            "-np 1 --slots 1 --env OMPI_MCA_plm_rsh_args=1",
            "--env OMPI_MCA_plm_rsh_args: the MPI operator sets this",
        ),
    ],
)
def test_values_that_the_operator_would_refuse_or_change_are_refused(refusal, options, complaint):
    assert complaint in refusal(f"mpijob --image hvkit:1 {options} {COMMAND}")
