"""Weights of parts of an answer: labels, and the first step against weighted cross-entropy of plain transformers."""

import pytest
import torch
from oracle import first_step
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl_runs import argv_of, trainer_of, written

from swift.arguments import parse
from swift.errors import ConfigError
from swift.trainers.loss_weights import parts_of

QUESTION = {"role": "user", "content": "2+3?"}
ANSWERS = {
    "hermes": [("ab", 1), ("<tool_call>c</tool_call>", 2), ("d", 1), ("<tool_call>\ne</tool_call>", 2)],
    "react": [("Thought:", 1), (" a ", 1), ("Action:", 2), (" f ", 2), ("Observation:", 2), (" 5", 0)],
}


@pytest.fixture
def settings(nano_folders, tmp_path):
    def resolved(name, *flags):
        text = "".join(part for part, _ in ANSWERS[name])
        chats = [[QUESTION, {"role": "assistant", "content": text}], [QUESTION, {"role": "assistant", "content": "x"}]]
        data = written(tmp_path / "chats.jsonl", [{"messages": chat} for chat in chats])
        own = {"--model": nano_folders["qwen2"], "--dataset": data, "--output_dir": tmp_path / "out"}
        more = f"--loss_scale {name} --per_device_train_batch_size 2 --dataset_shuffle false"
        return parse("sft", argv_of(own, more, *flags), {})

    return resolved


@pytest.mark.parametrize(
    ("name", "flags"), [("hermes", ""), ("react", "--padding_free true"), ("react", "--packing true")]
)
def test_the_first_step_is_that_of_the_weighted_cross_entropy(settings, tmp_path, name, flags):
    resolved = settings(name, *([flags, "--max_length 256"] if flags else []))
    found, grads = first_step(trainer_of(resolved, tmp_path / "swift"))
    tokenizer = AutoTokenizer.from_pretrained(resolved.args.model)
    model = AutoModelForCausalLM.from_pretrained(resolved.args.model, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True)
    total = count = 0
    for answer in (ANSWERS[name], [("x", 1)]):
        ids, weights = [], []
        for part, weight in [(prompt, 0), *answer, ("<|im_end|>", 1)]:
            ids += tokenizer(part, add_special_tokens=False)["input_ids"]
            weights += [weight] * (len(ids) - len(weights))
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
        losses = cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
        total = total + (losses * torch.tensor(weights[1:])).sum()
        count += sum(map(bool, weights))
    loss = total / count
    loss.backward()
    assert found == pytest.approx(loss.item(), rel=1e-6)
    assert all(torch.allclose(grads[key], one.grad, atol=1e-6) for key, one in model.named_parameters() if key in grads)


def test_an_answer_that_says_that_it_counts_has_no_weights(settings, tmp_path):
    assert parts_of("qwen", "a") == [("a", 1)] and parts_of("react", "") == []
    resolved = settings("hermes", "--loss_scale last_round+hermes")
    (first, second) = trainer_of(resolved, tmp_path / "swift").train_dataset["labels"]
    assert max(first) >> 40 == 1 and max(second) >> 40 == 0


@pytest.mark.parametrize("flags", ["--loss_type dft", "--sequence_parallel_size 2"])
def test_weights_go_with_the_likelihood_of_whole_rows_only(settings, flags):
    with pytest.raises(ConfigError, match="not with the weights of --loss_scale hermes"):
        settings("hermes", flags)
