"""Bytes that do something where they are unpickled."""

import io
import pickle

import torch

from swift.trainers.checkpoint import MANIFEST, commit_checkpoint, step_of


class Trap:
    """Pickled, it makes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def trap(path):
    """The pickle that makes this file."""
    return pickle.dumps(Trap(path))


def trapped_archive(path):
    """The same as a file of `torch.save`."""
    archive = io.BytesIO()
    torch.save({"state": Trap(path)}, archive)
    return archive.getvalue()


def set_trap(checkpoint, name, owned):
    """Put a trap into a file of a checkpoint, whose manifest fits it afterwards."""
    next(checkpoint.rglob(name)).write_bytes(trapped_archive(owned))
    staged = checkpoint.rename(checkpoint.with_name("staged"))
    (staged / MANIFEST).unlink()
    commit_checkpoint(staged, checkpoint, step=step_of(checkpoint))
    return checkpoint
