"""The resources that an MPIJob requests from the cluster, and its text in YAML."""

import re
from pathlib import Path, PurePosixPath

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from mpijobs import COMMAND, container, full_job, job, read

from hvkit.cli import run
from hvkit.cli.command_parser import CommandParser
from hvkit.manifest.fields import Size, Volume, cpus, memory, volume
from hvkit.manifest.kubernetes import literal, yaml_text


def replicas(document, which):
    found = document["spec"]["mpiReplicaSpecs"][which]
    return found


def limits(document, which):
    found = container(document, which)["resources"]["limits"]
    return found


@pytest.mark.parametrize(
    ("ranks", "slots", "workers", "slots_per_worker"),
    [(8, 4, 2, 4), (7, 4, 2, 4), (5, 4, 2, 4), (4, 4, 1, 4), (3, 4, 1, 3), (1, 8, 1, 1)],
)
def test_there_are_as_few_workers_as_possible(ranks, slots, workers, slots_per_worker):
    document = read(job(size=Size.of(ranks, slots)))
    assert replicas(document, "Worker")["replicas"] == workers
    assert document["spec"]["slotsPerWorker"] == slots_per_worker
    assert replicas(document, "Launcher")["replicas"] == 1


def test_a_worker_gets_the_resources_of_all_its_slots():
    document = read(full_job())
    assert limits(document, "Worker") == {"cpu": "2000m", "memory": "6Gi", "nvidia.com/gpu": 4}


def test_a_worker_has_only_the_limits_that_were_given():
    assert "resources" not in container(read(job()), "Worker")
    assert limits(read(job(gpus=2)), "Worker") == {"nvidia.com/gpu": 8}


def test_the_launcher_is_small_and_without_gpus():
    document = read(full_job())
    assert limits(document, "Launcher") == {"cpu": "1", "memory": "1Gi"}
    larger = read(job(launcher_cpus=cpus("4"), launcher_memory=memory("8Gi")))
    assert limits(larger, "Launcher") == {"cpu": "4", "memory": "8Gi"}


def test_shared_memory_of_a_worker_is_memory_of_limited_size():
    document = read(full_job())
    pod = replicas(document, "Worker")["template"]["spec"]
    (found,) = (volume for volume in pod["volumes"] if "emptyDir" in volume)
    assert found["emptyDir"] == {"medium": "Memory", "sizeLimit": "512M"}
    mounts = container(document, "Worker")["volumeMounts"]
    assert [mount for mount in mounts if mount["name"] == found["name"]] == [
        {"name": found["name"], "mountPath": "/dev/shm"}
    ]


def mounted_claims(document, which):
    """The claim that a pod mounts at each path."""
    pod = replicas(document, which)["template"]["spec"]
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in pod.get("volumes", [])
        if "persistentVolumeClaim" in volume
    }
    assert len(set(claims.values())) == len(claims), "two volumes have the same claim"
    mounts = container(document, which).get("volumeMounts", [])
    return {m["mountPath"]: claims[m["name"]] for m in mounts if m["name"] in claims}


@pytest.mark.parametrize("which", ["Launcher", "Worker"])
def test_all_pods_have_the_volumes_and_may_write_to_them(which):
    document = read(full_job())
    assert mounted_claims(document, which) == {
        "/data": "datasets",
        "/out": "results.a",
        "/more": "datasets",
    }
    security = replicas(document, which)["template"]["spec"]["securityContext"]
    assert security["fsGroup"] == security["runAsGroup"]


@pytest.mark.parametrize("which", ["Launcher", "Worker"])
def test_without_volumes_nothing_is_mounted_and_no_group_set(which):
    document = read(job())
    assert mounted_claims(document, which) == {}
    assert "fsGroup" not in replicas(document, which)["template"]["spec"]["securityContext"]


def test_two_volumes_at_one_path_are_refused():
    volumes = [volume("a:/data"), volume("b:/data")]
    with pytest.raises(ValueError, match="--volume: /data is used 2 times: give each its own"):
        job(volume=volumes)


@pytest.mark.parametrize("document", [read(job()), read(full_job())], ids=["minimal", "full"])
def test_hvkit_run_accepts_the_launchers_command_line(document):
    launcher = container(document, "Launcher")
    parser = CommandParser()
    run.add_to(parser.add_subparsers())
    assert launcher["command"] == ["hvkit"]
    args = parser.parse_args(launcher["args"])
    assert args.np == 8
    assert args.command == list(COMMAND)
    set_there = [entry["name"] for entry in launcher.get("env", [])]
    assert [name for name, _ in args.variables] == set_there


