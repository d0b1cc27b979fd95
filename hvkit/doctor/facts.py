"""The state of this host and this Python, without judgement: ``hvkit.doctor.findings`` judges.

Facts are one dict, which ``hvkit doctor --json`` prints. It contains names of environment
variables, but no values except numbers of threads. Nothing here imports a framework.
"""

import ctypes
import importlib.util
import inspect
import itertools
import json
import os
import platform
import re
import resource
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from threading import Thread
from typing import Any

import psutil

from hvkit.build.cuda import DEFAULT_HOME, toolkit_for
from hvkit.build.frameworks import DISTRIBUTIONS, MODULES, NAMES, cuda_version, distribution
from hvkit.build.installer import installed_abi, installed_version, serves, unmet
from hvkit.build.toolchain import Toolchain, find_toolchain
from hvkit.build.wheels import Machine, key_of, stored_ingredients
from hvkit.errors import BuildError, LaunchError
from hvkit.host.hardware import cgroup_limits, free_memory, gpus, soft_limit
from hvkit.host.network import addresses_of, interfaces
from hvkit.host.rank_variables import launched, rank_settings
from hvkit.host.system import Output, run
from hvkit.launching.launchers import identify
from hvkit.transport.engines import built_for

_THREADS = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"),
    *("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"),
)
# Other variables that change how ranks start or communicate, or their names' beginnings.
_SETTINGS = re.compile(
    r"(OMPI_MCA_|PRTE_MCA_|PMIX_MCA_|I_MPI_|MPIR_CVAR_|HOROVOD_|HVKIT_|NCCL_|UCX_|FI_|GLOO_"
    r"|PYTORCH_).*|(CUDA|NVIDIA)_VISIBLE_DEVICES|CUDA_HOME|CUDA_LAUNCH_BLOCKING|LD_LIBRARY_PATH"
    r"|LD_PRELOAD|PYTHONPATH|PYTHONHOME|MPI_HOME|MPI_ROOT|OPAL_PREFIX|KERAS_BACKEND|XLA_FLAGS"
    r"|OMP_PROC_BIND|KMP_AFFINITY|GOMP_CPU_AFFINITY|HYDRA_HOST_FILE|TF_CONFIG|TF_XLA_FLAGS"
    r"|TF_USE_LEGACY_KERAS"
)
_SECONDS_TO_RESOLVE = 2.0
# Reading a gigabyte of libraries takes long if they are not in the disk cache.
_SECONDS_TO_LOAD = 60
# Packages whose requirements are checked. TensorFlow comes as one of several packages.
_CHECKED = ("hvkit", "torch", "keras", "horovod", *DISTRIBUTIONS["tensorflow"])
# What a build depends on that may be shown with its value: no paths, and no user's variables.
_SHOWN = {*NAMES, "horovod", "python", "libc", "cpu", "mpi", "compiler", "gpu"}


