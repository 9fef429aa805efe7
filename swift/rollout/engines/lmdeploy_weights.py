"""How new weights get into LMDeploy's engines, and how one can tell that they did.

Both have `update_params`, and neither confirms anything:

    PyTorch     a call per bucket, as CUDA IPC handles, one set of handles per tensor-parallel rank; a failure leaves
                the model half updated. `finished` on the last call.
    TurboMind   made with `empty_init`; a call per decoder layer with all of its tensors, then embedding, norm and head
                together with `finished`.

What can be checked is checked before: names and shapes against the checkpoint. After an update a fixed prompt is
sampled; its log-probs must be sound, and must change when the weights did (`Pulse`).
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swift.errors import SyncFailed
from swift.rollout.engines.lmdeploy_api import LMDeploy
from swift.rollout.weight_sync.base import Ack, Bucket, TensorInfo, WeightUpdate, dtype_name, torch_dtype

Receive = Callable[[Any], None]
"""Hands an UpdateParamsRequest to the engine and waits, within bounds, until it was taken."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")

QUIET_UPDATES = 3
"""Updates in a row that changed bytes but no log-prob of the probe; more than that is no accident of rounding."""


class LMDeployUpdate(WeightUpdate):
    """An update of either engine.

    Args:
        manifest: every tensor that will come.
        version: of the policy.
        dtype: what the engine stores.
        receive: see `Receive`.
        confirm: called after the last tensor with the digest of the update; returns a note for the receipt.
        ended: called once with why the weights are void, "" when they are not.
    """

    def __init__(
        self,
        manifest: Sequence[TensorInfo],
        version: int,
        *,
        dtype: str,
        receive: Receive,
        confirm: Callable[[str], str],
        ended: Callable[[int, str], None],
    ) -> None:
        super().__init__("lmdeploy", manifest, version)
        self.dtype = torch_dtype(dtype)
        self._receive, self._confirm, self._ended = receive, confirm, ended
        self._open = True
        self._started = time.monotonic()

    def _deliver(self, bucket: Bucket) -> None:
        try:
            self._hand_over(bucket, last=self.sent == len(self.manifest))
        except SyncFailed:
            raise
        except Exception as error:
            raise SyncFailed(
                f"weights: version {self.version} for lmdeploy: update_params failed ({type(error).__name__}: {error})"
            ) from error

    def _hand_over(self, bucket: Bucket, *, last: bool) -> None:
        raise NotImplementedError

    def _finish(self) -> Ack:
        note = self._confirm(self.digest.hexdigest())
        self._close("")
        return Ack(
            version=self.version,
            tensors=self.sent,
            nbytes=self.sent_bytes,
            digest=self.digest.hexdigest(),
            seconds=time.monotonic() - self._started,
            rounded=any(torch_dtype(info.dtype) != self.dtype for info in self.manifest),
            note=note,
        )

    def abort(self) -> None:
        """See `WeightUpdate.abort`."""
        self._close("an update was given up" if self.sent else "")

    def _close(self, why: str) -> None:
        if self._open:
            self._open = False
            self._ended(self.version, why)


