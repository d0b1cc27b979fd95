"""Names and amounts that manifests accept, and those they refuse."""

import re
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvkit.manifest import fields
from hvkit.manifest.fields import cpus, memory, slurm_memory, volume

DIGEST = "@sha256:" + "0123456789abcdef" * 4

LONG = "a" * 253


@pytest.mark.parametrize(
    ("check", "texts"),
    [
        (fields.label, ["a", "a-b", "1a", "a" * 63, "a--b"]),
        (fields.job_name, ["a", "mnist-2"]),
        (fields.image, ["hvkit", "hvkit:1.0", "team/hvkit", "reg.example.com/team/hvkit:V1"]),
        (fields.image, ["localhost:5000/hvkit", f"hvkit{DIGEST}", f"a.b/c_d__e--f:1{DIGEST}"]),
        (fields.slurm_name, ["gpu", "gpu_a100.large", "team+1@site", "1"]),
        (fields.slurm_names, ["gpu", "gpu,cpu"]),
        (fields.sbatch_option, ["--qos=high", "--exclusive", "--mail-user=a@b.c", "--gpu a&b"]),
        (fields.subdomain, ["a", "a.b-c.9", LONG]),
        (fields.duration, ["02:00:00", "1:00:00", "3-12:30:00", "100:00:01"]),
    ],
)
def test_good_names_are_accepted(check, texts):
    assert [check(text) for text in texts] == texts


@pytest.mark.parametrize(
    ("check", "accepted", "texts"),
    [
        (fields.label, "1 to 63 lower-case letters, digits and `-`", ["", "-a", "a-", "A", "a_b"]),
        (fields.label, "1 to 63 lower-case letters", ["a.b", "a b", "ä", "a" * 64, "a\n"]),
        (fields.job_name, "with a letter first", ["2a"]),
        (fields.job_name, "lower-case letters", ["Mnist", "my_job"]),
        (fields.image, "an image", ["", " ", "a b", "Team/hvkit", "hvkit:", "hvkit@sha256:12"]),
        (fields.image, "an image", ["-a", "a//b", "http://a/b", "a:b:c", "a/", "/a", "$(X)"]),
        (fields.image, "an image", ["a\n", f"a{DIGEST}:1"]),
        (fields.slurm_name, "letters, digits", ["", "a b", "-a", "a,b", "$(id)", "'a'", "ä"]),
        (fields.slurm_name, "letters, digits", ["a\n#SBATCH --nodes=9"]),
        (fields.slurm_names, "or several: a,b", ["", "a b", "a,", ",a", "a,,b", "a, b"]),
        (
            fields.subdomain,
            "at most 253 lower-case",
            ["", ".", "a.", "a..b", "A", "a-.b", f"{LONG}a"],
        ),
        (fields.sbatch_option, "one option on", ["", "qos", "-q", "--", "--=a", "--Qos", "# a"]),
        (
            fields.sbatch_option,
            "one option on",
            ["--a=b\n#SBATCH --c", "--a\n", "--a=b\r"],
        ),
        (fields.sbatch_option, "one option on", ["--a\x00", "--a=\udcff", "--a="]),
        (
            fields.duration,
            "must be HH:MM:SS or DAYS-HH:MM:SS",
            ["", "30", "10:00", "1-2", "1:60:00"],
        ),
        (fields.duration, "longer than zero", ["00:00:00", "0-00:00:00", "-1:00:00", "UNLIMITED"]),
        (fields.assignment, "NAME=VALUE", ["", "A", "=1", "1A=1", "A B=1", "A-B=1", "ä=1"]),
        (fields.utf8, "must be text in UTF-8", ["a\udcff"]),
        (
            cpus,
            "cores such as 4, 0.5 or 500m",
            ["", "0", "0m", "-1", "+1", "four", "4 "],
        ),
        (cpus, "a number of cores", ["4Gi", "0.0005", "0.5m", "1e3", ".5", "4.", "1,5", "\u0664"]),
        (memory, "a number and a unit of Kubernetes such as 512Mi or 16Gi", ["", "16", "0Gi"]),
        (memory, "a number and a unit", ["16g", "16 Gi", "-1Gi", "16K", "400m", "1.5.2Gi", "16gi"]),
        (memory, "a number and a unit", ["0.00001k", "1e3", "Gi", "16Gi\n", "16GB"]),
        (slurm_memory, "a whole number and K, M, G or T such as 512M or 16G", ["", "16", "0G"]),
        (slurm_memory, "a whole number and K", ["16Gi", "1.5G", "16g", "-1G", "\u0664G", "16GB"]),
    ],
)
def test_other_texts_are_refused(check, accepted, texts):
    for text in texts:
        with pytest.raises(ValueError, match=accepted) as caught:
            check(text)
        assert str(caught.value).endswith(f"got {text!r}")


