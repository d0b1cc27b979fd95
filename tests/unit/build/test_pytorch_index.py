"""The pip options that `make` installs PyTorch with, from a stand-in for pip's output."""

from pathlib import Path

import pytest

from hvkit.build import pytorch_index
from hvkit.build.pytorch_index import CPU_INDEX, pip_options
from hvkit.host.commands import Output

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


class Pip:
    """Pip on a machine without a GPU: its output for its own index and with PyTorch's."""

    def __init__(self, own, with_cpu_index):
        self.own, self.with_cpu_index = own, with_cpu_index
        self.calls = 0

    def __call__(self, command, timeout):
        self.calls += 1
        return self.with_cpu_index if CPU_INDEX in command else self.own


def options(monkeypatch, pip, gpu="auto", has_gpu=False):
    monkeypatch.setattr(pytorch_index, "run", pip)
    monkeypatch.setattr(pytorch_index, "has_nvidia_gpu", lambda: has_gpu)
    return pip_options("2.13.0", gpu)


def test_without_a_gpu_pytorchs_index_of_cpu_builds(monkeypatch):
    pip = Pip(CUDA_ONLY, BOTH)
    assert options(monkeypatch, pip) == ["--extra-index-url", CPU_INDEX]


def test_with_a_gpu_pips_default(monkeypatch):
    pip = Pip(CUDA_ONLY, BOTH)
    assert options(monkeypatch, pip, has_gpu=True) == []
    assert options(monkeypatch, pip, gpu="nccl") == []
    assert pip.calls == 0


def test_gpu_none_counts_as_a_machine_without_a_gpu(monkeypatch):
    pip = Pip(CUDA_ONLY, BOTH)
    assert options(monkeypatch, pip, "none", has_gpu=True) == ["--extra-index-url", CPU_INDEX]


def test_pips_own_settings_suffice_where_they_offer_a_cpu_build(monkeypatch, capsys):
    pip = Pip(BOTH, None)
    assert options(monkeypatch, pip) == []
    assert pip.calls == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (UNREACHABLE, f"{CPU_INDEX}: Failed to establish a new connection: [Errno -2] Name or"),
        (FORBIDDEN, f"{CPU_INDEX}: 403 Client Error: Forbidden for url: x)"),
        (NOT_THIS_ONE, f"{CPU_INDEX} has no 2.13.0 for this Python"),
        (Output(None), "no answer in 60 s"),
    ],
    ids=["unreachable", "forbidden", "another version", "slow"],
)
def test_index_that_cannot_be_used_is_named_with_the_reason(monkeypatch, capsys, output, reason):
    assert options(monkeypatch, Pip(CUDA_ONLY, output)) == []
    warning = capsys.readouterr().err
    assert f"({reason}" in warning
    assert warning.endswith("installing pip's default PyTorch, which may include 6 GB of CUDA\n")


def test_constraints_pin_pytorch():
    constraints = Path(__file__).parents[3] / "constraints.txt"
    assert "torch==" in constraints.read_text()
