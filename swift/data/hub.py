"""Datasets of the two hubs: ModelScope, and Hugging Face behind `hf::` or `--use_hf`.

A hub that does not answer within `ANSWER_S` is reported at once; the clients' own retries would take half a
minute and more. Hugging Face datasets that are already in the local cache work without a network.
"""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

from swift.data.records import Record, plain_row
from swift.data.spec import DatasetSpec
from swift.errors import ConfigError, ResourceError, SwiftError, suggest

ANSWER_S = 10.0
"""Seconds a hub has to answer the first question about a dataset."""

_EVAL_SPLITS = ("validation", "valid", "val", "dev", "test", "eval")
_INSTEAD = "or give a local .jsonl, .json, .csv or .parquet file"


class HubRecords(Sequence[Record]):
    """A mapped hub dataset as records that are converted when they are looked at."""

    def __init__(self, data: Any, name: str) -> None:
        self._data, self._name = data, name

    def __len__(self) -> int:
        return len(self._data)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return plain_row(self._data[index], f"{self._name}:{index % len(self) + 1}")

    @property
    def columns(self) -> list[str]:
        """The dataset's own column names."""
        return list(self._data.column_names)


def load_hub(spec: DatasetSpec, *, split: str) -> list[HubRecords]:
    """The rows of each subset, downloaded or from the cache.

    Args:
        spec: a hub spec.
        split: "train" takes the dataset's train split; "val" a validation or test split, else train.

    Raises:
        ConfigError: the id, subset or split does not exist, or the access is refused.
        ResourceError: no network, or the client package is missing.
    """
    parts = []
    for subset in spec.subsets or (None,):
        data, taken = _load(spec, subset, split, streaming=False)
        parts.append(HubRecords(data, _origin(spec, subset, taken)))
    return parts


def stream_hub(spec: DatasetSpec, *, split: str) -> Iterator[Record]:
    """The same rows as they arrive; nothing is downloaded as a whole. Errors as in `load_hub`."""
    for subset in spec.subsets or (None,):
        data, taken = _load(spec, subset, split, streaming=True)
        name = _origin(spec, subset, taken)
        for number, values in enumerate(data, start=1):
            yield plain_row(dict(values), f"{name}:{number}")


def choose_split(splits: Iterable[str], split: str, spec: DatasetSpec) -> str:
    """The dataset's own name for "train" or "val"; a single split serves as either.

    >>> choose_split(["train", "test"], "val", DatasetSpec("x", "hub", "x"))
    'test'
    """
    names = list(splits)
    wanted = ("train",) if split == "train" else (*_EVAL_SPLITS, "train")
    for name in wanted:
        if name in names:
            return name
    if len(names) == 1:
        return names[0]
    raise ConfigError(
        f"{spec.flag}: {spec.text}: no {wanted[0]} split; the dataset has {', '.join(names) or 'none'}; "
        "download it and give the file"
    )


def _origin(spec: DatasetSpec, subset: str | None, taken: str) -> str:
    return f"{spec.target}{f':{subset}' if subset else ''}[{taken}]"


def _load(spec: DatasetSpec, subset: str | None, split: str, *, streaming: bool) -> tuple[Any, str]:
    if spec.hub == "hf":
        return _load_hugging_face(spec, subset, split, streaming=streaming)
    return _load_modelscope(spec, subset, split, streaming=streaming)


# ---- Hugging Face


def _load_hugging_face(spec: DatasetSpec, subset: str | None, split: str, *, streaming: bool) -> tuple[Any, str]:
    try:
        import datasets
    except ImportError as error:
        raise ResourceError(
            f"{spec.flag}: {spec.text}: datasets cannot be imported ({error}); pip install datasets"
        ) from error
    unreachable = _hugging_face_problem(spec)
    with _offline(unreachable is not None):
        try:
            loaded = datasets.load_dataset(spec.target, subset, streaming=streaming)
        except ValueError as error:  # a wrong subset, or one that must be named
            raise _subset_problem(spec, error) from error
        except (OSError, RuntimeError) as error:  # includes the library's ConnectionError and DatasetNotFoundError
            raise _not_loaded(spec, "Hugging Face", unreachable or _first_line(error)) from error
    taken = choose_split(list(loaded), split, spec)
    return loaded[taken], taken


