"""What all subcommands of ``hvkit`` have in common: the parser's class, and standard output.

The parser shows errors with the subcommand's usage, and examples. It knows options of torchrun,
accelerate, deepspeed, horovodrun, mpirun and srun that people type, and says what to write instead
(``FOREIGN``). ``hvkit completion`` reads it.
"""

import argparse
import contextlib
import difflib
import errno
import functools
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from hvkit.errors import HvkitError

SHELLS = ("bash", "zsh", "tcsh", "fish")


class CommandParser(argparse.ArgumentParser):
    """A parser whose subcommands report wrong arguments themselves, below their own usage.

    argparse leaves unknown options to the main parser, which shows its own usage. A command may end
    with such an error, too: ``args.refuse(message)``. ``examples`` are command lines, with what
    each does; ``foreign`` says what to write instead of an option of other launchers.
    """

    def __init__(
        self,
        *,
        examples: Mapping[str, str] | None = None,
        foreign: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        self.examples = dict(examples or {})
        lines = (f"  {command}\n      {meaning}" for command, meaning in self.examples.items())
        epilog = "\n".join(["examples:", *lines]) if self.examples else None
        super().__init__(**kwargs, epilog=epilog, formatter_class=_HelpFormatter)
        self.set_defaults(refuse=self.error)
        hidden: Any = dict.fromkeys(("dest", "default", "help"), argparse.SUPPRESS)
        for option, advice in (foreign or {}).items():
            self.add_argument(option, **hidden, nargs="?", action=_Foreign, const=advice)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse all arguments; an unknown one is an error."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._explained(unknown))
        return found, []

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """The options that an abbreviation may stand for.

        argparse completes options with one dash even without ``allow_abbrev``. Here it completes
        none of the hidden ones, but ``-N2`` still is ``-N 2``.
        """
        return [
            found
            for found in super()._get_option_tuples(option_string)
            if not isinstance(found[0], _Foreign) or found[1] == option_string[:2]
        ]

    def _explained(self, unknown: Sequence[str]) -> str:
        known = [
            option
            for action in self._actions
            if action.help is not argparse.SUPPRESS
            for option in action.option_strings
        ]
        close = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1, cutoff=0.75)
        hint = f" (did you mean {close[0]}?)" if close else ""
        return f"unrecognized arguments: {' '.join(unknown)}{hint}"


class _Foreign(argparse.Action):
    """An option of another launcher; its ``const`` is what to write instead."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> NoReturn:
        parser.error(f"{option_string} is not an option of {parser.prog}: {self.const}")


class _HelpFormatter(argparse.HelpFormatter):
    """Keeps the lines of examples, and wraps other texts."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


def checked(check: Callable[[str], Any]) -> Callable[[str], Any]:
    """An argparse type that reports the ``ValueError`` of ``check`` with its own message."""

    def converted(text: str) -> Any:
        try:
            return check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return converted


# Exit status if a reader such as ``head`` has ended before everything was written.
_UNREAD = 128 + signal.SIGPIPE

_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)


class Terminal(Console):
    """rich's console, which leaves the handling of a broken pipe to ``all_written``."""

    def on_broken_pipe(self) -> NoReturn:
        """Raise ``BrokenPipeError``; rich would end with status 1, as for a problem."""
        raise BrokenPipeError

    def show_line(self, text: str, style: str = "") -> None:
        """Print a line as it is, not wrapped."""
        self.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


