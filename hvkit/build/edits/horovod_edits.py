"""The changes that hvkit makes to Horovod 0.28.1, with their reasons."""

import re
import subprocess
from pathlib import Path

from hvkit.build.edits.horovod_collectives import COLLECTIVES
from hvkit.build.edits.horovod_waits import WAITS
from hvkit.build.edits.source_edits import Edit
from hvkit.build.toolchain import Toolchain

XLA_OPS = "horovod/tensorflow/xla_mpi_ops.cc"

_MPI_RUN = "horovod/runner/mpi_run.py"
_KERAS = "horovod/_keras/__init__.py"


def tensorflow_lacks_xla_headers(toolchain: Toolchain, source: Path) -> bool:
    """Whether TensorFlow lacks headers that ``xla_mpi_ops.cc`` includes.

    Runs the preprocessor, because a header that exists may include one that does not (TensorFlow
    2.21: ``highwayhash``).
    """
    tensorflow = toolchain.framework("tensorflow")
    if tensorflow is None:
        return False
    included = re.findall(
        r'^#include "tensorflow/.*"$', (source / XLA_OPS).read_text(encoding="utf-8"), re.MULTILINE
    )
    headers = tensorflow.location / "tensorflow" / "include"
    command = [*toolchain.compiler.command, "-std=c++17", "-E", "-x", "c++", f"-I{headers}", "-"]
    preprocessed = subprocess.run(
        command,
        input="\n".join(included),
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return preprocessed.returncode != 0


_CXX17_WHY = (
    "the headers of PyTorch since 2.1 and TensorFlow since 2.16 need C++17; "
    "upstream's C++14 overrides the compiler flags"
)
_CXX17_UPSTREAM = "horovod#3996, horovod#3941"

_CUDA_WHY = (
    "CMake looks for CUDA in every build: an nvcc that is a script, or one of a toolkit without "
    "libraries or of another version, stops a build that does not need it"
)
_CUDA_UPSTREAM = "Horovod's CMakeLists.txt enables CUDA wherever it finds nvcc"

_KERAS_WHY = (
    "Horovod's wrapper averages in compute_gradients, which Keras 3 optimizers do not have: each "
    "rank would silently train on its own"
)
_KERAS_UPSTREAM = "written for the optimizers of Keras 2"


def _kept_thread_state(part: str, what: str, old: str, new: str) -> Edit:
    return Edit(
        name=f"a thread state for good{part}",
        file="horovod/torch/handle_manager.cc",
        what=what,
        why="a worker of a DataLoader, forked while the background thread makes a thread state, "
        "hangs: Python before 3.11.10 then waits for a lock that nobody holds any more "
        "(python/cpython#112275)",
        upstream="PyTorch takes Python's lock to free a tensor; a thread unknown to Python gets a "
        "thread state for that each time",
        old=old,
        new=new,
    )


def _two_dashes(option: str, count: int, file: str = _MPI_RUN) -> Edit:
    place = "" if file == _MPI_RUN else f", {Path(file).parts[1]}"
    return Edit(
        name=f"mpirun --{option}{place}",
        file=file,
        what=f"-{option} becomes --{option} on the mpirun command line",
        why="Open MPI 5 takes long options with two dashes only; Open MPI 4 takes both forms",
        upstream="Open MPI 5's prterun rejects single-dash long options",
        old=f"-{option} ",
        new=f"--{option} ",
        count=count,
    )


EDITS = (
    Edit(
        name="C++17",
        file="CMakeLists.txt",
        what="the whole project is compiled as C++17",
        why=_CXX17_WHY,
        upstream=_CXX17_UPSTREAM,
        old="set(CMAKE_CXX_STANDARD 14)",
        new="set(CMAKE_CXX_STANDARD 17)",
    ),
    Edit(
        name="C++17 for PyTorch",
        file="horovod/torch/CMakeLists.txt",
        what="the PyTorch library is compiled as C++17",
        why=_CXX17_WHY,
        upstream=_CXX17_UPSTREAM,
        old="set(CMAKE_CXX_STANDARD 14)",
        new="set(CMAKE_CXX_STANDARD 17)",
    ),
    Edit(
        name="no XLA ops",
        file="horovod/tensorflow/CMakeLists.txt",
        what="xla_mpi_ops.cc is left out of the TensorFlow library",
        why="it includes XLA headers that TensorFlow no longer ships; Horovod uses these ops only "
        "with HOROVOD_ENABLE_XLA_OPS=1",
        upstream="TensorFlow moved tensorflow/compiler/xla to xla/ and ships no highwayhash",
        old='list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        new="",
        applies=tensorflow_lacks_xla_headers,
    ),
    Edit(
        name="CUDA for GPU operations only",
        file="CMakeLists.txt",
        what="only a build for GPUs looks for CUDA's compiler",
        why=_CUDA_WHY,
        upstream=_CUDA_UPSTREAM,
        old="include(CheckLanguage)\n",
        new="include(CheckLanguage)\nif(HOROVOD_GPU_OPERATIONS)\n",
    ),
    Edit(
        name="CUDA for GPU operations only, end",
        file="CMakeLists.txt",
        what="the end of the same condition",
        why=_CUDA_WHY,
        upstream=_CUDA_UPSTREAM,
        old="macro(ADD_CUDA)\n",
        new="endif()\n\nmacro(ADD_CUDA)\n",
    ),
    Edit(
        name="no CUDA for PyTorch alone",
        file="cmake/Modules/FindPytorch.cmake",
        what="a PyTorch built for CUDA or ROCm no longer turns Horovod's build into one for GPUs",
        why="PyTorch takes the folder above nvcc's for a toolkit, and Horovod's CMake then "
        "requires CUDA in a build without GPU operations",
        upstream="horovod/torch/CMakeLists.txt calls add_cuda() for every CUDA version of PyTorch",
        old="if(Pytorch_ROCM)\n",
        new="if(NOT HOROVOD_GPU_OPERATIONS)\n"
        "    set(Pytorch_CUDA FALSE)\n    set(Pytorch_ROCM FALSE)\nendif()\nif(Pytorch_ROCM)\n",
    ),
    Edit(
        name="Python's headers without distutils",
        file="horovod/torch/CMakeLists.txt",
        what="the folder of Python's headers comes from sysconfig",
        why="Python 3.12 removed distutils; without setuptools' replacement the build fails much "
        "later, with a missing Python.h",
        upstream="written for Python before 3.12",
        old="from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        new="import sysconfig; print(sysconfig.get_path('include'))",
    ),
    Edit(
        name="GPU tensors refused without CUDA",
        file="horovod/torch/mpi_ops.py",
        what="a tensor on a GPU raises an error in a build without GPUs",
        why="the library would throw in its background thread, which kills the process without a "
        "Python error",
        upstream="with_device in horovod/torch/cuda_util.cc throws std::logic_error without CUDA",
        old="def _check_function(function_factory, tensor):\n",
        new="""\
def _check_function(function_factory, tensor):
    if tensor.is_cuda and not (cuda_built() or rocm_built()):
        raise ValueError(
            'a tensor is on {}, and this Horovod is built without GPUs. Build it for them with '
            '`hvkit install-horovod --gpu nccl`, or move the tensor to the CPU.'
            .format(tensor.device))
""",
    ),
    Edit(
        name="run-time search path",
        file="CMakeLists.txt",
        what="the libraries record the search path in HVKIT_RPATH and no other",
        why="CMake records the folder of the MPI that it links with; a cached wheel would load "
        "that MPI in every environment",
        upstream="CMake's default build RPATH",
        old="set(CMAKE_CXX_EXTENSIONS OFF)\n",
        new="set(CMAKE_CXX_EXTENSIONS OFF)\n"
        "set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)\n"
        'set(CMAKE_INSTALL_RPATH "$ENV{HVKIT_RPATH}")\n',
    ),
    Edit(
        name="no setup_requires",
        file="setup.py",
        what="the build uses installed packages only",
        why="setup_requires makes setuptools fetch and build the run-time dependencies while "
        "building",
        upstream="setup_requires, deprecated by setuptools 58.3",
        old="      setup_requires=require_list if is_build_action() else [],\n",
        new="",
    ),
    _two_dashes("mca", count=6),
    _two_dashes("bind-to", count=2),
    _two_dashes("map-by", count=2),
    _two_dashes("rank-by", count=1),
    _two_dashes("mca", count=1, file="horovod/spark/mpi_run.py"),
    Edit(
        name="MPICH recognised",
        file=_MPI_RUN,
        what="horovodrun recognises an mpirun that prints Hydra's name as MPICH's",
        why="horovodrun reports that there is no MPI: MPICH's mpirun does not always name MPICH",
        upstream="`mpirun --version` of MPICH 5.0 starts with 'HYDRA build details'",
        old="        elif 'MPICH' in output:\n",
        new="        elif 'MPICH' in output or 'HYDRA build details' in output:\n",
    ),
    Edit(
        name="hostfiles",
        file="horovod/runner/common/util/hosts.py",
        what="horovodrun reads comments, blank lines and max_slots in hostfiles as Open MPI does",
        why="a blank line or a comment raises IndexError, and max_slots is read as slots",
        upstream="parse_host_files reads the text after the first equals sign of each line",
        old="""\
            line = line.rstrip()
            hostname = line.split()[0]
            slots = line.split('=')[1]
""",
        new="""\
            line = line.partition('#')[0].strip()
            if not line:
                continue
            hostname = line.split()[0]
            slots = re.search(r'\\sslots\\s*=\\s*([0-9]+)(?!\\S)', line)
            if slots is None:
                raise ValueError(
                    "{}: {!r} names no slots: write `{} slots=N`".format(filename, line, hostname))
            slots = slots.group(1)
""",
    ),
    Edit(
        name="zero_grad arguments",
        file="horovod/torch/optimizer.py",
        what="zero_grad accepts the arguments of PyTorch's zero_grad",
        why="zero_grad(set_to_none=...), part of PyTorch's interface since 1.7, raises TypeError",
        upstream="overridden without its argument in both optimizer wrappers",
        old="    def zero_grad(self):\n",
        new="    def zero_grad(self, *args, **kwargs):\n",
        count=2,
    ),
    Edit(
        name="zero_grad arguments passed on",
        file="horovod/torch/optimizer.py",
        what="zero_grad passes its arguments on to PyTorch's zero_grad",
        why="set_to_none would be accepted and ignored",
        upstream="overridden without its argument in both optimizer wrappers",
        old="super(self.__class__, self).zero_grad()",
        new="super(self.__class__, self).zero_grad(*args, **kwargs)",
        count=2,
    ),
    Edit(
        name="Keras 3 refused",
        file=_KERAS,
        what="a check that the optimizer has a method in which Horovod can average gradients",
        why=_KERAS_WHY,
        upstream=_KERAS_UPSTREAM,
        old="def create_distributed_optimizer(",
        new='''\
def _require_gradient_methods(optimizer_class):
    """Raise for an optimizer of Keras 3, which never calls back into Horovod's wrapper."""
    methods = ('compute_gradients', '_compute_gradients', 'get_gradients')
    if not any(hasattr(optimizer_class, method) for method in methods):
        raise NotImplementedError(
            "Horovod's Keras optimizer cannot average gradients under Keras 3: the ranks would "
            "train apart. Got {}.{}. Use `model, optimizer = hvkit.distribute(model, optimizer)` "
            "with the plain Keras optimizer instead.".format(
                optimizer_class.__module__, optimizer_class.__name__))


def create_distributed_optimizer(''',
    ),
    Edit(
        name="Keras 3 refused by DistributedOptimizer",
        file=_KERAS,
        what="DistributedOptimizer makes this check",
        why=_KERAS_WHY,
        upstream=_KERAS_UPSTREAM,
        old="    class _DistributedOptimizer(*optimizer.__class__.__bases__):\n",
        new="    _require_gradient_methods(optimizer.__class__)\n\n"
        "    class _DistributedOptimizer(*optimizer.__class__.__bases__):\n",
    ),
    Edit(
        name="Keras 3 refused by load_model",
        file=_KERAS,
        what="load_model makes this check on the optimizer class of its Keras",
        why="under Keras 3 it returns a model with the plain optimizer, which averages nothing",
        upstream=_KERAS_UPSTREAM,
        old="    if legacy_opts:\n",
        new="    _require_gradient_methods(keras.optimizers.Optimizer)\n    if legacy_opts:\n",
    ),
    _kept_thread_state(
        "",
        "a function that gives the thread that calls it a thread state of Python's, for good",
        "int HandleManager::AllocateHandle() {\n",
        """\
namespace {

// PyGILState_Release deletes a thread state only if no PyGILState_Ensure is left open.
void KeepThreadState() {
  if (Py_IsInitialized() && PyGILState_GetThisThreadState() == nullptr) {
    PyGILState_Ensure();
    PyEval_SaveThread();
  }
}

} // namespace

int HandleManager::AllocateHandle() {
""",
    ),
    _kept_thread_state(
        ", call",
        "the background thread calls it before it frees a tensor",
        "void HandleManager::MarkDone(int handle, const Status& status) {\n",
        "void HandleManager::MarkDone(int handle, const Status& status) {\n  KeepThreadState();\n",
    ),
    _kept_thread_state(
        ", include",
        "Python's header",
        '#include "handle_manager.h"\n',
        '#include <Python.h>\n\n#include "handle_manager.h"\n',
    ),
    *WAITS,
    *COLLECTIVES,
)