def test_the_launcher_passes_options_to_hvkit_run():
    parser = CommandParser()
    run.add_to(parser.add_subparsers())
    args = parser.parse_args(container(read(full_job()), "Launcher")["args"])
    assert (args.lost_after, args.prefix, args.timestamps) == (45.0, True, True)
    assert args.log_dir == Path("/out/logs")


def test_the_launcher_has_the_variables_and_forwards_them_to_all_ranks():
    launcher = container(read(full_job()), "Launcher")
    assert {"name": "RATE", "value": "1e-3"} in launcher["env"]
    assert launcher["args"][3:7] == ["-x", "HVKIT_DATA_DIR", "-x", "RATE"]


def test_nothing_is_root():
    document = read(job())
    assert document["spec"]["sshAuthMountPath"] == "/home/hvkit/.ssh"
    for which in ("Launcher", "Worker"):
        security = replicas(document, which)["template"]["spec"]["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] == 1000


def test_the_launcher_starts_when_the_ssh_servers_answer():
    document = read(job())
    assert document["spec"]["launcherCreationPolicy"] == "WaitForWorkersReady"
    worker = container(document, "Worker")
    assert worker["command"] == ["hvkit-sshd"]
    (port,) = worker["ports"]
    assert worker["startupProbe"]["tcpSocket"]["port"] == port["containerPort"] == 2222


def test_ranks_leave_before_a_worker_is_taken_away():
    worker = container(read(job()), "Worker")
    assert worker["lifecycle"] == {"preStop": {"exec": {"command": ["hvkit-leave"]}}}


@pytest.mark.parametrize(("grace", "seconds"), [(10.0, None), (30.0, None), (119.5, 120)])
def test_a_worker_lives_as_long_as_its_ranks_may_take_to_leave(grace, seconds):
    document = read(job(grace=grace))
    pod = replicas(document, "Worker")["template"]["spec"]
    assert pod.get("terminationGracePeriodSeconds") == seconds
    assert "terminationGracePeriodSeconds" not in replicas(document, "Launcher")["template"]["spec"]


def test_there_are_no_retries_by_default():
    assert read(job())["spec"]["runPolicy"] == {"cleanPodPolicy": "Running", "backoffLimit": 0}
    assert read(job(retries=3))["spec"]["runPolicy"]["backoffLimit"] == 3
    assert replicas(read(job()), "Launcher")["restartPolicy"] == "Never"


def test_there_is_no_namespace_or_queue_by_default():
    assert read(job())["metadata"] == {"name": "mnist"}
    assert read(full_job())["metadata"] == {
        "name": "mnist",
        "namespace": "teaching",
        "labels": {"kueue.x-k8s.io/queue-name": "training"},
    }


def test_a_name_too_long_for_the_names_of_its_pods_is_refused():
    read(job(name="a" * 54))
    with pytest.raises(ValueError, match=r"a-launcher would have 64 characters.* 1 shorter"):
        job(name="a" * 55)
    read(job(name="a" * 53, size=Size.of(11, 1)))
    with pytest.raises(ValueError, match=r"-worker-10 would have 64 characters.* 1 shorter"):
        job(name="a" * 54, size=Size.of(11, 1))


def test_shared_memory_must_fit_into_the_memory_of_a_worker():
    message = re.escape(
        "--shm-size 2Gi must be less than the memory of a worker, 2048Mi (512Mi for each of 4 "
        "ranks), because it counts towards that memory: lower --shm-size or raise --memory"
    )
    with pytest.raises(ValueError, match=message):
        job(memory=memory("512Mi"))
    job(memory=memory("513Mi"))


@pytest.mark.parametrize("name", ["NVIDIA_VISIBLE_DEVICES", "OMPI_MCA_plm_rsh_args"])
def test_variables_that_would_be_overwritten_are_refused(name):
    with pytest.raises(ValueError, match=f"--env {name}: the MPI operator sets this"):
        job(variables={name: "1"})


def expanded(text, variables):
    """Arguments and values after Kubernetes has expanded variables."""
    escape_or_reference = re.compile(r"\$\$|\$\(([^)]*)\)")
    return escape_or_reference.sub(
        lambda found: "$" if found[0] == "$$" else variables.get(found[1], found[0]), text
    )


@given(st.text(alphabet="$()A {}"))
def test_kubernetes_expands_nothing_in_escaped_text(text):
    assert expanded(literal(text), {"A": "replaced", "": "replaced"}) == text


def test_command_and_variables_are_escaped():
    document = read(job(command=("sh", "-c", "echo $(HOME)"), variables={"A": "$(B)"}))
    launcher = container(document, "Launcher")
    assert launcher["args"][-1] == "echo $$(HOME)"
    assert launcher["env"][-1] == {"name": "A", "value": "$$(B)"}


@pytest.mark.parametrize(
    ("claim", "path"),
    [
        ("data", "/data"),
        ("results.of-team1", "/home/hvkit/runs"),
        ("a" * 253, "/a b/c"),
        ("a" * 100, "/usr/local/share/data"),
        ("a", "/dev/shmem"),
    ],
)
def test_a_volume_is_a_claim_and_a_path(claim, path):
    assert volume(f"{claim}:{path}") == Volume(claim, PurePosixPath(path))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "must be CLAIM:PATH, such as datasets:/data, got ''"),
        ("/data", "must be CLAIM:PATH"),
        (":/data", "lower-case letters, digits, `-` and `.`, .*got ''"),
        ("Data:/data", "lower-case letters"),
        ("a..b:/data", "lower-case letters"),
        ("-a:/data", "lower-case letters"),
        ("a_b:/data", "lower-case letters"),
        ("a\n:/data", "lower-case letters"),
        ("a" * 254 + ":/data", "at most 253"),
        ("a:", "PATH must be absolute, such as /data, .*got ''"),
        ("a:data", "PATH must be absolute"),
        ("a:/data/../etc", "without .*`..`,"),
        ("a:/data/", "or a `/` at the end"),
        ("a://data", "without .*`//`"),
        ("a:/./data", "PATH must be absolute"),
        ("a:/data:ro", "without `:`,"),
        ("a:/da\nta", "PATH must be printable"),
    ],
)
def test_other_volumes_are_refused(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        volume(text)


@pytest.mark.parametrize(
    ("path", "taken"),
    [
        ("/dev/shm", "/dev/shm"),
        ("/dev/shm/data", "/dev/shm"),
        ("/dev", "/dev/shm"),
        ("/", "/home/hvkit/.ssh"),
        ("/home/hvkit", "/home/hvkit/.ssh"),
        ("/home/hvkit/.ssh", "/home/hvkit/.ssh"),
        ("/etc/mpi", "/etc/mpi"),
        ("/opt", "/opt/venv"),
        ("/usr", "/usr/bin"),
        ("/proc/1", "/proc"),
    ],
)
def test_a_path_that_the_pods_need_is_refused(path, taken):
    with pytest.raises(ValueError, match=f"PATH {path} overlaps {taken}, which the pods"):
        volume(f"data:{path}")


class LenientLoader(yaml.SafeLoader):
    """Reads numbers and booleans that PyYAML takes for text and other readers do not."""


LenientLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z"),
    list("-+.0123456789"),
)
LenientLoader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"[-+]?(0o[0-7_]+|0b[01_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*)\Z"),
    list("-+0123456789"),
)
LenientLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"[yYnN]\Z"), list("yYnN"))