@contextlib.contextmanager
def all_written() -> Iterator[None]:
    """At the end, write all output; if that fails, end as by SIGPIPE, or with 1 and a line."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        unread = isinstance(error, BrokenPipeError)
        if not unread and (error.errno not in _CANNOT_WRITE or error.filename is not None):
            raise
        _drop_output()
        if unread:
            raise SystemExit(_UNREAD) from None
        print(f"hvkit: cannot write to standard output: {error.strerror}", file=sys.stderr)
        raise SystemExit(1) from None


def _drop_output() -> None:
    """Discard the rest of the output, so that Python does not fail on it again at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def add_completion(
    commands: "argparse._SubParsersAction[CommandParser]", whole: Callable[[], CommandParser]
) -> None:
    """Add ``hvkit completion``."""
    parser = commands.add_parser(
        "completion",
        help="print what a shell needs to complete hvkit's arguments",
        description="Print a script with which a shell completes the commands and options of "
        "hvkit. It needs shtab: `pip install shtab`.",
        examples={
            'eval "$(hvkit completion bash)"': "for this shell (in ~/.bashrc: for all)",
            'hvkit completion zsh > "${fpath[1]}/_hvkit"': "for every zsh",
        },
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"{', '.join(SHELLS)}")
    parser.set_defaults(execute=functools.partial(_completion, whole))


