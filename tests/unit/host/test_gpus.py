import pytest

from hvkit.errors import LaunchError
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
