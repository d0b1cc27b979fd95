import pytest

from hvkit.errors import LaunchError
from hvkit.host.cpus import threads_of_rank
from hvkit.host.gpus import gpu_of_rank


@pytest.mark.parametrize(
    ("local_rank", "local_size", "visible", "expected"),
    [
        (3, 4, 0, None),
        (0, 4, 4, 0),
        (3, 4, 4, 3),
        (1, 2, 8, 1),
        (3, 4, 1, 0),  # the launcher shows each rank its own
    ],
)
def test_each_rank_takes_the_gpu_of_its_local_rank(local_rank, local_size, visible, expected):
    assert gpu_of_rank(local_rank, local_size, visible) == expected


def test_more_ranks_than_gpus_is_an_error():
    with pytest.raises(LaunchError, match="8 ranks on a host with 4 GPUs"):
        gpu_of_rank(0, 8, 4)


@pytest.mark.parametrize(
    ("local_size", "usable", "host", "expected"),
    [
        (1, 8, 8, 8),
        (2, 8, 8, 4),
        (3, 8, 8, 2),
        (16, 8, 8, 1),
        (2, 1, 8, 1),  # bound to a core
        (2, 4, 8, 4),  # bound to half of the host
    ],
)
def test_the_ranks_of_a_host_share_its_cpus(local_size, usable, host, expected):
    assert threads_of_rank(local_size, usable, host, None) == expected


@pytest.mark.parametrize(
    ("local_size", "usable", "limit", "expected"),
    [
        (2, 64, 2.0, 1),
        (2, 32, 2.0, 1),  # bound to half of the host
        (2, 64, 8.0, 4),
        (2, 64, 5.0, 3),  # rounded up
        (1, 64, 1.5, 2),
        (8, 64, 0.5, 1),
        (2, 1, 8.0, 1),  # bound to less than the limit gives
        (2, 64, 128.0, 32),  # a limit above what the host has
    ],
)
def test_the_ranks_of_a_container_share_the_time_that_it_has(local_size, usable, limit, expected):
    assert threads_of_rank(local_size, usable, 64, limit) == expected
