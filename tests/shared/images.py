"""Images for a model of images; in a module that processes of a loader can import."""

import torch


class Images(torch.utils.data.Dataset):
    """Images that are moved, mirrored and made brighter at random whenever they are read."""

    def __init__(self, number):
        drawn = torch.Generator().manual_seed(3)
        self.images = torch.randn(number, 3, 12, 12, generator=drawn)
        self.labels = torch.randint(5, (number,), generator=drawn)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        x, y = torch.randint(4, (2,)).tolist()
        image = self.images[index, :, x : x + 8, y : y + 8] * (1 + torch.rand(()))
        return {"pixel_values": image.flip(-1) if torch.rand(()) < 0.5 else image, "labels": self.labels[index]}
