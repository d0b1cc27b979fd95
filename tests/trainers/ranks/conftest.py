import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from on_ranks import (  # noqa: F401
    pytest_collection_finish,
    pytest_runtest_makereport,
    pytest_runtest_protocol,
    show_rank_0_alone,
)

import hvkit


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if hvkit.size() == 1 and not config.option.collectonly:
        pytest.exit("these tests need ranks: mpirun -np 2 python -m pytest ...", returncode=2)
    show_rank_0_alone(config)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder of all ranks."""
    return Path(hvkit.broadcast(str(tmp_path_factory.mktemp("trainers"))))


@pytest.fixture(scope="session")
def one_process(folder):
    """Returns what a module's cases give in one process, without hvkit, by name."""
    known = {}

    def results(module):
        if module not in known:
            file = folder / f"{module.__name__}.pt"
            if hvkit.is_main():
                command = [
                    "env",
                    "OMP_NUM_THREADS=1",
                    sys.executable,
                    module.__file__,
                    str(hvkit.size()),
                    str(file),
                ]
                mpi = ("OMPI_", "PMIX_", "PRTE_", "HVKIT_")  # a part of this rank, for MPI
                clean = {k: v for k, v in os.environ.items() if not k.startswith(mpi)}
                done = subprocess.run(
                    command, env=clean, cwd=folder, capture_output=True, text=True, check=False
                )
                assert done.returncode == 0, done.stderr
            hvkit.barrier()
            known[module] = torch.load(file, weights_only=False)
        return known[module]

    return results


@pytest.fixture(autouse=True)
def _in_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