def gather() -> dict[str, Any]:
    """Collect all facts; the slow ones, which start programs, in parallel.

    docs/install.md describes them. Those whose names start with ``_`` are for the findings only.
    """
    slow: dict[str, Callable[[], Any]] = {
        "horovod": horovod,
        "gpus": gpus,
        "launchers": mpi_launchers,
        "compilers": compilers,
        "addresses": own_addresses,
        "ssh": ssh,
    }
    with ThreadPoolExecutor() as pool:
        running = {name: pool.submit(function) for name, function in slow.items()}
    found: dict[str, Any] = {name: each.result() for name, each in running.items()}
    found["horovod"], cannot_build = found["horovod"]
    found_gpus = found["gpus"]
    usable = len(os.sched_getaffinity(0))
    total, allowed = int(psutil.virtual_memory().total), cgroup_limits()
    return {
        "format": 1,
        "hostname": socket.gethostname(),
        "versions": versions(),
        "python": sys.executable,
        "platform": system(),
        **found,
        "mpi": next(iter(found["launchers"]), None),
        "cores": {"usable": usable, "host": os.cpu_count() or 1, "limit": allowed.cpus},
        "memory": {"total": min(total, allowed.memory or total), "available": free_memory()},
        "shared_memory": shared_memory(),
        "gpus": [asdict(gpu) for gpu in found_gpus.found],
        "driver_cuda": found_gpus.driver_cuda,
        "torch_cuda": torch_cuda(),
        "interfaces": [asdict(one) for one in interfaces()],
        "threads": thread_settings(os.environ),
        "environment": setting_names(os.environ),
        "set_by_ranks": [asdict(each) for each in rank_settings(os.environ)],
        "limits": {
            "open_files": soft_limit(resource.RLIMIT_NOFILE),
            "locked_memory": soft_limit(resource.RLIMIT_MEMLOCK),
        },
        "infiniband": infiniband(),
        "_tensorflows": tensorflows(),
        "_unmet": unmet_requirements(),
        "_cannot_build": cannot_build,
        "_gpu_failure": found_gpus.failure,
        "_launched": rank_of(os.environ),
    }


def system() -> dict[str, str]:
    """The operating system, its kernel, processor and C library."""
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = platform.system()
    return {
        "system": name,
        "kernel": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
    }


def shared_memory(folder: Path = Path("/dev/shm")) -> dict[str, int] | None:
    if not folder.is_dir():
        return None
    found = os.statvfs(folder)
    return {"size": found.f_blocks * found.f_frsize, "free": found.f_bavail * found.f_frsize}


def infiniband(devices: Path = Path("/sys/class/infiniband")) -> bool:
    return devices.is_dir() and any(devices.iterdir())


def own_addresses() -> list[str]:
    """The addresses of this host's name; empty if it does not resolve within two seconds."""
    found: list[str] = []

    def resolve() -> None:
        found.extend(map(str, addresses_of(socket.gethostname())))

    # The resolver has no time limit of its own: an unreachable name server takes half a minute.
    resolver = Thread(target=resolve, daemon=True)
    resolver.start()
    resolver.join(_SECONDS_TO_RESOLVE)
    return list(found)


def ssh() -> dict[str, Any]:
    """OpenSSH's client and server."""
    output = run(["ssh", "-V"])
    version = re.match(r"[^\s,]+", output.text) if output else None
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin:/sbin"
    names = (process.info["name"] for process in psutil.process_iter(["name"]))
    return {
        "client": version[0] if version else None,
        "server": shutil.which("sshd", path=path),
        "running": any(name == "sshd" for name in names),
    }


