import parts
from torch import nn
from torch.utils.data import IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        return iter(parts.rows())


class Normalised(parts.Classifier):
    def __init__(self):
        super().__init__()
        self.layers.insert(1, nn.BatchNorm1d(16))


if __name__ == "__main__":
    parts.train(
        Normalised(),
        data=Stream(),
        max_steps=10,
        dataloader_num_workers=1,
        dataloader_multiprocessing_context="spawn",
        gradient_accumulation_steps=2,
    )
