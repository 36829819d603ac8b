"""A training loader of the fixture `dataset`, in every order, and what it gives; the records of any file."""

from mesh_transformer.data.batches.loader import make_train_loader
from mesh_transformer.data.records.tfrecords import RecordReader

MODES = [
    {},
    {"batch_across_files": True},
    {"shuffle": True, "shuffle_window": 6, "seed": 3},
    {"shuffle": True, "shuffle_window": 1, "seed": 3},
    {"shuffle": True, "shuffle_window": 1000, "seed": 4},
]


def train(index, *, rows=range(2), prefetch=2, **kwargs):
    return make_train_loader(str(index), seq=4, batch=2, accumulation=2, rows=rows, prefetch=prefetch, **kwargs)


def take(loader, n):
    return [next(loader).tokens[..., 0].tolist() for _ in range(n)]


def read_records(path):
    with RecordReader(path) as reader:
        while (record := reader.read()) is not None:
            yield record.example().tokens
