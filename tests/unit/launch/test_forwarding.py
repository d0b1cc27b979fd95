"""What ranks on other hosts get of the environment."""

import pytest

from hvkit.launch.forwarding import forwarded


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
    ],
)
def test_what_programs_and_frameworks_read_is_forwarded(name):
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
    ],
)
def test_what_belongs_to_one_host_or_process_stays(name):
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
    ],
)
def test_secrets_stay_unless_they_are_asked_for(name):
    assert forwarded({name: "1"}) == ()
    assert forwarded({name: "1"}, asked=[name]) == (name,)


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
def test_a_list_of_one_hosts_gpus_stays_unless_it_is_asked_for(name):
    assert forwarded({name: "2,3"}) == ()
    assert forwarded({name: "2,3"}, asked=[name]) == (name,)


def test_what_is_asked_for_but_not_set_is_left_out():
    assert forwarded({"PATH": "/bin"}, asked=["MISSING"]) == ("PATH",)
