"""The text for each system: values that it refuses, further values, and its template filled in.

The functions of systems return a text, from these arguments:

``values``
    the values of all options, by name; the number of ``hosts``; the words of the ``command``, and
    ``run_options``, those for ``hvkit run``.
``template``
    a file to fill in instead of hvkit's own template in ``templates/``.

They raise ``ValueError`` for values that do not go together, or with which ranks would not run.
What a system refuses by itself, as soon as it gets the text, is left to it.
"""

import json
import re
import shlex
import sys
import traceback
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from hvkit.errors import HvkitError
from hvkit.manifest.fields import LONGEST_LABEL

Values = Mapping[str, Any]

# The operator and the Trainer set these on the launcher and overwrite the manifest's values.
_SET_BY_OPERATORS = (
    *("OMPI_MCA_orte_keep_fqdn_hostnames", "OMPI_MCA_orte_default_hostfile"),
    *("OMPI_MCA_plm_rsh_args", "OMPI_MCA_orte_set_default_slots"),
)
_SET_BY_MPI_OPERATOR = ("K_MPI_JOB_ROLE", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES")

_DAY = 24 * 3600

# Azure puts a shell variable with the folder in the place of each of these.
_AZURE_EXPRESSION = re.compile(r"(\$\{\{[^{}]*\}\})")


def mpijob(values: Values, template: Path | None) -> str:
    """An MPIJob of the Kubeflow MPI operator.

    The operator starts one pod per host (the workers) and one pod for ``hvkit run`` (the launcher).
    It mounts an ssh key into all pods and the list of workers into the launcher. Variables that
    only Open MPI 4 reads (``OMPI_MCA_orte_...``) point to that list, so a plain ``mpirun`` of Open
    MPI 5 would not find the workers; ``hvkit run`` reads the variables.
    """
    pods = ("launcher", f"worker-{values['hosts'] - 1}")
    values = _for_pods(values, pods, "the MPI operator", _SET_BY_MPI_OPERATOR)
    return rendered("mpijob.yaml.j2", values, template)


def trainjob(values: Values, template: Path | None) -> str:
    """A TrainJob of the Kubeflow Trainer, version 2, with a TrainingRuntime of its own.

    The Trainer makes of them what the MPI operator makes of an MPIJob: the runtime has the pods,
    and the job the command. The Trainer puts the key only into containers that are named ``node``,
    so the launcher's has this name as well.
    """
    # The JobSet below adds five letters to the name of a pod.
    pods = ("launcher-0-0-xxxxx", f"node-0-{values['hosts'] - 1}-xxxxx")
    values = _for_pods(values, pods, "the Kubeflow Trainer")
    return rendered("trainjob.yaml.j2", values, template)


def slurm(values: Values, template: Path | None) -> str:
    """A batch script, which starts ``hvkit run`` on the first host of the allocation.

    That starts the ranks with ``mpirun``, which launches its daemons on the other hosts through
    Slurm. ``srun --mpi=pmix`` is not used: it needs a Slurm built for the PMIx of this Open MPI,
    and nothing would watch the ranks.
    """
    for option in values["sbatch"]:
        if re.match("--(nodes|ntasks|ntasks-per-node)([= ]|$)", option):
            raise ValueError(f"--sbatch {option}: -np and --slots set this: change those instead")
    programs = str(Path(sys.executable).parent)
    run = _run_words(values, map("=".join, values["env"].items()))
    return rendered("slurm.sh.j2", {**values, "programs": programs, "run": run}, template)


def sagemaker(values: Values, template: Path | None) -> str:
    """The request ``CreateTrainingJob`` of Amazon SageMaker.

    SageMaker starts the same command on every host, and names the hosts ``algo-1``, ``algo-2``, ...
    The command writes a hostfile with their slots. On the first host ``hvkit run`` starts the
    ranks, on the others it waits. Hosts log in to each other with a key that is in the image.
    """
    run = _run_words(values, values["env"])
    longest = values["time"] or _DAY
    return rendered("sagemaker.json.j2", {**values, "run": run, "time": longest}, template)


def azureml(values: Values, template: Path | None) -> str:
    """A command job of Azure Machine Learning, whose service writes ``mpirun`` itself.

    So the job's command is one rank's, and neither ``hvkit run`` nor its options take part.
    """
    ranks, slots, hosts = (values[name] for name in ("np", "slots", "hosts"))
    if ranks % slots:
        raise ValueError(
            f"-np {ranks} with --slots {slots}: Azure ML starts as many ranks on each node: -np "
            f"must be a multiple of --slots, such as {hosts * slots}"
        )
    known = {
        f"${{{{{option}s.{name}}}}}" for option in ("input", "output") for name in values[option]
    }
    command = values["command"]
    words = ("python", *command) if command[0].endswith(".py") else command
    text = " ".join(_quoted_for_azure(word, known) for word in words)
    return rendered("azureml.yaml.j2", {**values, "command": text}, template)


def _for_pods(
    values: Values, pods: Iterable[str], operator: str, also_set: tuple[str, ...] = ()
) -> Values:
    """Values for pods of Kubernetes; refuses those that they do not take.

    ``pods`` are the ends of the longest names; the operator also sets the variables ``also_set``.
    """
    name, shared, memory, slots = (values[n] for n in ("name", "shm_size", "memory", "slots"))
    longest = max((f"{name}-{pod}" for pod in pods), key=len)
    if (excess := len(longest) - LONGEST_LABEL) > 0:
        raise ValueError(
            f"--name {name} is too long: the hostname {longest} would have {len(longest)} "
            f"characters, {LONGEST_LABEL} are allowed; make it {excess} shorter"
        )
    if memory is not None and shared.value >= (memory * slots).value:
        raise ValueError(
            f"--shm-size {shared} must be less than the memory of a worker, {memory * slots} "
            f"({memory} for each of {slots} ranks), because it counts towards that memory: lower "
            "--shm-size or raise --memory"
        )
    variables = [*values["env"], *values["secret_env"]]
    for variable in variables:
        if variables.count(variable) > 1:
            raise ValueError(f"--secret-env: --env sets {variable}, too: set it once")
        if variable in (*_SET_BY_OPERATORS, *also_set):
            raise ValueError(
                f"--env {variable}: {operator} sets this variable and overwrites the manifest's "
                "value: leave it out"
            )
    # Numbered: the name of a claim may be longer than a volume's, and contain dots.
    claims = dict.fromkeys(values["volume"].values())
    return {
        **values,
        "env": {name: literal(value) for name, value in values["env"].items()},
        "run": [literal(word) for word in _run_words(values, variables)],
        "claims": {claim: f"claim-{number}" for number, claim in enumerate(claims, 1)},
    }


def literal(text: str) -> str:
    """Escape ``$(NAME)``, which Kubernetes would replace by a variable's value."""
    return text.replace("$", "$$")


def _run_words(values: Values, variables: Iterable[str]) -> list[str]:
    """The arguments of ``hvkit run``; ``variables`` are the values of ``-x``."""
    passed = [word for variable in variables for word in ("-x", variable)]
    return ["-np", str(values["np"]), *passed, *values["run_options"], *values["command"]]


def _quoted_for_azure(word: str, known: set[str]) -> str:
    """The word for a shell, which must not see Azure's expressions in quotes."""
    parts = _AZURE_EXPRESSION.split(word)
    for expression in parts[1::2]:
        if expression not in known:
            raise ValueError(
                f"{expression} in COMMAND names no folder of this job "
                f"({', '.join(sorted(known)) or 'none'}): add it with --input or --output"
            )
    parts[::2] = [part and shlex.quote(part) for part in parts[::2]]
    return "".join(parts) or "''"


def rendered(name: str, values: Mapping[str, Any], template: Path | None) -> str:
    """The text of a template in ``templates``, or of the file ``template``, with these values.

    Whatever a value contains, it stays one value: ``{{ value }}`` writes it as JSON, which YAML
    has taken over, or for a shell as a quoted word or several. ``{{ value | safe }}`` writes it as
    it is. Templates run in Jinja's sandbox, since one cluster's template has many users.
    """
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from markupsafe import Markup
    except ModuleNotFoundError as error:
        raise HvkitError(
            "there is no Jinja, which fills in templates of manifests: `pip install 'jinja2>=3.1'`"
        ) from error
    quoted = _shell_words if name.endswith(".sh.j2") else _json
    environment = ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else quoted(value),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # Jinja's own writes emoji as two halves, which not all readers of YAML put together.
    environment.filters["tojson"] = lambda value: Markup(_json(value))
    file = template or files("hvkit.manifest") / "templates" / name
    try:
        return environment.from_string(file.read_text(encoding="utf-8")).render(values)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--template {template}: must be a template in UTF-8: {error}") from error
    except Exception as error:  # a template is a program, whose errors may be any
        frames = traceback.extract_tb(error.__traceback__)
        line = [each.lineno for each in frames if each.filename in ("<template>", "<unknown>")][-1]
        said = f"{file}: line {line}: {getattr(error, 'message', None) or error}"
        if isinstance(error, jinja2.UndefinedError):
            said += f"; the values of this template are {', '.join(sorted(values))}"
        raise ValueError(said) from error


def _json(value: object) -> str:
    """The value as JSON that also all readers of YAML understand alike."""
    # An undefined value raises when it becomes text; quantities and paths are texts.
    text = json.dumps(value, ensure_ascii=False, default=str)
    # Line ends of Unicode, control characters, and letters beyond ASCII.
    return re.sub("[\x7f-\uffff]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _shell_words(value: object) -> str:
    words = value if isinstance(value, list | tuple) else [value]
    return shlex.join(map(str, words))
