"""Weights that are not those of any model: what an update lists, and what it then sends."""

import weakref

import torch

from swift.rollout.weights.base import Bucket, TensorInfo
from swift.rollout.weights.policy import PolicyWeights


def tensors_of(model):
    return [one for bucket in PolicyWeights(model).buckets() for one in bucket.tensors]


class Given:
    """A source that lists some tensors and sends these, or others, in one bucket or in the ones given."""

    def __init__(self, listed, *sent):
        self.listed = list(listed)
        self.sent = sent or [self.listed]

    def manifest(self):
        return tuple(TensorInfo.of(name, tensor) for name, tensor in self.listed)

    def buckets(self):
        yield from (Bucket(list(tensors)) for tensors in self.sent)


class Watched:
    """A source of three buckets that fails if one is still referenced when the next is made."""

    def __init__(self):
        self.made = []

    def manifest(self):
        return [TensorInfo(f"layer.{i}", "float32", (4,)) for i in range(3)]

    def buckets(self):
        for info in self.manifest():
            assert [tensor() for tensor in self.made] == [None] * len(self.made), "a bucket is kept too long"
            tensor = torch.ones(4)
            self.made.append(weakref.ref(tensor))
            bucket = Bucket([(info.name, tensor)])
            del tensor
            yield bucket
            del bucket
