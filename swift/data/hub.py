"""Datasets of the two hubs: ModelScope, and Hugging Face behind `hf::` or `--use_hf`.

If a hub does not answer within `ANSWER_S`, the error is raised at once; the clients' own retries would take half a
minute and more. Hugging Face datasets that are already in the local cache work without a network.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from swift.data.records import Record, plain_row
from swift.data.spec import DatasetSpec, names_file
from swift.errors import ConfigError, ResourceError, first_line, suggest

ANSWER_S = 10.0
"""Timeout of the first request for a dataset, in seconds."""

_EVAL_SPLITS = ("validation", "valid", "val", "dev", "test", "eval")
_INSTEAD = "or give a local .jsonl, .json, .csv or .parquet file"


class HubRecords(Sequence[Record]):
    """A mapped hub dataset as records that are converted when they are read."""

    def __init__(self, data: Any, name: str, first: int = 0) -> None:
        self._data, self._name, self._first = data, name, first

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            rows = range(len(self))[index]
            return HubRecords(self._data.select(rows), self._name, self._first + rows.start)
        return plain_row(self._data[index], f"{self._name}:{self._first + index + 1}")


def load_hub(spec: DatasetSpec, *, split: str) -> tuple[Sequence[Record], list[str]]:
    """The rows of all subsets, downloaded or from the cache, and their columns; split: see `choose_split`.

    Raises:
        ConfigError: the id, subset or split does not exist, or the access is refused.
        ResourceError: no network, or the client package is missing.
    """
    parts = list(_open(spec, split, streaming=False))
    columns = list(dict.fromkeys(name for _, data in parts for name in data.column_names))
    records = [HubRecords(data, name) for name, data in parts]
    return records[0] if len(records) == 1 else [record for part in records for record in part], columns


def stream_hub(spec: DatasetSpec, *, split: str) -> Iterator[Record]:
    """The same rows as they arrive; nothing is downloaded as a whole. Errors as in `load_hub`."""
    for name, data in _open(spec, split, streaming=True):
        for number, values in enumerate(data, start=1):
            yield plain_row(dict(values), f"{name}:{number}")


def choose_split(splits: Iterable[str], split: str, spec: DatasetSpec) -> str:
    """The dataset's own name for "train" or "val"; a single split serves as either. `--split` names it itself.

    >>> choose_split(["train", "test"], "val", DatasetSpec("x", "hub", "x"))
    'test'
    """
    names = list(splits)
    if spec.split is not None:
        if spec.split not in names:
            raise spec.wrong(f"--split: {spec.split}: the dataset has no such split; {suggest(spec.split, names)}")
        return spec.split
    wanted = ("train",) if split == "train" else (*_EVAL_SPLITS, "train")
    for name in wanted:
        if name in names:
            return name
    if len(names) == 1:
        return names[0]
    fix = f"choose one: --split {names[0]}" if split == "train" and names else "give its rows as a local file"
    raise spec.wrong(f"no {wanted[0]} split; the dataset has {', '.join(names) or 'none'}; {fix}")


def _open(spec: DatasetSpec, split: str, *, streaming: bool) -> Iterator[tuple[str, Any]]:
    """Name and `datasets` object of each subset."""
    load = _load_hugging_face if spec.hub == "hf" else _load_modelscope
    for subset in spec.subsets or (None,):
        loaded = load(spec, subset, streaming)
        taken = choose_split(loaded, split, spec)
        yield f"{spec.target}{f':{subset}' if subset else ''}[{taken}]", encoded(loaded[taken])


def encoded(data: Any) -> Any:
    """A `datasets` object whose images are as they are stored, bytes or a path, and not decoded."""
    import datasets

    stored = datasets.Image(decode=False)
    for name, feature in (data.features or {}).items():
        if isinstance(feature, datasets.Image):
            data = data.cast_column(name, stored)
        elif isinstance(getattr(feature, "feature", None), datasets.Image):
            data = data.cast_column(name, type(feature)(stored))
    return data


def _load_hugging_face(spec: DatasetSpec, subset: str | None, streaming: bool) -> dict[str, Any]:
    import datasets

    unreachable = _hugging_face_problem(spec)
    with _offline(unreachable is not None):
        try:
            if names_file(subset):
                return datasets.load_dataset(spec.target, data_files=subset, streaming=streaming)
            return datasets.load_dataset(spec.target, subset, streaming=streaming)
        except ValueError as error:  # a wrong subset, or a missing one
            raise _subset_problem(spec, error) from error
        except (OSError, RuntimeError) as error:  # includes the library's ConnectionError and DatasetNotFoundError
            raise _not_loaded(spec, "Hugging Face", unreachable or first_line(error)) from error


def _hugging_face_problem(spec: DatasetSpec) -> str | None:
    """Requests the dataset from the hub: None if the hub has it, a short reason if it does not answer."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        HfApi().dataset_info(spec.target, timeout=ANSWER_S)
    except GatedRepoError as error:
        raise spec.wrong(
            "access to this Hugging Face dataset must be granted; accept its terms on the hub and set HF_TOKEN"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise spec.wrong(
            f"no local path of that name, and Hugging Face has no such dataset "
            f"(or it is private: set HF_TOKEN); check the id, {_INSTEAD}"
        ) from error
    except (HfHubHTTPError, OfflineModeIsEnabled) as error:
        return first_line(error)
    except Exception as error:  # the transport's errors differ between versions of the client's HTTP library
        return f"no answer: {first_line(error)}"
    return None


@contextmanager
def _offline(active: bool) -> Iterator[None]:
    """Makes the libraries use their cache only, so that they do not retry six times with a hub that is unreachable."""
    import datasets
    import huggingface_hub

    before = datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE
    if active:
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE = before


def _load_modelscope(spec: DatasetSpec, subset: str | None, streaming: bool) -> dict[str, Any]:
    if names_file(subset):
        raise spec.wrong(f"{subset}: single files are taken from Hugging Face; write hf::{spec.target}:{subset}")
    try:
        from modelscope.msdatasets import MsDataset
    except ImportError as error:
        raise ResourceError(
            f"{spec.subject}: no local path of that name; ModelScope needs the package modelscope, which "
            f"cannot be imported ({error}); pip install modelscope, take it from Hugging Face with "
            f"hf::{spec.target} or --use_hf true, {_INSTEAD}"
        ) from error
    _check_modelscope_answers(spec)
    try:
        loaded = MsDataset.load(spec.target, subset_name=subset, use_streaming=streaming)
    except ValueError as error:
        raise _subset_problem(spec, error) from error
    except Exception as error:  # the client raises its own HTTP, hub and bare exceptions
        raise _not_loaded(spec, "ModelScope", first_line(error)) from error
    parts = loaded if hasattr(loaded, "keys") else {"train": loaded}
    return {name: data.to_hf_dataset() if hasattr(data, "to_hf_dataset") else data for name, data in parts.items()}


def _check_modelscope_answers(spec: DatasetSpec) -> None:
    import urllib.error
    import urllib.request

    domain = os.environ.get("MODELSCOPE_DOMAIN", "www.modelscope.cn")
    url = domain if domain.startswith("http") else f"https://{domain}"
    try:
        urllib.request.urlopen(f"{url}/api/v1/datasets/{spec.target}", timeout=ANSWER_S).close()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise spec.wrong(
                f"no local path of that name, and ModelScope has no such dataset; "
                f"check the id, take it from Hugging Face with hf::{spec.target}, {_INSTEAD}"
            ) from error
    except OSError as error:
        raise _not_loaded(spec, "ModelScope", f"no answer from {url}: {first_line(error)}") from error


def _not_loaded(spec: DatasetSpec, hub: str, reason: str) -> ResourceError:
    other = f"hf::{spec.target}" if hub == "ModelScope" else f"ms::{spec.target}"
    return ResourceError(
        f"{spec.subject}: no local path of that name, and {hub} did not give it ({reason}); "
        f"check the network, try {other}, {_INSTEAD}"
    )


def _subset_problem(spec: DatasetSpec, error: ValueError) -> ConfigError:
    """The problem of a subset; the error of a hub lists the existing subsets in brackets."""
    named = "/".join(spec.subsets)
    inner, closed, _ = str(error).partition("[")[2].partition("]")
    names = [name.strip(" '\"\n") for name in inner.split(",") if closed and name.strip(" '\"\n")]
    if names:
        hint = suggest(named, names) if named else f"add one, as in {spec.target}:{names[0]}; valid: {', '.join(names)}"
        return spec.wrong(f"subset {named or 'missing'}: {hint}")
    return spec.wrong(f"{first_line(error)}; check id and subset, {_INSTEAD}")
