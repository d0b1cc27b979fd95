"""For the PyTorch recipes: images for a ``DataLoader``, and residual networks.

The networks are ResNet-20 for CIFAR-10 and ResNet-50 for ImageNet, from He et al., "Deep Residual
Learning for Image Recognition" (2015). As is usual since, ResNet-50 has the stride of a stage's
first block in the 3x3 convolution.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from common.images import AugmentedImages, Images


class ImageRows(Dataset[tuple[np.ndarray, np.ndarray]]):
    """Rows of images. The loader reads a batch in one call; its ``collate_fn`` is ``to_tensors``.

    Attributes:
        images: between epochs it may be replaced by as many other images.
    """

    def __init__(self, images: Images | AugmentedImages) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
        return self.images.batch(np.array(rows))


def to_tensors(batch: tuple[np.ndarray, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels with channels first and labels: the ``collate_fn`` for ``ImageRows``.

    In memory the channels of colour images stay last, which makes convolutions faster.
    """
    pixels, labels = (torch.from_numpy(part) for part in batch)
    return (pixels[:, None] if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2)), labels


def resnet20(classes: int = 10) -> nn.Module:
    """ResNet-20: colour images of any size in, logits out; no weights in the shortcuts.

    It has 0.27 million weights.

    Args:
        classes: number of logits.
    """
    layers: list[nn.Module] = [conv_norm(3, 16, 3), nn.ReLU(inplace=True)]
    channels = 16
    for stage, width in enumerate((16, 32, 64)):
        for block in range(3):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(BasicBlock(channels, width, stride))
            channels = width
    return initialised(nn.Sequential(*layers, *head(channels, classes)))


def resnet50(classes: int = 1000) -> nn.Module:
    """ResNet-50: colour images of any size in, logits out; 25.6 million weights at 1,000 classes.

    Args:
        classes: number of logits.
    """
    stem = conv_norm(3, 64, 7, stride=2)
    layers: list[nn.Module] = [stem, nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    channels = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Bottleneck(channels, width, stride))
            channels = 4 * width
    return initialised(nn.Sequential(*layers, *head(channels, classes)))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions; the shortcut drops pixels and adds empty channels if needed."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = conv_norm(channels, width, 3, stride)
        self.second = conv_norm(width, width, 3)
        self.stride = stride
        self.new_channels = width - channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(F.relu(self.first(x), inplace=True))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        return F.relu(y + F.pad(shortcut, (0, 0, 0, 0, 0, self.new_channels)), inplace=True)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions to four times the width, and a projected shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.reduce = conv_norm(channels, width, 1)
        self.middle = conv_norm(width, width, 3, stride)
        self.expand = conv_norm(width, 4 * width, 1)
        same = channels == 4 * width and stride == 1
        self.shortcut = nn.Identity() if same else conv_norm(channels, 4 * width, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.reduce(x), inplace=True)
        y = self.expand(F.relu(self.middle(y), inplace=True))
        return F.relu(y + self.shortcut(x), inplace=True)


def conv_norm(channels: int, width: int, size: int, stride: int = 1) -> nn.Sequential:
    """A convolution that keeps height and width (divided by the stride), and batch norm."""
    convolution = nn.Conv2d(channels, width, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width))


def head(channels: int, classes: int) -> list[nn.Module]:
    """The mean over all pixels, then one dense layer."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]


def initialised(model: nn.Module) -> nn.Module:
    """Draw the kernels as He et al. do ("Delving Deep into Rectifiers", 2015).

    Logits start small, which suits large learning rates (Goyal et al. 2017, section 5.1).
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)
    return model
