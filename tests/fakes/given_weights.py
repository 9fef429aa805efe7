"""Weights that are not those of any model: what an update lists, and what it then sends."""

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
