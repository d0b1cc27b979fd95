"""The networks have the paper's number of weights and fitting shapes."""

import ast
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[3] / "recipes"


def torch_weights(model):
    return sum(parameter.numel() for parameter in model.parameters())


def keras_weights(model):
    return sum(int(weight.value.shape.num_elements()) for weight in model.trainable_variables)


@pytest.fixture
def for_torch():
    pytest.importorskip("torch")
    from common import for_torch

    return for_torch


@pytest.fixture
def for_keras():
    pytest.importorskip("tensorflow")
    from common import for_keras

    return for_keras


RESNET20 = 269_722  # 0.27 million in table 6 of He et al. (2015)


def test_torch_resnets_have_the_papers_weights_and_logits(for_torch):
    import torch

    small, large = for_torch.resnet20(), for_torch.resnet50()
    assert (torch_weights(small), torch_weights(large)) == (RESNET20, 25_557_032)
    assert small(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert large(torch.zeros(2, 3, 64, 64)).shape == (2, 1000)
    # The stride is in the 3x3.
    strides = {
        (block.reduce[0].stride, block.middle[0].stride)
        for block in large
        if isinstance(block, for_torch.Bottleneck)
    }
    assert strides == {((1, 1), (1, 1)), ((1, 1), (2, 2))}


def test_keras_resnets_have_the_papers_weights_and_logits(for_keras):
    small, large = for_keras.resnet20(), for_keras.resnet50(image_size=64)
    # The large one has more than PyTorch's by the convolutions' biases.
    assert (keras_weights(small), keras_weights(large)) == (RESNET20, 25_583_592)
    assert (small.output_shape, large.output_shape) == ((None, 10), (None, 1000))


def test_both_resnet20s_compute_the_same_from_the_same_weights(for_torch, for_keras):
    import numpy as np
    import torch

    ours, theirs = for_torch.resnet20().eval(), for_keras.resnet20()
    scales = [m.weight for m in ours.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    targets = [weight for weight in theirs.trainable_variables if weight.name == "gamma"]
    for target, scale in zip(targets, scales, strict=True):
        torch.nn.init.uniform_(scale)
        target.assign(scale.detach().numpy())
    kernels = {id(p): p for p in ours.parameters() if p.ndim > 1}
    values = [
        p.detach().numpy().transpose(2, 3, 1, 0) if p.ndim == 4 else p.detach().numpy().T
        for p in kernels.values()
    ]
    targets = [weight for weight in theirs.trainable_variables if weight.name == "kernel"]
    for target, value in zip(targets, values, strict=True):
        target.assign(value)
    bias = next(weight for weight in theirs.trainable_variables if weight.name == "bias")
    bias.assign(ours[-1].bias.detach().numpy())
    images = np.random.default_rng(0).standard_normal((2, 32, 32, 3), dtype=np.float32)
    with torch.no_grad():
        logits = ours(torch.from_numpy(images).permute(0, 3, 1, 2)).numpy()
    np.testing.assert_allclose(theirs(images, training=False), logits, rtol=1e-3, atol=1e-3)


def test_logits_start_small_in_both_frameworks(for_torch, for_keras):
    import numpy as np
    import torch

    images = np.random.default_rng(0).standard_normal((64, 32, 32, 3), dtype=np.float32)
    with torch.no_grad():
        ours = for_torch.resnet20()(torch.from_numpy(images).permute(0, 3, 1, 2)).numpy()
    theirs = for_keras.resnet20()(images, training=True).numpy()
    # The loss starts near log(10), that of equal probabilities.
    assert np.abs(ours).max() < 2
    assert np.abs(theirs).max() < 2


def test_fit_and_the_custom_loop_train_the_same_network_on_mnist():
    fit, loop = (
        ast.dump(part)
        for recipe in ("mnist_keras", "mnist_tf")
        for part in ast.parse((RECIPES / f"{recipe}.py").read_text()).body
        if getattr(part, "name", "") == "make_model"
    )
    assert fit == loop
