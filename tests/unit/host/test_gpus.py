"""The GPU of each rank, and those that CUDA shows."""

import pytest

from hvkit.errors import LaunchError
from hvkit.host import gpus
from hvkit.host.gpus import Gpu, Gpus, gpu_of_rank, visible_gpus


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
    ("of_host", "listed", "visible"),
    [
        (4, None, 4),
        (4, "0,1", 2),
        (4, "3", 1),
        (4, "GPU-8932f937,MIG-1b2c", 2),
        (4, "", 0),
        (4, "-1", 0),
        (4, "NoDevFiles", 0),
        (4, "0,-1,1", 1),
        (4, "1,9,2", 1),  # CUDA's list ends before the first that does not exist
        (0, "0,1", 0),
    ],
)
def test_ranks_may_use_the_gpus_that_cuda_shows_them(monkeypatch, of_host, listed, visible):
    found = tuple(Gpu(number, "H100", None, "580") for number in range(of_host))
    monkeypatch.setattr(gpus, "gpus", lambda: Gpus(found, None, "13.0"))
    assert visible_gpus({} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}) == visible