def _hugging_face_problem(spec: DatasetSpec) -> str | None:
    """Asks the hub for the dataset: None when it has it, a few words when it does not answer."""
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
        raise ConfigError(
            f"{spec.flag}: {spec.text}: access to this Hugging Face dataset must be granted; "
            "accept its terms on the hub and set HF_TOKEN"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(
            f"{spec.flag}: {spec.text}: no local path of that name, and Hugging Face has no such dataset "
            f"(or it is private: set HF_TOKEN); check the id, {_INSTEAD}"
        ) from error
    except (HfHubHTTPError, OfflineModeIsEnabled) as error:
        return _first_line(error)
    except Exception as error:  # the transport's errors differ between versions of the client's HTTP library
        return f"no answer: {_first_line(error)}"
    return None


@contextmanager
def _offline(active: bool) -> Iterator[None]:
    """Makes the libraries use their cache only: a hub known to be silent must not be asked six more times."""
    import datasets
    import huggingface_hub

    if not active:
        yield
        return
    before = datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE = before


# ---- ModelScope


def _load_modelscope(spec: DatasetSpec, subset: str | None, split: str, *, streaming: bool) -> tuple[Any, str]:
    try:
        from modelscope.msdatasets import MsDataset
    except ImportError as error:
        raise ResourceError(
            f"{spec.flag}: {spec.text}: no local path of that name; ModelScope needs the package modelscope, which "
            f"cannot be imported ({error}); pip install modelscope, take it from Hugging Face with "
            f"hf::{spec.target} or --use_hf true, {_INSTEAD}"
        ) from error
    _check_modelscope_answers(spec)
    try:
        loaded = MsDataset.load(spec.target, subset_name=subset, use_streaming=streaming)
    except ValueError as error:
        raise _subset_problem(spec, error) from error
    except Exception as error:  # the client raises its own HTTP, hub and bare exceptions
        raise _not_loaded(spec, "ModelScope", _first_line(error)) from error
    if not hasattr(loaded, "keys"):
        return _unwrapped(loaded), "train"
    taken = choose_split(list(loaded.keys()), split, spec)
    return _unwrapped(loaded[taken]), taken


def _check_modelscope_answers(spec: DatasetSpec) -> None:
    domain = os.environ.get("MODELSCOPE_DOMAIN", "www.modelscope.cn")
    url = domain if domain.startswith("http") else f"https://{domain}"
    try:
        urllib.request.urlopen(f"{url}/api/v1/datasets/{spec.target}", timeout=ANSWER_S).close()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise ConfigError(
                f"{spec.flag}: {spec.text}: no local path of that name, and ModelScope has no such dataset; "
                f"check the id, take it from Hugging Face with hf::{spec.target}, {_INSTEAD}"
            ) from error
    except OSError as error:
        raise _not_loaded(spec, "ModelScope", f"no answer from {url}: {_first_line(error)}") from error


def _unwrapped(data: Any) -> Any:
    """The `datasets` object inside ModelScope's wrapper."""
    return data.to_hf_dataset() if hasattr(data, "to_hf_dataset") else data


# ---- what went wrong


def _not_loaded(spec: DatasetSpec, hub: str, reason: str) -> SwiftError:
    other = f"hf::{spec.target}" if hub == "ModelScope" else f"ms::{spec.target}"
    return ResourceError(
        f"{spec.flag}: {spec.text}: no local path of that name, and {hub} did not give it ({reason}); "
        f"check the network, try {other}, {_INSTEAD}"
    )


def _subset_problem(spec: DatasetSpec, error: ValueError) -> ConfigError:
    asked = "/".join(spec.subsets)
    names = _names_in_brackets(str(error))
    if names:
        hint = suggest(asked, names) if asked else f"add one, as in {spec.target}:{names[0]}; valid: {', '.join(names)}"
        return ConfigError(f"{spec.flag}: {spec.text}: subset {asked or 'missing'}: {hint}")
    return ConfigError(f"{spec.flag}: {spec.text}: {_first_line(error)}; check id and subset, {_INSTEAD}")


def _names_in_brackets(text: str) -> list[str]:
    _, _, rest = text.partition("[")
    inner, closed, _ = rest.partition("]")
    return [name.strip(" '\"\n") for name in inner.split(",") if name.strip(" '\"\n")] if closed else []


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
