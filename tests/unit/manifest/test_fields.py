"""Names and amounts that manifests accept, and those they refuse."""

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvkit.manifest import fields
from hvkit.manifest.fields import cpus, memory, slurm_memory

Check = Callable[[str], Any]
DIGEST = "@sha256:" + "0123456789abcdef" * 4

GOOD_NAMES = [
    (fields.label, ["a", "a-b", "1a", "a" * 63, "a--b"]),
    (fields.job_name, ["a", "mnist-2"]),
    (fields.image, ["hvkit", "hvkit:1.0", "team/hvkit", "reg.example.com/team/hvkit:V1"]),
    (fields.image, ["localhost:5000/hvkit", f"hvkit{DIGEST}", f"a.b/c_d__e--f:1{DIGEST}"]),
    (fields.slurm_name, ["gpu", "gpu_a100.large", "team+1@site", "1"]),
    (fields.slurm_names, ["gpu", "gpu,cpu"]),
    (fields.sbatch_option, ["--qos=high", "--exclusive", "--mail-user=a@b.c", "--constraint a&b"]),
    (fields.subdomain, ["a", "a.b-c.9", "a" * 253]),
    (fields.duration, ["02:00:00", "1:00:00", "3-12:30:00", "100:00:01"]),
]

REFUSED_NAMES = [
    (fields.label, "1 to 63 lower-case letters, digits and `-`", ["", "-a", "a-", "A", "a_b"]),
    (fields.label, "1 to 63 lower-case letters", ["a.b", "a b", "ä", "a" * 64, "a\n"]),
    (fields.job_name, "must begin with a letter", ["2a"]),
    (fields.job_name, "lower-case letters", ["Mnist", "my_job"]),
    (fields.image, "must be an image", ["", " ", "a b", "Team/hvkit", "hvkit:", "hvkit@sha256:12"]),
    (fields.image, "must be an image", ["-a", "a//b", "http://a/b", "a:b:c", "a/", "/a", "$(X)"]),
    (fields.image, "must be an image", ["a\n", f"a{DIGEST}:1"]),
    (fields.slurm_name, "must be letters, digits", ["", "a b", "-a", "a,b", "$(id)", "'a'", "ä"]),
    (fields.slurm_name, "must be letters, digits", ["a\n#SBATCH --nodes=9"]),
    (fields.slurm_names, "must be letters, digits", ["", "a b"]),
    (fields.subdomain, "at most 253 lower-case", ["", ".", "a.", "a..b", "A", "a-.b", "a" * 254]),
    (
        fields.sbatch_option,
        "one option on one line",
        ["", "qos", "-q", "--", "--=a", "--Qos", "# a"],
    ),
    (fields.sbatch_option, "one option on one line", ["--a=b\n#SBATCH --c", "--a\n", "--a=b\r"]),
    (fields.sbatch_option, "one option on one line", ["--a\x00", "--a=\udcff", "--a="]),
    (fields.duration, "must be HH:MM:SS or DAYS-HH:MM:SS", ["", "30", "10:00", "1-2", "1:60:00"]),
    (fields.duration, "longer than zero", ["00:00:00", "0-00:00:00", "-1:00:00", "UNLIMITED"]),
    (fields.assignment, "must be NAME=VALUE", ["", "A", "=1", "1A=1", "A B=1", "A-B=1", "ä=1"]),
    (fields.utf8, "must be text in UTF-8", ["a\udcff"]),
]


@pytest.mark.parametrize(
    ("check", "text"), [(check, text) for check, texts in GOOD_NAMES for text in texts]
)
def test_good_names_are_accepted(check, text):
    assert check(text) == text


@pytest.mark.parametrize(
    ("check", "accepted", "text"),
    [(check, accepted, text) for check, accepted, texts in REFUSED_NAMES for text in texts],
)
def test_other_names_are_refused(check, accepted, text):
    with pytest.raises(ValueError, match=accepted) as caught:
        check(text)
    assert str(caught.value).endswith(f"got {text!r}")


@pytest.mark.parametrize("text", ["a,", ",a", "a,,b", "a, b"])
def test_each_of_several_partitions_must_be_a_name(text):
    with pytest.raises(ValueError, match="must be letters, digits"):
        fields.slurm_names(text)


@pytest.mark.parametrize(
    ("text", "variable"), [("A=1", ("A", "1")), ("_a9=", ("_a9", "")), ("A=b=c d", ("A", "b=c d"))]
)
def test_a_variable_name_ends_at_the_first_equals_sign(text, variable):
    assert fields.assignment(text) == variable


def test_a_value_that_is_not_utf8_is_refused():
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
    assert str(read(text).times(count)) == product


@pytest.mark.parametrize(
    ("quantity", "value"),
    [
        (cpus("4"), 4),
        (cpus("250m"), Decimal("0.25")),
        (memory("1k"), 1000),
        (memory("1Ki"), 1024),
        (memory("1.5Gi"), 3 * 2**29),
        (memory("2E"), 2 * 10**18),
        (memory("2Ei"), 2 * 2**60),
    ],
)
def test_values_are_cores_and_bytes(quantity, value):
    assert quantity.value == value


@given(st.integers(1, 10**6), st.integers(0, 999), st.sampled_from("kMGTPE"), st.integers(1, 512))
def test_products_are_exact_and_valid_in_kubernetes(whole, thousandths, unit, count):
    quantity = memory(f"{whole}.{thousandths:03}{unit}")
    product = str(quantity.times(count))
    assert KUBERNETES.match(product)
    assert memory(product).value == quantity.value * count


REFUSED_AMOUNTS = [
    (cpus, "a number of cores such as 4, 0.5 or 500m", ["", "0", "0m", "-1", "+1", "four", "4 "]),
    (
        cpus,
        "a number of cores",
        ["4Gi", "0.0005", "0.5m", "1e3", ".5", "4.", "1,5", "\u0664", "nan"],
    ),
    (memory, "a number and a unit of Kubernetes such as 512Mi or 16Gi", ["", "16", "0Gi", "16GB"]),
    (memory, "a number and a unit", ["16g", "16 Gi", "-1Gi", "16K", "400m", "1.5.2Gi", "16gi"]),
    (memory, "a number and a unit", ["0.00001k", "1e3", "Gi", "16Gi\n"]),
    (slurm_memory, "a whole number and K, M, G or T such as 512M or 16G", ["", "16", "0G", "16GB"]),
    (slurm_memory, "a whole number and K, M, G or T", ["16Gi", "1.5G", "16g", "-1G", "\u0664G"]),
]


@pytest.mark.parametrize(
    ("read", "accepted", "text"),
    [(read, accepted, text) for read, accepted, texts in REFUSED_AMOUNTS for text in texts],
)
def test_other_amounts_are_refused(read, accepted, text):
    with pytest.raises(ValueError, match=re.escape(f"must be {accepted}")) as caught:
        read(text)
    assert str(caught.value).endswith(f"got {text!r}")
