import os
import sys

import pytest
from on_ranks import (  # noqa: F401
    pytest_collection_finish,
    pytest_runtest_makereport,
    pytest_runtest_protocol,
    show_rank_0_alone,
)

import hvkit


def pytest_addoption(parser):
    parser.addoption(
        "--without-averaging",
        action="store_true",
        help="take the averaging out of hvkit and expect every test to fail",
    )
    parser.addoption(
        "--gpu", action="store_true", help="make the tests' tensors of PyTorch on this rank's GPU"
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if hvkit.size() == 1 and not config.option.collectonly:
        pytest.exit(
            "tests/parallel needs several ranks: mpirun -np 2 python -m pytest tests/parallel",
            returncode=2,
        )
    show_rank_0_alone(config)
    if config.option.gpu:
        _make_tensors_on_gpu()


def _make_tensors_on_gpu():
    """Whoever makes a tensor gets it on the GPU; tests also where they turn an array into one."""
    import torch

    torch.set_default_device("cuda")
    from_array, to_array = torch.from_numpy, torch.Tensor.numpy
    as_array = torch.Tensor.__array__

    def by_test():
        file = sys._getframe(2).f_code.co_filename
        return f"{os.sep}tests{os.sep}" in file or f"{os.sep}_pytest{os.sep}" in file

    class OnGpu(torch.Generator):
        def __new__(cls, device="cuda"):
            return super().__new__(cls, device)

    torch.Generator = OnGpu  # PyTorch refuses another one for tensors there
    torch.from_numpy = lambda array: from_array(array).cuda() if by_test() else from_array(array)
    torch.Tensor.__array__ = lambda self, *given: as_array(self.cpu(), *given)
    torch.Tensor.numpy = lambda self, **options: to_array(
        self.cpu() if by_test() else self, **options
    )


def pytest_collection_modifyitems(config, items):
    if hvkit.size() > 2:
        covered = [item for item in items if item.get_closest_marker("two_ranks")]
        config.hook.pytest_deselected(items=covered)
        items[:] = [item for item in items if item not in covered]
    if config.option.without_averaging:
        for item in items:
            item.add_marker(pytest.mark.xfail(strict=True, raises=AssertionError))


@pytest.fixture(autouse=True)
def _averaging_taken_out(request, monkeypatch):
    if not request.config.option.without_averaging:
        return
    from hvkit.frameworks.pytorch.gradients.buckets import Bucket
    from hvkit.sync import fingerprints

    if os.environ.get("KERAS_BACKEND") != "torch":  # there Keras's gradients are PyTorch's
        from hvkit.frameworks.keras.gradients.averager import GradientAverager
        from hvkit.frameworks.keras.weights.agreements import Network

        monkeypatch.setattr(GradientAverager, "__call__", lambda self, gradients, *_: gradients)
        monkeypatch.setattr(Network, "_mean", lambda self, vector, *_: vector)
    monkeypatch.setattr(Bucket, "launch", lambda self, wire: setattr(self, "handle", 0))
    monkeypatch.setattr(Bucket, "wait", lambda self, wire: setattr(self, "handle", None))
    # What ranks compare would notice before the tests do.
    monkeypatch.setattr(fingerprints, "judge", lambda *_, **__: "")
