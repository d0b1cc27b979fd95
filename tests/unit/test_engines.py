import os
import sys
from types import SimpleNamespace

import pytest
import tensorflow as tf
import torch

from hvkit.communication import engines
from hvkit.errors import HorovodNotFoundError
from hvkit.host.cpus import Allowance


@pytest.mark.parametrize("libraries", [[], ["torch"], ["tensorflow"], ["torch", "tensorflow"]])
def test_the_frameworks_that_horovod_was_built_for_are_those_with_a_library(
    libraries, tmp_path, monkeypatch
):
    package = tmp_path / "horovod"
    for framework in ("torch", "tensorflow"):
        (package / framework).mkdir(parents=True)
        if framework in libraries:
            (package / framework / "mpi_lib_v2.cpython-311-x86_64-linux-gnu.so").touch()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "horovod", raising=False)
    assert engines.built_for() == libraries


@pytest.fixture
def container(monkeypatch):
    """A container with the time of 5 CPUs on a host with 64."""
    monkeypatch.setattr(engines, "allowance", lambda: Allowance(5.0, None))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_ranks_of_pytorch_share_the_time_of_their_container(container, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    before = torch.get_num_threads()
    try:
        engine = _unstarted(engines.PyTorchEngine)
        engine.hvd = SimpleNamespace(allgather=lambda tensor, name: torch.cat([tensor] * 2))
        engine.take_device(local_rank=0, local_size=2)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_ranks_of_tensorflow_share_the_time_of_their_container(container, monkeypatch):
    asked = []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [])
    # TensorFlow takes it only once in a process, before anything else.
    monkeypatch.setattr(engines, "_tensorflow_has_started", lambda: False)
    monkeypatch.setattr(tf.config.threading, "set_intra_op_parallelism_threads", asked.append)
    _unstarted(engines.TensorFlowEngine).take_device(local_rank=0, local_size=2)
    assert asked == [3]


def _unstarted(engine):
    """The engine without Horovod, which starts only where there are ranks."""
    return object.__new__(engine)


def test_a_library_for_another_tensorflow_is_refused_before_it_is_loaded(tmp_path, monkeypatch):
    package = tmp_path / "horovod"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('loaded')")
    (package / "metadata.json").write_text('{"tensorflow": "2.1.0"}')
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(HorovodNotFoundError, match=r"built for TensorFlow 2\.1\.0, and TensorFlow"):
        engines.TensorFlowEngine()