def placed(tensor: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    """The tensor where and as the engine takes it; integers keep their type."""
    target = dtype if tensor.dtype.is_floating_point else tensor.dtype
    return tensor.detach().to(device=device, dtype=target).contiguous()


class PytorchUpdate(LMDeployUpdate):
    """A call per bucket.

    Args:
        api: LMDeploy's symbols.
        devices: of the tensor-parallel ranks, as this process names them.
        options: see `LMDeployUpdate`.
    """

    def __init__(self, *arguments: Any, api: LMDeploy, devices: Sequence[str], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.api, self.devices = api, list(devices)

    def _hand_over(self, bucket: Bucket, *, last: bool) -> None:
        # the handles are valid as long as these tensors live: until the call has returned
        copies = [
            {name: placed(tensor, device, self.dtype) for name, tensor in bucket.tensors} for device in self.devices
        ]
        handles: Any = [self.api.serialize_state_dict(one) for one in copies]
        request = self.api.UpdateParamsRequest(
            serialized_named_tensors=handles if len(handles) > 1 else handles[0], finished=last
        )
        self._receive(request)


class TurbomindUpdate(LMDeployUpdate):
    """A call per decoder layer, then one with everything else.

    Args:
        api: LMDeploy's symbols.
        device: where the tensors are put.
        options: see `LMDeployUpdate`.
    """

    def __init__(self, *arguments: Any, api: LMDeploy, device: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.api, self.device = api, device
        self._rest: dict[str, Tensor] = {}

    def _hand_over(self, bucket: Bucket, *, last: bool) -> None:
        layers: dict[int, dict[str, Tensor]] = {}
        for name, tensor in bucket.tensors:
            found = _LAYER.search(name)
            if found is None:
                # sent at the end, when the source has long reused its buffer
                self._rest[name] = placed(tensor, self.device, self.dtype).clone()
            else:
                layers.setdefault(int(found[1]), {})[name] = placed(tensor, self.device, self.dtype)
        for tensors in layers.values():
            self._receive(self.api.UpdateParamsRequest(serialized_named_tensors=tensors, finished=False))
        if last:
            rest, self._rest = self._rest, {}
            self._receive(self.api.UpdateParamsRequest(serialized_named_tensors=rest, finished=True))


class Pulse:
    """Tells from the log-probs of a fixed sample whether the engine has other weights than before.

    Args:
        take: samples the probe: its token ids and their log-probs.
    """

    def __init__(self, take: Callable[[], tuple[list[int], list[float]]]) -> None:
        self._take = take
        self._last: tuple[list[int], list[float]] | None = None
        self._digest = ""
        self._quiet = 0

    def check(self, digest: str, version: int) -> str:
        """After an update; returns a note, or "".

        Raises:
            SyncFailed: log-probs that no model has, or the same ones after several updates that changed the weights.
        """
        pulse = self._take()
        where = f"weights: version {version} for lmdeploy"
        ids, logprobs = pulse
        if not logprobs or not all(math.isfinite(value) and value <= 1e-5 for value in logprobs):
            raise SyncFailed(f"{where}: the engine samples nonsense after the update (log-probs {logprobs[:3]})")
        former, same_bytes = self._last, digest == self._digest
        self._last, self._digest = pulse, digest
        if former is None or same_bytes or former != pulse:
            self._quiet = 0
            return ""
        self._quiet += 1
        if self._quiet >= QUIET_UPDATES:
            raise SyncFailed(
                f"{where}: {self._quiet} updates in a row with changed weights left all {len(ids)} log-probs of the "
                "probe as they were, so they do not arrive"
            )
        return "the log-probs of the probe did not change"


class FolderWeights:
    """A checkpoint folder as a `WeightSource`, for an engine that starts empty.

    Args:
        folder: with safetensors files.
        names: of the tensors to send; those that no file has are left out.
    """

    def __init__(self, folder: str | Path, names: Sequence[str]) -> None:
        from safetensors import safe_open

        self._files: dict[str, Path] = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                self._files |= dict.fromkeys(tensors.keys(), file)
        layers: dict[int, list[str]] = {}
        for name in (one for one in names if one in self._files):
            found = _LAYER.search(name)
            layers.setdefault(int(found[1]) if found else -1, []).append(name)
        self._groups = [layers[key] for key in sorted(layers, key=lambda key: (key < 0, key))]

    def manifest(self) -> tuple[TensorInfo, ...]:
        """See `WeightSource`."""
        from safetensors import safe_open

        found = []
        for name in (name for group in self._groups for name in group):
            with safe_open(self._files[name], framework="pt") as tensors:
                part = tensors.get_slice(name)
                found.append(TensorInfo(name, dtype_name(part[0:0].dtype), tuple(part.get_shape())))
        return tuple(found)

    def buckets(self) -> Iterator[Bucket]:
        """A layer each, then the rest."""
        for group in self._groups:
            yield Bucket([(name, self._read(name)) for name in group])

    def _read(self, name: str) -> Tensor:
        from safetensors import safe_open

        with safe_open(self._files[name], framework="pt") as tensors:
            tensor: Tensor = tensors.get_tensor(name)
        return tensor


__all__ = ["FolderWeights", "LMDeployUpdate", "Pulse", "PytorchUpdate", "TurbomindUpdate"]
