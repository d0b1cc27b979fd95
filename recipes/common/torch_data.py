"""Images as a PyTorch ``DataLoader`` reads them."""

import numpy as np
import torch
from torch.utils.data import Dataset

from common.augment import AugmentedImages
from common.images import Images


class ImageRows(Dataset[tuple[np.ndarray, np.ndarray]]):
    """Rows of images; the loader gets those of a batch in one call, with ``to_tensors``.

    Attributes:
        images: may be replaced between epochs by others of the same number.
    """

    def __init__(self, images: Images | AugmentedImages) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
        return self.images.batch(np.array(rows))


def to_tensors(batch: tuple[np.ndarray, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels with channels first and labels: the ``collate_fn`` for ``ImageRows``.

    In memory the channels of colour images stay last, in which convolutions are faster.
    """
    pixels, labels = (torch.from_numpy(part) for part in batch)
    return (pixels[:, None] if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2)), labels
