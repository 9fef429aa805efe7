"""Hub datasets: the hubs are the process boundary and are replaced, all of our own code runs."""

import sys
import time
import types

import datasets
import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from swift.data.arguments import DataArguments
from swift.data.hub import stream_hub
from swift.data.loading import load_rows
from swift.data.spec import parse_spec
from swift.errors import ConfigError, ResourceError


def rows(spec, split="train", **changes):
    val = [spec] if split == "val" else []
    args = DataArguments(**{"dataset": [spec], "val_dataset": val, "data_seed": 42, **changes})
    return load_rows(args, split, purpose="prompt")


@pytest.fixture
def hub(monkeypatch):
    """A Hugging Face hub that has every id; `hub.asked` are the calls of load_dataset."""
    state = types.SimpleNamespace(asked=[], refusal=None)

    def dataset_info(self, name, timeout=None):
        if state.refusal:
            raise state.refusal

    def load_dataset(name, subset=None, streaming=False, data_files=None):
        if datasets.config.HF_HUB_OFFLINE:
            raise ConnectionError(f"Couldn't reach '{name}' on the Hub (OfflineModeIsEnabled)")
        state.asked.append((name, data_files or subset))
        if subset == "typo":
            raise ValueError("BuilderConfig 'typo' not found. Available: ['main', 'type']")
        made = {
            part: datasets.Dataset.from_list([{"question": f"{subset}{part}{n}", "answer": str(n)} for n in range(5)])
            for part in ("train", "test")
        }
        return {part: made[part].to_iterable_dataset() for part in made} if streaming else made

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    return state


def test_hugging_face_rows_with_subsets_and_count(hub):
    found = rows("hf::openai/gsm8k:main/other#7", dataset_shuffle=False)
    assert hub.asked == [("openai/gsm8k", "main"), ("openai/gsm8k", "other")]
    assert [row["messages"][0]["content"] for row in found][4:6] == ["maintrain4", "othertrain0"]
    assert len(found) == 7
    assert found.examples[6].origin == "openai/gsm8k:other[train]:2"


def test_a_file_of_a_repository_is_read_alone(hub):
    rows("hf::openai/gsm8k:raw/train.jsonl.zst#2")
    assert hub.asked == [("openai/gsm8k", "raw/train.jsonl.zst")]
    with pytest.raises(ConfigError, match=r"are taken from Hugging Face; write hf::openai/gsm8k:raw/train\.jsonl\.zst"):
        rows("ms::openai/gsm8k:raw/train.jsonl.zst")


def test_split_names_the_split_to_train_on(hub):
    found = rows("hf::openai/gsm8k:main", split="train")
    assert found.examples[0].origin == "openai/gsm8k:main[train]:1"
    args = DataArguments(dataset=["hf::openai/gsm8k:main"], split="test")
    assert load_rows(args, "train", purpose="prompt").examples[0].origin == "openai/gsm8k:main[test]:1"
    args.split = "tset"
    with pytest.raises(ConfigError, match="--split: tset: the dataset has no such split; nearest: test"):
        load_rows(args, "train", purpose="prompt")


def test_a_part_of_a_hub_dataset_keeps_the_places_of_its_rows(hub):
    found = rows("hf::openai/gsm8k:main#40%:80%")
    assert [row["messages"][0]["content"] for row in found] == ["maintrain2", "maintrain3"]
    assert found.examples[0].origin == "openai/gsm8k:main[train]:3"


def test_validation_takes_the_test_split(hub):
    assert next(iter(rows("org/name", "val", use_hf=True)))["messages"][0]["content"] == "Nonetest0"


def test_a_streamed_hub_dataset_has_the_same_rows(hub):
    streamed = list(stream_hub(parse_spec("hf::org/name"), split="train"))
    assert [row.values for row in streamed] == [{"question": f"Nonetrain{n}", "answer": str(n)} for n in range(5)]


def test_a_wrong_subset_names_the_nearest(hub):
    with pytest.raises(ConfigError, match="subset typo: nearest: type"):
        rows("hf::org/name:typo")


def test_no_network_is_one_line_with_the_way_out_and_no_retries(hub):
    hub.refusal = OSError("[Errno -2] Name or service not known")
    start = time.monotonic()
    with pytest.raises(ResourceError) as caught:
        rows("hf::org/name#5")
    assert time.monotonic() - start < 5
    (problem,) = caught.value.problems
    for part in ("--dataset: hf::org/name#5", "Hugging Face", "Name or service not known", "ms::org/name", ".jsonl"):
        assert part in problem
    assert not datasets.config.HF_HUB_OFFLINE
    assert hub.asked == []


def response(status):
    return types.SimpleNamespace(status_code=status, headers={}, request=None)


def test_an_unknown_or_closed_dataset_is_the_users_to_correct(hub):
    hub.refusal = RepositoryNotFoundError("404", response=response(404))
    with pytest.raises(ConfigError, match="Hugging Face has no such dataset"):
        rows("hf::org/nmae")
    hub.refusal = GatedRepoError("403", response=response(403))
    with pytest.raises(ConfigError, match="HF_TOKEN"):
        rows("hf::org/name")


def test_modelscope_missing_names_the_install_line_and_hugging_face(monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope.msdatasets", None)
    with pytest.raises(ResourceError) as caught:
        rows("org/name#5")
    for part in ("--dataset: org/name#5", "pip install modelscope", "hf::org/name", "--use_hf true", ".jsonl"):
        assert part in caught.value.problems[0]
    assert caught.value.exit_code == 3


@pytest.fixture
def modelscope(monkeypatch):
    """A stand-in for the package modelscope."""
    package, module = types.ModuleType("modelscope"), types.ModuleType("modelscope.msdatasets")

    class MsDataset:
        @staticmethod
        def load(name, subset_name=None, use_streaming=False):
            if name == "org/broken":
                raise RuntimeError("quota exceeded\nlong trace")
            part = datasets.Dataset.from_list([{"query": f"{name} {subset_name}"}])
            return {"train": types.SimpleNamespace(to_hf_dataset=lambda: part)}

    module.MsDataset = MsDataset
    monkeypatch.setitem(sys.modules, "modelscope", package)
    monkeypatch.setitem(sys.modules, "modelscope.msdatasets", module)
    return monkeypatch


def test_modelscope_rows(modelscope):
    modelscope.setattr("urllib.request.urlopen", lambda url, timeout: types.SimpleNamespace(close=lambda: None))
    assert [row["messages"][0]["content"] for row in rows("org/name:sub")] == ["org/name sub"]
    with pytest.raises(ResourceError, match=r"ModelScope did not give it \(quota exceeded\)"):
        rows("org/broken")


def test_a_silent_modelscope_is_reported_at_once(modelscope):
    modelscope.setenv("MODELSCOPE_DOMAIN", "http://127.0.0.1:9")
    with pytest.raises(ResourceError, match=r"no answer from http://127\.0\.0\.1:9"):
        rows("org/name")