def thread_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The numbers of threads that variables set; ``?`` for a value that is not a number."""
    return {
        name: value if re.fullmatch(r"\d{1,6}(,\d{1,6})*", value) else "?"
        for name in _THREADS
        if (value := environ.get(name)) is not None
    }


def setting_names(environ: Mapping[str, str]) -> list[str]:
    """Names of the other variables that change how ranks start or communicate."""
    return sorted(filter(_SETTINGS.fullmatch, environ))


def rank_of(environ: Mapping[str, str]) -> str | None:
    """Why hvkit takes this process for a rank; ``None`` if it does not."""
    try:
        found = launched(environ)
    except LaunchError as error:
        return str(error)
    return f"one of {found.size}, started by {found.launcher}" if found else None


def versions() -> dict[str, str | None]:
    """Versions of Python and of packages; ``None`` for a package that is not installed."""
    names = ("hvkit", "torch", "tensorflow", "keras", "numpy", "horovod", "mpi4py")
    found = {name: _version(name) for name in names}
    found["tensorflow"] = next((one.split()[1] for one in tensorflows()), None)
    return {"python": platform.python_version(), **found}


def tensorflows() -> list[str]:
    """Every package that contains TensorFlow, with its version."""
    names = DISTRIBUTIONS["tensorflow"]
    return [f"{name} {version}" for name in names if (version := _version(name)) is not None]


def torch_cuda() -> str | None:
    """The CUDA version that PyTorch was built for; ``None`` for its CPU version."""
    torch = folder_of("torch")
    return cuda_version("pytorch", torch.parent) if torch else None


def unmet_requirements() -> list[dict[str, str | None]]:
    """The requirements that are not met, ``keras>=3.12``, and which versions are ``installed``."""
    return [
        {
            "package": f"{name} {version}",
            "requirement": f"{requirement.name}{requirement.specifier}",
            "installed": _version(requirement.name),
        }
        for name in _CHECKED
        if (version := _version(name))
        for requirement in unmet(metadata.requires(name))
    ]


def _version(name: str) -> str | None:
    return found.version if (found := distribution(name)) else None


def folder_of(module: str) -> Path | None:
    """The folder of a top-level package, without importing it."""
    spec = importlib.util.find_spec(module)
    folders = spec.submodule_search_locations if spec else None
    return Path(folders[0]) if folders else None


def compilers() -> dict[str, str | None]:
    """Versions of the C++ compiler, CMake and NVIDIA's compiler; ``None`` for a missing one."""
    return {
        "c++": _first_version("c++", "g++", "clang++"),
        "cmake": _first_version("cmake"),
        "nvcc": _first_version("nvcc", f"{DEFAULT_HOME}/bin/nvcc"),
    }


def _first_version(*programs: str) -> str | None:
    for program in programs:
        output = run([program, "--version"])
        if output and output.status == 0:
            # Distributions put their own version in brackets before the compiler's.
            text = re.sub(r"\(.*?\)", "", output.text)
            match = re.search(r"(?:release|version) (\d[\d.]*)|\b(\d+\.\d+[\d.]*)", text)
            return match[1] or match[2] if match else "?"
    return None


def mpi_launchers() -> list[dict[str, Any]]:
    """The launchers of each MPI on PATH, in its order, and in the folder of this Python.

    Only the first launcher of each MPI in a folder counts.
    """
    folders = [each for each in os.environ.get("PATH", os.defpath).split(os.pathsep) if each]
    of_python = os.path.dirname(sys.executable)
    found: dict[object, dict[str, Any]] = {}
    for folder, name in itertools.product([*folders, of_python], ("mpirun", "mpiexec")):
        if (program := shutil.which(name, path=folder)) is None:
            continue
        text = output.text if (output := run([program, "--version"])) else ""
        mpi = identify(text)
        launcher = {
            "flavour": mpi.flavour if mpi else None,
            "version": mpi.version if mpi else None,
            "program": program,
            "on_path": folder in folders,
            "_first_line": None if mpi else next(iter(text.splitlines()), "nothing"),
        }
        found.setdefault((os.path.realpath(folder), mpi), launcher)
    return list(found.values())


def horovod() -> tuple[dict[str, Any] | None, str | None]:
    """The Horovod of this Python, if any, and why hvkit cannot build one here, if it cannot."""
    version = installed_version()
    with ThreadPoolExecutor() as pool:
        libraries = list(pool.map(_library, built_for() if version else ()))
    found = {"version": version, "libraries": libraries, "fits": None, "differences": []}
    built = {one["framework"] for one in libraries}
    left_out = [name for name in NAMES if libraries and MODULES[name] not in built]
    try:
        toolchain = find_toolchain(left_out)
        if any("nccl" in one["operations"] for one in libraries):
            toolchain = replace(toolchain, cuda=toolkit_for("nccl", toolchain.frameworks))
    except BuildError as error:
        return (found if version else None), str(error)
    if version is None:
        return None, None
    fits, differences = _compare(version, toolchain)
    return found | {"fits": fits, "differences": differences}, None


