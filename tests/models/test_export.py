from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from swift.errors import ConfigError
from swift.models.arguments import ModelArguments
from swift.models.export import merge_adapter, run


def test_an_empty_folder_becomes_a_whole_model_with_tokenizer(qwen2, make_adapter, tmp_path):
    (tmp_path / "merged").mkdir()
    folder = merge_adapter(ModelArguments(model=qwen2, adapters=[make_adapter(qwen2)]), tmp_path / "merged")
    assert AutoTokenizer.from_pretrained(folder).chat_template
    names = {path.name for path in folder.iterdir()}
    assert {path.stat().st_mode & 0o666 for path in folder.iterdir()} == {folder.stat().st_mode & 0o666}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not any(name.startswith("adapter") for name in names)
    ours = AutoModelForCausalLM.from_pretrained(folder)
    assert (
        ours.generation_config.eos_token_id
        == AutoModelForCausalLM.from_pretrained(qwen2).generation_config.eos_token_id
    )


def test_a_folder_that_holds_something_is_left_alone(qwen2, make_adapter, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"--output_dir: .*exists and is not empty"):
        merge_adapter(ModelArguments(adapters=[make_adapter(qwen2)]), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious.txt"]


def test_a_failure_leaves_nothing_half_written(qwen2, make_adapter, tmp_path, monkeypatch):
    import swift.models.export as export

    adapter = make_adapter(qwen2)
    monkeypatch.setattr(export, "_copy_side_files", lambda *_: (_ for _ in ()).throw(RuntimeError("boom")))
    with pytest.raises(RuntimeError, match="boom"):
        merge_adapter(ModelArguments(adapters=[adapter]), tmp_path / "deep" / "out")
    assert list((tmp_path / "deep").iterdir()) == []


def test_merging_without_an_adapter_is_refused(qwen2, tmp_path):
    with pytest.raises(ConfigError, match="--adapters: none: there is nothing to merge"):
        merge_adapter(ModelArguments(model=qwen2), tmp_path / "out")


def test_the_mode_prints_where_the_model_lies_beside_the_adapter(qwen2, make_adapter, capsys):
    adapter = make_adapter(qwen2)
    args = ModelArguments(adapters=[adapter])
    resolved = SimpleNamespace(args=SimpleNamespace(**vars(args), SEES=False, output_dir=None))
    assert run(resolved) == 0
    assert capsys.readouterr().out == f"merged model: {adapter}-merged\n"
    assert Path(f"{adapter}-merged", "model.safetensors").is_file()
