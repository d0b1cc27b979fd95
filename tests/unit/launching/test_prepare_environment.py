"""Which environment variables the launcher sends to ranks on other hosts."""

import pytest

from hvkit.launching.prepare import forwarded

OF_PROGRAMS = [
    *("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "HOROVOD_FUSION_THRESHOLD", "NCCL_DEBUG"),
    *("OMP_NUM_THREADS", "CUDA_DEVICE_ORDER", "HVKIT_DATA_DIR", "TF_CPP_MIN_LOG_LEVEL"),
    *("SM_CHANNEL_TRAINING", "SM_HP_LEARNING-RATE"),
]
OF_ONE_HOST = [
    *("HOME", "SSH_AUTH_SOCK", "HOSTNAME", "DISPLAY", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"),
    *("SLURM_JOB_ID", "HVKIT_RANK", "AWS_PROFILE", "SM_CURRENT_HOST", "SM_TRAINING_ENV"),
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    *("ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
]
SECRETS = [
    *("HF_TOKEN", "HF_KEY", "HF_AUTH", "NCCL_PRIVATE_KEY", "TORCH_PASSPHRASE", "WANDB_API_KEY"),
    *("AWS_SECRET_ACCESS_KEY", "PYTHON_KEYRING_PASSWORD", "HVKIT_SECRET", "TORCH_access_key"),
    "SM_HP_API-KEY",
]


@pytest.mark.parametrize("name", OF_PROGRAMS)
def test_variables_of_programs_and_frameworks_are_forwarded(name):
    assert forwarded({name: "1"}) == (name,)


@pytest.mark.parametrize("name", [*OF_ONE_HOST, *SECRETS])
def test_those_of_one_host_or_process_and_secrets_are_forwarded_only_by_name(name):
    assert forwarded({name: "1"}) == ()
    assert forwarded({name: "1"}, chosen=[name]) == (name,)


def test_a_named_variable_that_is_not_set_is_left_out():
    assert forwarded({"PATH": "/bin"}, chosen=["MISSING"]) == ("PATH",)