def test_a_variable_name_ends_at_the_first_equals_sign():
    assert [fields.assignment(text) for text in ("A=1", "_a9=", "A=b=c d")] == [
        ("A", "1"),
        ("_a9", ""),
        ("A", "b=c d"),
    ]
    with pytest.raises(ValueError, match="must be text in UTF-8"):
        fields.assignment("A=\udcff")


# The pattern for quantities in the resource definition.
KUBERNETES = re.compile(
    r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))"
    r"(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$"
)


@pytest.mark.parametrize(
    ("read", "text", "count", "product"),
    [
        (cpus, "4", 3, "12"),
        (cpus, "0.5", 3, "1.5"),
        (cpus, "0.5", 4, "2"),
        (cpus, "500m", 4, "2000m"),
        (memory, "16Gi", 4, "64Gi"),
        (memory, "1.5Gi", 2, "3Gi"),
        (memory, "512M", 10, "5120M"),
        (slurm_memory, "16G", 4, "64G"),
    ],
)
def test_products_keep_the_unit(read, text, count, product):
    assert str(read(text) * count) == product


def test_values_are_cores_and_bytes():
    assert [cpus(text).value for text in ("4", "250m")] == [4, Decimal("0.25")]
    texts = ("1k", "1Ki", "1.5Gi", "2E", "2Ei")
    assert [memory(text).value for text in texts] == [
        1000,
        1024,
        3 * 2**29,
        2 * 10**18,
        2 * 2**60,
    ]


@settings(max_examples=50)
@given(st.integers(1, 10**6), st.integers(0, 999), st.sampled_from("kMGTPE"), st.integers(1, 512))
def test_products_are_exact_and_valid_in_kubernetes(whole, thousandths, unit, count):
    quantity = memory(f"{whole}.{thousandths:03}{unit}")
    product = str(quantity * count)
    assert KUBERNETES.match(product)
    assert memory(product).value == quantity.value * count


@pytest.mark.parametrize(
    ("claim", "path"),
    [("data", "/data"), ("a.b-c1", "/home/hvkit/runs"), (LONG, "/a b/c"), ("a", "/dev/shmem")],
)
def test_a_volume_is_a_claim_and_a_path(claim, path):
    assert volume(f"{claim}:{path}") == (path, claim)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "must be CLAIM:PATH, such as datasets:/data, got ''"),
        ("/data", "must be CLAIM:PATH"),
        (":/data", "lower-case letters, digits, `-` and `.`, .*got ''"),
        ("a:", "PATH must be absolute and printable, such as /data, .*got ''"),
        ("a:data", "PATH must be absolute"),
        ("a:/data/../etc", "without .*`..`,"),
        ("a:/data/", "or a `/` at the end"),
        ("a://data", "without .*`//`"),
        ("a:/./data", "PATH must be absolute"),
        ("a:/data:ro", "without `:`,"),
        ("a:/da\nta", "PATH must be absolute and printable"),
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
