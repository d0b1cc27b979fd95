"""What Kubernetes' resources have in common: their text, and options that several of them have.

Templates are YAML files. ``"{{name}}"`` in one stands for a value of that name, also for a list of
them; what has no value is left out.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import yaml

from hvkit.manifest.fields import LONGEST_LABEL, HvkitRun, Quantity, Volume

# Seconds that Kubernetes gives a pod to end, if its specification names no number.
_KUBERNETES_GRACE = 30

# The operator and the Trainer set these on the launcher and overwrite the manifest's values.
_SET_BY_OPERATORS = {
    *("OMPI_MCA_orte_keep_fqdn_hostnames", "OMPI_MCA_orte_default_hostfile"),
    *("OMPI_MCA_plm_rsh_args", "OMPI_MCA_orte_set_default_slots"),
}

_PLACE = re.compile(r"\{\{(\w+)\}\}")

# PyYAML leaves these unquoted as text; readers of other YAML versions, such as kubectl, take them
# for numbers (1e-3, 0o17, 1:30) or booleans (y).
_AMBIGUOUS = re.compile(r"[-+.0-9].*|[yYnN]", re.DOTALL)


def values_of(options: Mapping[str, Any], run: HvkitRun) -> dict[str, Any]:
    """The values that templates of pods for ranks, and of one for ``hvkit run``, have places for.

    Args:
        options: the values of the manifest's options, by name.
        run: what the launcher starts.

    Raises:
        ValueError: the shared memory is not less than the memory of a worker, two volumes have one
            path, or a variable or a label of nodes has two values.
    """
    _check_shared_memory(options["shm_size"], options["memory"], run.size.slots)
    _check_paths(options["volume"])
    slots, cpus, memory, gpus = run.size.slots, options["cpus"], options["memory"], options["gpus"]
    # Numbered: the name of a claim may be longer than that of a volume, and contain dots.
    once = dict.fromkeys(volume.claim for volume in options["volume"])
    claims = {claim: f"claim-{number}" for number, claim in enumerate(once, 1)}
    secrets = {variable.name: variable.entry for variable in options["secret_env"]}
    variables = {name: literal(value) for name, value in run.variables.items()}
    plain = [{"name": name, "value": value} for name, value in variables.items()]
    names = [*variables, *(variable.name for variable in options["secret_env"])]
    _check_once("--secret-env", names)
    _check_once("--node-label", [key for key, _ in options["node_label"]])
    return {
        **options,
        "variables": names,
        "node_labels": dict(options["node_label"]),
        "pull_secrets": [{"name": name} for name in options["pull_secret"]],
        "hosts": run.size.hosts,
        "slots": slots,
        "cpus": cpus and cpus.times(slots),
        "memory": memory and memory.times(slots),
        "gpus": gpus and gpus * slots,
        "run": [literal(word) for word in run.words(names)],
        "env": [*plain, *secrets.values()],
        "claims": [
            {"name": name, "persistentVolumeClaim": {"claimName": claim}}
            for claim, name in claims.items()
        ],
        "mounts": [
            {"name": claims[volume.claim], "mountPath": str(volume.path)}
            for volume in options["volume"]
        ],
        # The group that the templates run the containers in.
        "group_of_claims": 1000 if claims else None,
        "change_of_group": "OnRootMismatch" if claims else None,
        "seconds_to_leave": (
            math.ceil(options["grace"]) if options["grace"] > _KUBERNETES_GRACE else None
        ),
    }


def check_hostname(name: str, longest: str) -> None:
    """Refuse the name of a job whose hosts' names would be too long.

    Args:
        name: of the job.
        longest: the longest name of a host of it.

    Raises:
        ValueError: it has too many characters.
    """
    if excess := max(0, len(longest) - LONGEST_LABEL):
        raise ValueError(
            f"--name {name} is too long: the hostname {longest} would have {len(longest)} "
            f"characters, {LONGEST_LABEL} are allowed; make it {excess} shorter"
        )


def check_variables(names: Sequence[str], operator: str, also: Sequence[str] = ()) -> None:
    """Refuse variables for ranks that an operator sets itself.

    Raises:
        ValueError: there is one.
    """
    for name in names:
        if name in (*_SET_BY_OPERATORS, *also):
            raise ValueError(
                f"--env {name}: {operator} sets this variable and overwrites the manifest's "
                "value: leave it out"
            )


def _check_shared_memory(shared: Quantity, memory: Quantity | None, slots: int) -> None:
    if memory is not None and shared.value >= memory.times(slots).value:
        raise ValueError(
            f"--shm-size {shared} must be less than the memory of a worker, {memory.times(slots)} "
            f"({memory} for each of {slots} ranks), because it counts towards that memory: lower "
            "--shm-size or raise --memory"
        )


def _check_paths(volumes: Sequence[Volume]) -> None:
    for path, times in Counter(volume.path for volume in volumes).items():
        if times > 1:
            raise ValueError(f"--volume: {path} is used {times} times: give each its own path")


def _check_once(option: str, names: Sequence[str]) -> None:
    for name, times in Counter(names).items():
        if times > 1:
            raise ValueError(f"{option}: {name} is set {times} times: set it once")


def literal(text: str) -> str:
    """Escape ``$(NAME)``, which Kubernetes would replace by a variable's value."""
    return text.replace("$", "$$")


def from_template(name: str, values: Mapping[str, Any]) -> str:
    """The template of this file name with its values, as YAML of one document or several."""
    template = files("hvkit.manifest").joinpath(name).read_text(encoding="utf-8")
    documents = [_filled(document, values) for document in yaml.safe_load_all(template)]
    return "---\n".join(map(yaml_text, documents))


def _filled(part: Any, values: Mapping[str, Any]) -> Any:
    """A part of the template with its values; fields without a value are left out."""
    if isinstance(part, dict):
        fields = {name: _filled(below, values) for name, below in part.items()}
        return {name: value for name, value in fields.items() if value not in (None, {}, [])}
    if isinstance(part, list):
        items = [_filled(below, values) for below in part]
        return [one for item in items for one in (item if isinstance(item, list) else [item])]
    place = _PLACE.fullmatch(part) if isinstance(part, str) else None
    return values[place[1]] if place else part


def yaml_text(document: dict[str, Any]) -> str:
    """The document as YAML that every reader understands alike, keys in their order."""
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=float("inf"))
    return text


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes all text that some YAML version would read as a number or a boolean."""

    def ignore_aliases(self, data: object) -> bool:
        """Write out what occurs twice."""
        return True


def _represent_text(dumper: _Dumper, text: str | Quantity) -> yaml.ScalarNode:
    style = '"' if _AMBIGUOUS.fullmatch(str(text)) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style=style)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(Quantity, _represent_text)
