"""Which environment variables the launcher sends to ranks on other hosts."""

import pytest

from hvkit.launching.forwarded_variables import forwarded


@pytest.mark.parametrize(
    "name",
    [
        "PATH",
        "LD_LIBRARY_PATH",
        "PYTHONPATH",
        "HOROVOD_FUSION_THRESHOLD",
        "NCCL_DEBUG",
        "OMP_NUM_THREADS",
        "CUDA_DEVICE_ORDER",
        "HVKIT_DATA_DIR",
        "TF_CPP_MIN_LOG_LEVEL",
        "SM_CHANNEL_TRAINING",
        "SM_HP_LEARNING-RATE",
    ],
)
def test_variables_of_programs_and_frameworks_are_forwarded(name):
    assert forwarded({name: "1"}) == (name,)


@pytest.mark.parametrize(
    "name",
    [
        "HOME",
        "SSH_AUTH_SOCK",
        "HOSTNAME",
        "DISPLAY",
        "OMPI_COMM_WORLD_RANK",
        "PMIX_RANK",
        "SLURM_JOB_ID",
        "HVKIT_RANK",
        "AWS_PROFILE",
        "SM_CURRENT_HOST",
        "SM_TRAINING_ENV",
    ],
)
def test_variables_of_one_host_or_process_are_not_forwarded(name):
    assert forwarded({name: "1"}) == ()


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "HF_KEY",
        "HF_AUTH",
        "NCCL_PRIVATE_KEY",
        "TORCH_PASSPHRASE",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "PYTHON_KEYRING_PASSWORD",
        "HVKIT_SECRET",
        "TORCH_access_key",
        "SM_HP_API-KEY",
    ],
)
def test_secrets_are_forwarded_only_by_name(name):
    assert forwarded({name: "1"}) == ()
    assert forwarded({name: "1"}, chosen=[name]) == (name,)


@pytest.mark.parametrize(
    "name",
    [
        "CUDA_VISIBLE_DEVICES",
        "NVIDIA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "GPU_DEVICE_ORDINAL",
    ],
)
def test_a_list_of_one_hosts_gpus_is_forwarded_only_by_name(name):
    assert forwarded({name: "2,3"}) == ()
    assert forwarded({name: "2,3"}, chosen=[name]) == (name,)


def test_a_named_variable_that_is_not_set_is_left_out():
    assert forwarded({"PATH": "/bin"}, chosen=["MISSING"]) == ("PATH",)
