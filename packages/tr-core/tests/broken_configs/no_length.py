import parts
from torch.utils.data import IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        return iter(parts.rows())


parts.train(data=Stream())