def _compare(version: str, toolchain: Toolchain) -> tuple[bool, list[str]]:
    """Whether hvkit would make the installed build here and now, and how another would differ."""
    key = key_of(toolchain)
    cuda = toolchain.cuda.version if toolchain.cuda else None
    machine = Machine(toolchain.frameworks, toolchain.mpi, cuda, os.environ)
    if key.version == version or serves(installed_abi(), machine):
        return True, []
    before = stored_ingredients(version)
    return False, changes(before, dict(key.ingredients)) if before else []


def changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """The ingredients that differ between two builds, with their values where these are safe."""
    names = [n for n in dict.fromkeys([*before, *now]) if before.get(n) != now.get(n)]
    return [
        f"{name}: {before.get(name, 'none')} -> {now.get(name, 'none')}"
        if name in _SHOWN
        else {"patches": "hvkit's patches to its source"}.get(name, name)
        for name in names
    ]


def _library(framework: str) -> dict[str, Any]:
    horovod, package = folder_of("horovod"), folder_of(framework)
    assert horovod is not None
    try:
        record = json.loads((horovod / "metadata.json").read_text())
    except (OSError, ValueError):
        record = {}
    version = next((record[n] for n in NAMES if n in record and MODULES[n] == framework), None)
    if package is None:
        return library_from(framework, version, Output(1, "", f"{framework} is not installed"))
    libraries_dir = package / "lib" if framework == "torch" else package
    folders = filter(None, [str(libraries_dir), os.environ.get("LD_LIBRARY_PATH")])
    environ = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(folders)}
    command = [sys.executable, "-I", "-c", LOAD_LIBRARY]
    command.append(str(next((horovod / framework).glob("mpi_lib*"))))
    return library_from(framework, version, run(command, _SECONDS_TO_LOAD, environ))


def library_from(framework: str, version: str | None, output: Output | None) -> dict[str, Any]:
    """The library that ``LOAD_LIBRARY`` has tried to load; no output: Python did not start."""
    lines = output.stdout.splitlines() if output else []
    line = next((line for line in lines if line.startswith("hvkit:")), None)
    found = json.loads(line.removeprefix("hvkit:") if line else '{"features": [], "mpi": ""}')
    mpi = identify(found["mpi"])
    return {
        "framework": framework,
        "built_for": version,
        "error": None if line else _load_error(output),
        "controllers": [name for name in ("mpi", "gloo") if name in found["features"]],
        "operations": found["features"],
        "mpi": asdict(mpi) if mpi else None,
    }


def _load_error(output: Output | None) -> str:
    if output is None or output.status is None:
        return f"it does not load within {_SECONDS_TO_LOAD} s"
    if output.status < 0:
        return f"loading it ends with {signal.Signals(-output.status).name}"
    return next(reversed(output.stderr.strip().splitlines()), "it does not load")


def _load_library(path: str) -> None:
    """Load a library of Horovod's as Python's import does; print its features and MPI as JSON.

    Only its source runs, in a process of its own without hvkit: the library also loads the
    framework's libraries, two frameworks' may conflict, and loading may crash. Without the
    framework's Python part it takes half a second.
    """
    try:
        # RTLD_NOW reports a missing symbol here instead of in the middle of training.
        library = ctypes.CDLL(path, mode=os.RTLD_NOW)
    except OSError as error:
        sys.exit(str(error))
    names = ("nccl", "ddl", "ccl", "mpi", "gloo")
    features = [name for name in names if getattr(library, f"horovod_{name}_built")()]
    text, length = ctypes.create_string_buffer(8192), ctypes.c_int()
    if "mpi" in features:
        library.MPI_Get_library_version(text, ctypes.byref(length))
    found = {"features": features, "mpi": text.value.decode(errors="replace")}
    print(f"hvkit:{json.dumps(found)}", flush=True)
    # Libraries may crash when Python unloads them in an unexpected order.
    os._exit(0)


LOAD_LIBRARY = (
    f"import ctypes, json, os, sys\n{inspect.getsource(_load_library)}_load_library(sys.argv[1])"
)
"""The program that loads the library whose path follows."""
