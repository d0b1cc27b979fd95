import pytest
from libraries import TensorFlow, Torch


@pytest.fixture(params=[Torch, TensorFlow])
def library(request):
    return request.param()
