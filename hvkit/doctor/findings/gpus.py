"""GPUs that cannot be used, or not as well as they could be."""

from collections.abc import Iterator

from hvkit.doctor.facts import Facts
from hvkit.doctor.findings.finding import Finding, note, problem


def gpu_findings(facts: Facts) -> Iterator[Finding]:
    """What is wrong about the GPUs; nothing on a host without."""
    gpus, torch_cuda = facts.gpus, facts.packages.torch_cuda
    if gpus.failure:
        yield problem(
            f"nvidia-smi fails: {gpus.failure}",
            "reload or reinstall NVIDIA's driver (a reboot, after an upgrade); in a container "
            "start it with `--gpus all`",
        )
    if not gpus.found:
        return
    if torch_cuda and gpus.driver_cuda and _major(torch_cuda) > _major(gpus.driver_cuda):
        yield problem(
            f"PyTorch is built for CUDA {torch_cuda}, but driver {gpus.found[0].driver} runs CUDA "
            f"{gpus.driver_cuda} at most",
            f"install a newer driver, or a PyTorch for CUDA {_major(gpus.driver_cuda)}",
        )
    yield from _cpu_versions(facts)
    libraries = facts.horovod.libraries
    nccl = any("nccl" in one.operations for one in libraries)
    if len(gpus.found) > 1 and libraries and not nccl:
        yield note(
            f"{len(gpus.found)} GPUs, but Horovod is built without NCCL: gradients travel through "
            "the host's memory",
            "`hvkit install-horovod --gpu nccl`",
        )
    if "CUDA_VISIBLE_DEVICES" in facts.environment:
        yield note(
            "CUDA_VISIBLE_DEVICES is set: ranks see no GPUs but those that it names",
            "`unset CUDA_VISIBLE_DEVICES`, if that is not meant",
        )


def _cpu_versions(facts: Facts) -> Iterator[Finding]:
    packages = facts.packages
    if packages.versions["torch"] and packages.torch_cuda is None:
        yield note(
            "there are GPUs, but this PyTorch is its CPU version",
            "install PyTorch's CUDA version, then `hvkit install-horovod`",
        )
    if len(packages.tensorflows) == 1 and "-cpu" in packages.tensorflows[0]:
        yield note(
            f"there are GPUs, but {packages.tensorflows[0]} does not use them",
            "`pip uninstall tensorflow-cpu`, `pip install 'tensorflow[and-cuda]'`, then "
            "`hvkit install-horovod`",
        )


def _major(version: str) -> int:
    return int(version.partition(".")[0])
