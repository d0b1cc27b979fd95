"""The pip options that `make` installs PyTorch with, from a stand-in for pip's output."""

import pytest

from hvkit.build import pytorch_index
from hvkit.build.pytorch_index import CPU_INDEX, pip_options
from hvkit.host.system import Output

CUDA_ONLY = Output(0, "torch (2.15.0)\nAvailable versions: 2.15.0, 2.13.0, 2.12.1\n")
BOTH = Output(0, "torch (2.15.0)\nAvailable versions: 2.15.0+cpu, 2.15.0, 2.13.0+cpu, 2.13.0\n")
NOT_THIS_ONE = Output(0, "torch (2.15.0)\nAvailable versions: 2.15.0+cpu, 2.13.0, 2.12.0+cpu\n")
UNREACHABLE = Output(
    0,
    CUDA_ONLY.stdout
    + f"Could not fetch URL {CPU_INDEX}/torch/: connection error: HTTPSConnectionPool("
    "host='download.pytorch.org', port=443): Max retries exceeded with url: /whl/cpu/torch/ "
    "(Caused by NewConnectionError('<urllib3.HTTPSConnection object at 0x7f266>: Failed to "
    "establish a new connection: [Errno -2] Name or service not known')) - skipping\n",
)
FORBIDDEN = Output(
    0,
    CUDA_ONLY.stdout
    + f"Could not fetch URL {CPU_INDEX}/torch/: 403 Client Error: Forbidden for url: x"
    " - skipping\n",
)


@pytest.fixture
def options(monkeypatch):
    """The options, where pip prints this for its own index, and this with PyTorch's."""

    def call(own, with_cpu_index, gpu="auto", has_gpu=False):
        def pip(command, timeout):
            found = with_cpu_index if CPU_INDEX in command else own
            assert found is not None, f"{command} was not to run"
            return found

        monkeypatch.setattr(pytorch_index, "run", pip)
        monkeypatch.setattr(pytorch_index, "has_nvidia_gpu", lambda: has_gpu)
        return pip_options("2.13.0", gpu)

    return call


@pytest.mark.parametrize(("gpu", "has_gpu"), [("auto", False), ("none", True)])
def test_without_a_gpu_pytorchs_index_of_cpu_builds(options, gpu, has_gpu):
    assert options(CUDA_ONLY, BOTH, gpu, has_gpu) == ["--extra-index-url", CPU_INDEX]


def test_with_a_gpu_or_where_it_offers_a_cpu_build_pips_default(options, capsys):
    assert options(None, None, has_gpu=True) == []
    assert options(None, None, gpu="nccl") == []
    assert options(BOTH, None) == []
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (UNREACHABLE, f"Could not fetch URL {CPU_INDEX}/torch/: connection error: HTTPS"),
        (FORBIDDEN, f"Could not fetch URL {CPU_INDEX}/torch/: 403 Client Error: Forbidden for"),
        (NOT_THIS_ONE, f"{CPU_INDEX} has no 2.13.0 for this Python"),
        (Output(None), "no answer in 60 s"),
    ],
    ids=["unreachable", "forbidden", "another version", "slow"],
)
def test_index_that_cannot_be_used_is_named_with_the_reason(options, capsys, output, reason):
    assert options(CUDA_ONLY, output) == []
    warning = capsys.readouterr().err
    assert f"({reason}" in warning
    assert warning.endswith("installing pip's default PyTorch, which may include 6 GB of CUDA\n")
