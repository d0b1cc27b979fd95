"""Names that are accepted, and those that are not."""

from collections.abc import Callable
from typing import Any

import pytest

from hvkit.manifest import names

Check = Callable[[str], Any]
DIGEST = "@sha256:" + "0123456789abcdef" * 4

ACCEPTED: list[tuple[Check, list[str]]] = [
    (names.label, ["a", "a-b", "1a", "a" * 63, "a--b"]),
    (names.job_name, ["a", "mnist-2"]),
    (names.image, ["hvkit", "hvkit:1.0", "team/hvkit", "reg.example.com/team/hvkit:V1"]),
    (names.image, ["localhost:5000/hvkit", f"hvkit{DIGEST}", f"a.b/c_d__e--f:1{DIGEST}"]),
    (names.slurm_name, ["gpu", "gpu_a100.large", "team+1@site", "1"]),
    (names.slurm_names, ["gpu", "gpu,cpu"]),
    (names.sbatch_option, ["--qos=high", "--exclusive", "--mail-user=a@b.c", "--constraint a&b"]),
    (names.subdomain, ["a", "a.b-c.9", "a" * 253]),
    (names.duration, ["02:00:00", "1:00:00", "3-12:30:00", "100:00:01"]),
]

REFUSED: list[tuple[Check, str, list[str]]] = [
    (names.label, "1 to 63 lower-case letters, digits and `-`", ["", "-a", "a-", "A", "a_b"]),
    (names.label, "1 to 63 lower-case letters", ["a.b", "a b", "ä", "a" * 64, "a\n"]),
    (names.job_name, "must begin with a letter", ["2a"]),
    (names.job_name, "lower-case letters", ["Mnist", "my_job"]),
    (names.image, "must be an image", ["", " ", "a b", "Team/hvkit", "hvkit:", "hvkit@sha256:12"]),
    (names.image, "must be an image", ["-a", "a//b", "http://a/b", "a:b:c", "a/", "/a", "$(X)"]),
    (names.image, "must be an image", ["a\n", f"a{DIGEST}:1"]),
    (names.slurm_name, "must be letters, digits", ["", "a b", "-a", "a,b", "$(id)", "'a'", "ä"]),
    (names.slurm_name, "must be letters, digits", ["a\n#SBATCH --nodes=9"]),
    (names.slurm_names, "must be letters, digits", ["", "a b"]),
    (names.subdomain, "at most 253 lower-case", ["", ".", "a.", "a..b", "A", "a-.b", "a" * 254]),
    (names.sbatch_option, "an option of one line", ["", "qos", "-q", "--", "--=a", "--Qos", "# a"]),
    (names.sbatch_option, "an option of one line", ["--a=b\n#SBATCH --c", "--a\n", "--a=b\r"]),
    (names.sbatch_option, "an option of one line", ["--a\x00", "--a=\udcff", "--a="]),
    (names.duration, "must be HH:MM:SS or DAYS-HH:MM:SS", ["", "30", "10:00", "1-2", "1:60:00"]),
    (names.duration, "more than nothing", ["00:00:00", "0-00:00:00", "-1:00:00", "UNLIMITED"]),
    (names.assignment, "must be NAME=VALUE", ["", "A", "=1", "1A=1", "A B=1", "A-B=1", "ä=1"]),
    (names.unicode, "must be text in UTF-8", ["a\udcff"]),
]


@pytest.mark.parametrize(
    ("check", "text"), [(check, text) for check, texts in ACCEPTED for text in texts]
)
def test_good_names_are_accepted(check: Check, text: str) -> None:
    assert check(text) == text


@pytest.mark.parametrize(
    ("check", "accepted", "text"),
    [(check, accepted, text) for check, accepted, texts in REFUSED for text in texts],
)
def test_other_names_are_refused(check: Check, accepted: str, text: str) -> None:
    with pytest.raises(ValueError, match=accepted) as caught:
        check(text)
    assert str(caught.value).endswith(f"got {text!r}")


@pytest.mark.parametrize("text", ["a,", ",a", "a,,b", "a, b"])
def test_each_of_several_partitions_has_to_be_a_name(text: str) -> None:
    with pytest.raises(ValueError, match="must be letters, digits"):
        names.slurm_names(text)


@pytest.mark.parametrize(
    ("text", "variable"),
    [("A=1", ("A", "1")), ("_a9=", ("_a9", "")), ("A=b=c d", ("A", "b=c d"))],
)
def test_a_variable_ends_at_the_first_sign(text: str, variable: tuple[str, str]) -> None:
    assert names.assignment(text) == variable


def test_a_value_that_is_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="must be text in UTF-8"):
        names.assignment("A=\udcff")
