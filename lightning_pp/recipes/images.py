"""Image classifiers of the transformers library (extra ``hf``), and images in NumPy files.

Shape letters: B images, C channels, H height, W width, K classes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_pp.recipes.transformers_module import TransformersModule


class ImageClassifier(TransformersModule):
    """A transformers image classifier; the loss is the mean cross-entropy of the classes in nats.

    Batches are dicts with ``pixel_values``, float32 [B, C, H, W], and ``labels``, int64 [B].
    """

    auto_class = "AutoModelForImageClassification"


class StoredImages(Dataset[dict[str, Tensor]]):
    """Images of two memory-mapped files.

    Args:
        folder: Has ``images.npy``, uint8 [N, H, W, C], and ``labels.npy``, integers [N].
    """

    def __init__(self, folder: Path) -> None:
        self.images = np.load(folder / "images.npy", mmap_mode="r")
        self.labels = np.load(folder / "labels.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """``pixel_values``, float32 [C, H, W] from -1 to 1, and ``labels``, int64."""
        pixels = torch.from_numpy(np.array(self.images[index])).permute(2, 0, 1).float() / 127.5 - 1
        return {"pixel_values": pixels, "labels": torch.tensor(int(self.labels[index]))}


class Gratings(Dataset[dict[str, Tensor]]):
    """Drawn images: stripes under noise; their direction is the class.

    Args:
        num_images: How many.
        image_size: Height and width.
        num_classes: Directions K.
        first: Number of the first; each number is another image.
    """

    def __init__(self, num_images: int, image_size: int, num_classes: int, first: int = 0) -> None:
        self.num_images, self.image_size, self.num_classes, self.first = num_images, image_size, num_classes, first

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """``pixel_values``, float32 [3, H, W], and ``labels``, int64."""
        generator = torch.Generator().manual_seed(self.first + index)
        label = int(torch.randint(self.num_classes, (), generator=generator))
        phase, period = torch.rand(2, generator=generator).tolist()
        angle = math.pi * label / self.num_classes
        axis = torch.arange(self.image_size) / self.image_size
        along = math.cos(angle) * axis[None, :] + math.sin(angle) * axis[:, None]
        stripes = torch.sin(2 * math.pi * (along * (4 + 4 * period) + phase))
        noise = torch.randn(3, self.image_size, self.image_size, generator=generator)
        return {"pixel_values": 0.5 * stripes + 0.5 * noise, "labels": torch.tensor(label)}


class ImageDataModule(L.LightningDataModule):
    """Images of NumPy files, or drawn ones.

    Args:
        folder: Folder with ``train`` and ``val``, each with ``images.npy``, uint8 [N, H, W, C], and ``labels.npy``,
            [N]. None: drawn stripes, whose direction is the class.
        batch_size: Images in a batch of a data-parallel rank.
        image_size: Height and width of drawn images.
        num_classes: Number of classes of drawn images.
        num_train_images: Drawn images per epoch.
        num_val_images: Drawn images per validation.
        num_workers: Loader processes.

    Raises:
        FileNotFoundError: A file is missing; all that are missing are named.
    """

    def __init__(
        self,
        folder: str | None = None,
        batch_size: int = 64,
        image_size: int = 224,
        num_classes: int = 10,
        num_train_images: int = 10000,
        num_val_images: int = 256,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.folder = None if folder is None else Path(folder).expanduser()
        self.batch_size = batch_size
        self.image_size = image_size
        self.num_classes = num_classes
        self.num_train_images = num_train_images
        self.num_val_images = num_val_images
        self.num_workers = num_workers
        if self.folder is not None:
            files = [self.folder / part / f"{name}.npy" for part in ("train", "val") for name in ("images", "labels")]
            missing = [str(file) for file in files if not file.is_file()]
            if missing:
                raise FileNotFoundError(f"data.folder={folder} lacks {', '.join(missing)} (looked from {Path.cwd()})")

    def _dataset(self, part: str) -> Dataset[dict[str, Tensor]]:
        if self.folder is not None:
            return StoredImages(self.folder / part)
        is_train = part == "train"
        number = self.num_train_images if is_train else self.num_val_images
        return Gratings(number, self.image_size, self.num_classes, first=0 if is_train else 1 << 32)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Shuffled; a resumed training goes on with the batch that would have come next."""
        dataset = self._dataset("train")
        return DataLoader(dataset, batch_size=self.batch_size, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """In order."""
        return DataLoader(self._dataset("val"), batch_size=self.batch_size, num_workers=self.num_workers)

    test_dataloader: Any = val_dataloader
    predict_dataloader: Any = val_dataloader
