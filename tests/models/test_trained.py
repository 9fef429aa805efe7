"""`swift infer` and `swift rollout` take system prompt and template from the checkpoint that they are given."""

import json
import shutil

import pytest

from swift.arguments import parse
from swift.errors import ConfigError
from swift.models.arguments import ModelArguments
from swift.models.policy import load_policy
from swift.models.tokenizer import load_chat
from swift.models.trained import take_trained
from swift.rollout import infer
from swift.rollout.server.run import check

SYSTEM = "Think first.\nThen answer with one number between two and ninety-nine."
RECORD = {"system": SYSTEM, "template": "qwen", "chat_template_kwargs": {"enable_thinking": False}, "_provenance": {}}


@pytest.fixture(params=["full", "lora"])
def trained(request, nano_folders, tmp_path):
    """Makes a checkpoint that says how it was trained; the words that name it, and its folder."""
    folder = tmp_path / "checkpoint-1"
    if request.param == "full":
        shutil.copytree(nano_folders["qwen2"], folder)
    else:
        settings = ModelArguments(model=str(nano_folders["qwen2"]), tuner_type="lora")
        load_policy(settings).save_pretrained(folder)
        load_chat(settings).tokenizer.save_pretrained(folder)
    base = [] if request.param == "full" else ["--model", str(nano_folders["qwen2"])]

    def make(**changed):
        (folder / "args.json").write_text(json.dumps({**RECORD, **changed}))
        return [*base, "--model" if request.param == "full" else "--adapters", str(folder)], folder

    return make


def rendered(words, *more, mode="infer"):
    """The text of a question as the mode renders it, and what it says."""
    resolved = parse(mode, [*words, *more], {})
    lines = take_trained(resolved.args, resolved.given)
    system = [{"role": "system", "content": resolved.args.system}] if resolved.args.system else []
    return load_chat(resolved.args).render([*system, {"role": "user", "content": "2 + 2?"}]), lines


@pytest.mark.parametrize("mode", ["infer", "rollout"])
def test_the_system_prompt_of_the_training_is_taken_in_one_line_and_flags_win(trained, mode):
    words, folder = trained()
    text, (line,) = rendered(words, mode=mode)
    assert SYSTEM in text and str(folder) in line and "system prompt" in line and "enable_thinking" in line
    text, (line,) = rendered(words, "--system", "Be brief.", mode=mode)
    assert SYSTEM not in text and "Be brief." in text and "system prompt" not in line
    text, _ = rendered(words, "--system", "", mode=mode)
    assert SYSTEM not in text
    (folder / "args.json").unlink()
    assert rendered(words, mode=mode)[1] == []


def test_answers_to_a_dataset_are_asked_as_in_training(trained, tmp_path, capsys):
    words, _ = trained()
    data = tmp_path / "rows.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "2 + 2?"}]}\n')
    for name, more in (("plain", ["--system", ""]), ("trained", [])):
        result = tmp_path / f"{name}.jsonl"
        words_of_run = [*words, *more, "--val_dataset", str(data), "--result_path", str(result)]
        assert infer.run(parse("infer", [*words_of_run, "--max_completion_length", "1"], {})) == 0
    messages = {one: json.loads((tmp_path / f"{one}.jsonl").read_text())["messages"] for one in ("plain", "trained")}
    assert [one["role"] for one in messages["plain"]] == ["user"]
    assert messages["trained"][0] == {"role": "system", "content": SYSTEM}
    assert capsys.readouterr().err.count("swift: as in training: system prompt") == 1


def test_a_servers_plan_says_it(trained):
    words, _ = trained()
    resolved = parse("rollout", [*words, "--use_vllm", "false"], {})
    plan = check(resolved.args, resolved.given)
    assert plan.settings.system == SYSTEM
    assert sum("as in training" in line for line in plan.lines()) == 1


def test_a_strangers_file_names_no_path_that_is_opened(trained, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret")
    for name in (str(secret), str(tmp_path / "missing.md")):
        words, _ = trained(system=name, template=str(secret), chat_template_kwargs=None)
        text, lines = rendered(words)
        assert "the secret" not in text
        assert len(lines) == 1 and lines[0].startswith("warning: ") and "is not read" in lines[0]


@pytest.mark.parametrize("changed", [{"system": 5}, {"chat_template_kwargs": ["a"]}, {"template": {}}])
def test_values_of_other_types_are_one_line_that_names_the_file(trained, changed):
    words, folder = trained(**changed)
    with pytest.raises(ConfigError, match=next(iter(changed))) as caught:
        rendered(words)
    assert str(folder / "args.json") in str(caught.value)


def test_a_run_records_the_text_of_its_system_prompt_and_not_its_file(tmp_path, nano_folders):
    file = tmp_path / "prompt.txt"
    file.write_text(SYSTEM)
    words = ["--model", str(nano_folders["qwen2"]), "--system", str(file), "--dataset", "rows.jsonl"]
    assert parse("sft", words, {}).to_json()["system"] == SYSTEM


def test_one_file_serves_trainer_and_server(tmp_path, nano_folders):
    file = tmp_path / "run.yaml"
    file.write_text(
        f"rlhf_type: grpo\nmodel: {nano_folders['qwen2']}\nuse_vllm: true\nvllm_mode: server\nlearning_rate: 1e-6\n"
        "dataset: [rows.jsonl]\nreward_funcs: [accuracy]\ntemperature: 0.7\nvllm_server_host: [127.0.0.1]\n"
    )
    told = parse("rollout", ["--config", str(file)], {})
    assert told.args.temperature == 0.7
    (line,) = [note for note in told.notes if "of the trainer" in note]
    assert all(name in line for name in ("rlhf_type", "learning_rate", "dataset", "reward_funcs"))
    with pytest.raises(ConfigError, match="learning_rat"):
        parse("rollout", ["--config", str(file), "--learning_rat", "1"], {})
    with pytest.raises(ConfigError, match="learning_rate"):
        parse("rollout", ["--config", str(file), "--learning_rate", "1"], {})