def loaded(text, loader):
    return yaml.load(text, Loader=loader)


def test_without_quotes_other_yaml_readers_would_find_a_number():
    assert yaml.safe_dump("1e-3").startswith("1e-3")
    assert loaded("1e-3", LenientLoader) == 0.001


AMBIGUOUS = [
    *(
        "1e-3",
        "1e3",
        "-1e5",
        ".5",
        "0o17",
        "0x1f",
        "1_000",
        "12:30",
        "2024-01-01",
        "8",
        "-np",
        "inf",
    ),
    *("y", "N", "no", "on", "null", "~", "true", "", " ", "=", "<<", "# no", "a: b", "a\nb", "a\n"),
    *(
        "\tb",
        "ü",
        "\x07",
        "\u2028",
        "- x",
        "{}",
        "[1]",
        "*a",
        "&a",
        "!a",
        "%a",
        "@a",
        "`a",
        "?",
        "|",
    ),
]


@pytest.mark.parametrize("loader", [yaml.SafeLoader, LenientLoader])
@pytest.mark.parametrize("word", AMBIGUOUS)
def test_ambiguous_text_stays_text(word, loader):
    assert loaded(yaml_text({"args": [word], "key": word}), loader) == {"args": [word], "key": word}


@given(st.text(alphabet=st.characters(codec="utf-8")))
def test_any_text_survives_yaml(text):
    assert loaded(yaml_text({"args": [text]}), LenientLoader) == {"args": [text]}


@given(st.text(alphabet="0123456789.eE+-_xob:yn ", max_size=6))
def test_text_that_resembles_a_number_stays_text(text):
    assert loaded(yaml_text({"args": [text]}), LenientLoader) == {"args": [text]}


def test_numbers_and_booleans_keep_their_types():
    document = {"replicas": 2, "suspend": False, "list": [1, "1"]}
    assert loaded(yaml_text(document), LenientLoader) == document


def test_fields_keep_their_order_and_lines_are_not_folded():
    assert yaml_text({"b": "word " * 40, "a": 1}) == f"b: '{'word ' * 40}'\na: 1\n"
