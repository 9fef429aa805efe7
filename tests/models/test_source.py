import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from swift.errors import ConfigError, ResourceError
from swift.models.arguments import ModelArguments
from swift.models.policy import load_policy
from swift.models.source import find_folder, locate, looks_like_path


def problem(error) -> str:
    assert len(error.value.problems) == 1
    return error.value.problems[0]


def test_folders_that_are_no_models_are_named_with_what_was_sought(qwen2, tmp_path):
    def refused(name, *words):
        with pytest.raises(ConfigError) as error:
            find_folder(str(name))
        assert all(word in problem(error) for word in words)

    (tmp_path / "qwen2-base").mkdir()
    refused(tmp_path / "qwen2-bsae", f"nearest: {tmp_path / 'qwen2-base'}")
    refused(f"{qwen2}/config.json", "a file, not a model folder")
    folder = tmp_path / "qwen2-base"
    refused(folder, f"--model: {folder}: sought config.json there and found none")
    shutil.copy(f"{qwen2}/config.json", folder)
    refused(folder, "sought *.safetensors there and found none")
    torch.save({}, folder / "pytorch_model.bin")
    refused(folder, "only pickled weights (pytorch_model.bin)", "safetensors")


def test_broken_config_json_is_named_with_its_line(qwen2, tmp_path):
    shutil.copytree(qwen2, tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text('{\n "model_type": \n}')
    with pytest.raises(ConfigError, match=r"config\.json:3: not valid JSON"):
        load_policy(ModelArguments(model=str(tmp_path / "m")))


@pytest.mark.parametrize(
    ("name", "is_path"),
    [("Qwen/Qwen2.5-7B", False), ("./Qwen/x", True), ("/m", True), ("~/m", True), ("m", True), ("a/b/c", True)],
)
def test_only_organisation_slash_name_is_looked_up_on_a_hub(name, is_path):
    assert looks_like_path(name) is is_path


def test_a_missing_hub_package_is_a_resource_problem_with_a_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ResourceError) as error:
        find_folder("nobody/nothing")
    assert "pip install modelscope" in problem(error)
    assert "--use_hf true" in problem(error)


def test_a_hub_that_fails_is_named_with_what_was_sought(monkeypatch):
    import huggingface_hub

    def fail(*_, **__):
        raise OSError("cannot reach huggingface.co\nand more lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ConfigError) as error:
        find_folder("nobody/nothing", use_hf=True, revision="v2")
    assert "--model: nobody/nothing" in problem(error)
    assert "Hugging Face did not give it at revision v2 (cannot reach huggingface.co)" in problem(error)


def test_a_hub_model_is_used_like_a_folder(monkeypatch, qwen2):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: qwen2)
    assert locate(ModelArguments(model="org/name", use_hf=True)).base == Path(qwen2)


def test_a_lora_checkpoint_as_model_brings_its_base(qwen2, make_adapter):
    adapter = make_adapter(qwen2)
    source = locate(ModelArguments(model=adapter))
    assert source.base == Path(qwen2)
    assert source.adapters == [Path(adapter)]


def test_the_base_of_an_adapter_is_that_of_args_json_before_the_adapter_config(qwen2, make_adapter):
    adapter = Path(make_adapter(qwen2))
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    with pytest.raises(ConfigError, match="does not record its base model; name it with --model"):
        locate(ModelArguments(adapters=[str(adapter)]))
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "/gone"}))
    (adapter / "args.json").write_text(json.dumps({"model": qwen2}))
    assert locate(ModelArguments(adapters=[str(adapter)])).base == Path(qwen2)


def test_a_folder_that_is_no_adapter_is_named(qwen2):
    with pytest.raises(ConfigError, match=r"sought adapter_config\.json there"):
        locate(ModelArguments(model=qwen2, adapters=[qwen2]))