def _completion(whole: Callable[[], CommandParser], args: argparse.Namespace) -> int:
    try:
        import shtab
    except ModuleNotFoundError:
        raise HvkitError(
            "there is no shtab, which writes completions: `pip install shtab`"
        ) from None
    hvkit = whole()
    for action in _actions(hvkit):
        if action.type is Path or action.nargs == argparse.REMAINDER:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(hvkit, args.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _actions(each)


_RANKS = "-np N is the number of all ranks on all hosts"
_CORES = "leave it out: each rank gets an equal share of its host's cores"
_PORT = "set Port for the host in ~/.ssh/config"
_LOG_DIR = "write --log-dir DIR"
_MCA = (
    "set the environment variable OMPI_MCA_NAME=VALUE or, for what Open MPI 5 starts ranks with "
    "(plm, ras, rmaps, prte), PRTE_MCA_NAME=VALUE"
)
_TIME = "the time limit belongs in `hvkit manifest slurm --time`"
_PARTITION = "the partition belongs in `hvkit manifest slurm --partition`"

_OF_RANKS = "--nproc-per-node --num-processes --num-gpus --nproc --nprocs --ntasks --world-size"
_OF_HOSTS = (
    "--nnodes --num-machines --num-nodes --nodes --host -host --hosts -hosts --include -N -ppn "
    "--npernode --ntasks-per-node --gpus-per-node --slots-per-host --map-by -map-by"
)

# Options of horovodrun that set a variable, which Horovod reads.
_OF_HOROVOD = (
    "--fusion-threshold-mb --cycle-time-ms --cache-capacity --torus-allreduce "
    "--hierarchical-allreduce --hierarchical-allgather --autotune --autotune-log-file "
    "--autotune-warmup-samples --autotune-steps-per-sample --autotune-bayes-opt-max-samples "
    "--autotune-gaussian-process-noise --timeline-mark-cycles --num-nccl-streams "
    "--thread-affinity --gloo-timeout-seconds --mpi-threads-disable --log-level "
    "--log-without-timestamp"
)
# Those of them without a value.
_SWITCHES = (
    "--torus-allreduce --hierarchical-allreduce --hierarchical-allgather --autotune "
    "--timeline-mark-cycles --mpi-threads-disable --log-without-timestamp"
)
# The variables that are not just the option in capitals.
_VARIABLES = {
    "--fusion-threshold-mb": "FUSION_THRESHOLD (in bytes)",
    "--cycle-time-ms": "CYCLE_TIME",
    "--autotune-log-file": "AUTOTUNE_LOG",
    "--log-without-timestamp": "LOG_HIDE_TIME",
}

# By advice: the options.
_OPTIONS = {
    _RANKS: _OF_RANKS,
    "name hosts with their ranks: -H host1:4,host2:4, or --hostfile FILE": _OF_HOSTS,
    "name the file with --hostfile": "-hostfile --machinefile -machinefile",
    "start `hvkit run` once, on one host: it starts the ranks on all hosts of -H or --hostfile, "
    "where they find each other": "--node-rank --machine-rank --standalone --master-addr "
    "--master-port --main-process-ip --main-process-port --multi-gpu --rdzv-backend "
    "--rdzv-endpoint --rdzv-id --rdzv-conf",
    "write `python -m MODULE` as COMMAND": "-m --module",
    "leave it out: COMMAND may be any program": "--no-python",
    "write --max-restarts": "--max_restarts --reset-limit",
    "write --min-np": "--min-num-proc",
    "write --min-np; new hosts are taken at a restart": "--max-np --max-num-proc "
    "--host-discovery-script",
    "leave it out: hosts that do not answer are named before ranks start": "--start-timeout "
    "--elastic-timeout --blacklist-cooldown-range",
    "the script or its framework decides that": "--mixed-precision --cpu --config-file",
    _LOG_DIR: "--output-filename --tee --redirects -r --log_dir",
    f"for torchrun's --tee, {_LOG_DIR}; for srun's --time, {_TIME}": "-t",
    _TIME: "--time",
    _PARTITION: "--partition",
    "write --prefix": "--tag-output -prepend-rank -l",
    "write --timestamps": "--timestamp-output -prefix-timestamp --prefix-output-with-timestamp",
    "write --timeline FILE": "--timeline-filename",
    "write --launcher gloo": "--gloo",
    "leave it out: ranks use MPI unless you write --launcher gloo": "--mpi --jsrun",
    "write --interfaces NAME": "--network-interface --network-interfaces -iface --nics",
    _PORT: "--ssh-port",
    f"for horovodrun's --ssh-port, {_PORT}; for srun's --partition, {_PARTITION}": "-p",
    "set IdentityFile for the host in ~/.ssh/config": "--ssh-identity-file -i",
    "run `hvkit doctor`": "--check-build -cb",
    "leave it out: hosts are checked at every start": "--disable-cache",
    "write --bind cores or --bind none": "--bind-to -bind-to --binding-args",
    _CORES: "--cpus-per-task",
    f"for Python's, write `python -c CODE` as COMMAND; for srun's, {_CORES}": "-c",
    "print(os.sched_getaffinity(0)) in the script shows the cores of each rank": (
        "--report-bindings"
    ),
    "write --stall SECONDS": "--no-stall-check --stall-check-warning-time-seconds "
    "--stall-check-shutdown-time-seconds",
    "leave it out: more ranks than cores may start": "--oversubscribe -oversubscribe",
    "leave it out: root may start ranks": "--allow-run-as-root",
    _MCA: "--mca -mca --prtemca",
    f"write the options of hvkit run that do the same; for --mca, {_MCA}": "--mpi-args",
    "write -x NAME=VALUE": "-genv -env --env --export",
    "`cd` there first": "--wdir -wdir --chdir",
}

_SLOTS = (
    "--slots N is the number of ranks on each host; with -np, the number of all ranks, it gives "
    "the number of hosts"
)


def _by_option(options: Mapping[str, str]) -> dict[str, str]:
    """The advice for each option, also if it is written with underscores."""
    found = {option: advice for advice, several in options.items() for option in several.split()}
    return {re.sub(r"(?<=\w)-", "_", option): advice for option, advice in found.items()} | found


def _advice_on_variable(option: str) -> str:
    variable = _VARIABLES.get(option, option[2:].upper().replace("-", "_"))
    variable += "=1" if option in _SWITCHES.split() else ""
    return f"set the environment variable HOROVOD_{variable}, which ranks inherit"


FOREIGN = _by_option(_OPTIONS | {_advice_on_variable(each): each for each in _OF_HOROVOD.split()})
"""By option, what to write after ``hvkit run`` instead."""

FOREIGN_IN_MANIFESTS = _by_option({_RANKS: _OF_RANKS, _SLOTS: _OF_HOSTS})
"""By option, what to write after ``hvkit manifest SYSTEM`` instead."""
