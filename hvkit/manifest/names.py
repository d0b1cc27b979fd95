"""What names may look like: those of Kubernetes, of Slurm, of images and of variables."""

import re

_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_PART_OF_SUBDOMAIN = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"{_PART_OF_SUBDOMAIN}(?:\.{_PART_OF_SUBDOMAIN})*", re.ASCII)
_LONGEST_SUBDOMAIN = 253
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_SLURM_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@-]*", re.ASCII)
_SBATCH_OPTION = re.compile(r"--[a-z][a-z0-9-]*(?:[= ].+)?", re.ASCII)
_DURATION = re.compile(r"(?:\d+-)?\d{1,3}:[0-5]\d:[0-5]\d", re.ASCII)

# registry.example.com:5000/team/hvkit:1.0@sha256:...
# Without a dot or a port, what stands before the first slash is a part of the name.
_DOMAIN = r"[A-Za-z0-9-]+(?:(?:\.[A-Za-z0-9-]+)+(?::\d+)?|:\d+)"
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_TAG = r":\w[\w.-]{0,127}"
_DIGEST = r"@[A-Za-z][A-Za-z0-9]*(?:[+._-][A-Za-z0-9]+)*:[0-9a-fA-F]{32,}"
_IMAGE = re.compile(rf"(?:{_DOMAIN}/)?{_PART}(?:/{_PART})*(?:{_TAG})?(?:{_DIGEST})?", re.ASCII)


def label(text: str) -> str:
    """The name of a Kubernetes namespace: a label of RFC 1123.

    Raises:
        ValueError: it is not one.
    """
    if not _LABEL.fullmatch(text):
        raise ValueError(
            "must be 1 to 63 lower-case letters, digits and `-`, with a letter or digit at both "
            f"ends, got {text!r}"
        )
    return text


def job_name(text: str) -> str:
    """The name of an MPIJob: a label of RFC 1123 that begins with a letter.

    The operator makes services of this name, whose names are of the older RFC 1035.

    Raises:
        ValueError: it is not one.
    """
    if not label(text)[0].isalpha():
        raise ValueError(f"must begin with a letter, as names of services do, got {text!r}")
    return text


def subdomain(text: str) -> str:
    """The name of most things in Kubernetes, such as a PersistentVolumeClaim: that of RFC 1123.

    Raises:
        ValueError: it is not one.
    """
    if len(text) > _LONGEST_SUBDOMAIN or not _SUBDOMAIN.fullmatch(text):
        raise ValueError(
            f"must be at most {_LONGEST_SUBDOMAIN} lower-case letters, digits, `-` and `.`, with "
            f"a letter or digit at both ends and beside each dot, got {text!r}"
        )
    return text


def image(text: str) -> str:
    """A reference to an image.

    Raises:
        ValueError: it is not one.
    """
    if not _IMAGE.fullmatch(text):
        raise ValueError(
            "must be an image, in lower case but for the tag, such as "
            f"registry.example.com/team/hvkit:1.0, got {text!r}"
        )
    return text


def assignment(text: str) -> tuple[str, str]:
    """The name and value of an environment variable.

    Raises:
        ValueError: it is not ``NAME=VALUE``.
    """
    name, sign, value = text.partition("=")
    if not sign or not _VARIABLE.fullmatch(name):
        raise ValueError(
            "must be NAME=VALUE, with a name of letters, digits and `_` that does not begin with "
            f"a digit, got {text!r}"
        )
    return name, unicode(value)


def unicode(text: str) -> str:
    """A text, not bytes that are none.

    Raises:
        ValueError: it is not one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"must be text in UTF-8, got {text!r}") from error
    return text


def slurm_name(text: str) -> str:
    """The name of a Slurm job, account or partition.

    Raises:
        ValueError: it is not one.
    """
    if not _SLURM_NAME.fullmatch(text):
        raise ValueError(
            f"must be letters, digits and `_.+@-`, beginning with none of `.+@-`, got {text!r}"
        )
    return text


def slurm_names(text: str) -> str:
    """Names of Slurm partitions, with commas between them.

    Raises:
        ValueError: one of them is not a name.
    """
    for name in text.split(","):
        slurm_name(name)
    return text


def sbatch_option(text: str) -> str:
    """An option of ``sbatch``, as it stands in a script.

    Raises:
        ValueError: it is not one, or more than a line.
    """
    if not _SBATCH_OPTION.fullmatch(text) or not text.isprintable():
        raise ValueError(f"must be an option of one line such as --qos=high, got {text!r}")
    return text


def duration(text: str) -> str:
    """The time limit of a Slurm job.

    Raises:
        ValueError: it is not of the form that cannot be mistaken for another.
    """
    if not _DURATION.fullmatch(text) or not text.strip("0:-"):
        raise ValueError(f"must be HH:MM:SS or DAYS-HH:MM:SS, more than nothing, got {text!r}")
    return text
