"""The teacher gets another prompt (`teacher_prompt`), and may be the student without its adapter; plugins' datasets."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl_runs import chats, logged, rows, trained, weights

from swift.cli.main import main
from swift.rl.distillation import generalized_jsd
from swift.trainers.checkpoint import list_checkpoints

HINT = "Of course 1+1=2."


def hinted(count, hint=HINT):
    for row in chats(count):
        question = row["messages"][0]["content"]
        yield row | {"teacher_prompt": f"{question} {hint}" if hint is not None else None}


def logprobs_of(model, tokenizer, question, answer):
    ids = {}
    for name, messages in (("prompt", [question]), ("whole", [question, answer])):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=name == "prompt")
        ids[name] = tokenizer(text)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([ids["whole"]])).logits[0, len(ids["prompt"]) - 1 : -1]
    return logits.log_softmax(-1)


def test_the_teacher_gets_its_own_prompt(settings, nano_folders):
    data = list(hinted(4))
    teacher = f"--teacher_model {nano_folders['qwen2']} --dataset_shuffle false --max_steps 1 --beta 0.3 --lmbda 0"
    run_dir = trained(settings(teacher, rows=data))
    model = AutoModelForCausalLM.from_pretrained(nano_folders["qwen2"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(nano_folders["qwen2"])
    found = []
    for row in data:
        question, answer = row["messages"]
        told = {"role": "user", "content": row["teacher_prompt"]}
        pair = [logprobs_of(model, tokenizer, one, answer) for one in (question, told)]
        found.append(generalized_jsd(*pair, 0.3))
    expected = float(torch.cat(found).mean())
    assert expected > 1e-5
    assert logged(run_dir)[1, 1] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("method", ["gkd --lmbda 1", "grpo --num_generations 1"])
def test_a_policy_learns_from_itself_with_a_hint_and_not_without(settings, nano_folders, method):
    """Without its adapter it is its own teacher: equal at the start, unless the teacher sees more."""
    flags = f"--rlhf_type {method} --beta 0 --tuner_type lora --max_steps 2 --teacher_model {nano_folders['qwen2']}"
    name = "teacher_divergence" if method.startswith("gkd") else "teacher_kl"
    same, told = (logged(trained(settings(flags, rows=list(hinted(8, hint)))), name) for hint in (None, HINT))
    assert same[1, 1] == pytest.approx(0, abs=1e-6) and told[1, 1] > 1e-5


def test_a_teacher_prompt_that_is_neither_text_nor_chat_is_one_line(nano_folders, tmp_path, capsys):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"query": "1+1=", "response": "2", "teacher_prompt": 5}\n' * 4)
    model = str(nano_folders["qwen2"])
    words = f"--rlhf_type gkd --model {model} --teacher_model {model} --tuner_type full --dry_run true --max_steps 1"
    assert main(["rlhf", *words.split(), "--dataset", str(data)]) == 2
    assert "--dataset: teacher_prompt: '5': neither a text in place of" in capsys.readouterr().err


PLUGIN = """
from swift.dataset import DatasetMeta, RowPreprocessor, register_dataset


class Problems(RowPreprocessor):
    def preprocess(self, row):
        if not row["correct"]:
            return None
        told = row["problem"] + row["solution"]
        return {"messages": [{"role": "user", "content": row["problem"]}], "teacher_prompt": told}


register_dataset(DatasetMeta(dataset_path=PATH, preprocess_func=Problems()))
"""


@pytest.mark.parametrize("streaming", ["false", "true"])
def test_datasets_of_plugins_are_read_by_their_function(settings, nano_folders, tmp_path, streaming):
    data = [{"problem": f"{n}+1=", "solution": str(n + 1), "correct": n % 2 == 0} for n in range(8)]
    plugin = tmp_path / f"plugin_{streaming}.py"
    plugin.write_text(PLUGIN.replace("PATH", repr(str(tmp_path / "chats.jsonl"))))
    flags = f"--lmbda 1 --external_plugins {plugin} --teacher_model {nano_folders['qwen2']} --max_steps 1"
    resolved = settings(flags, f"--streaming {streaming}", rows=data)
    run_dir = trained(resolved)
    prompts = {row["prompt"] for row in rows(run_dir / "completions.jsonl")}
    assert prompts <= {f"[user]\n{n}+1=" for n in (0, 2, 4, 6)} and prompts
    assert weights(list_checkpoints(run_dir)[-1])
