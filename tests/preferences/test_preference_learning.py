"""Each method learns a rule, and what it has learnt holds for pairs that it has not seen."""

import runpy
from pathlib import Path

import pytest
import torch
from trl_runs import logged, trained, written

from swift.arguments.modes import RewardTestArguments
from swift.models import load_chat
from swift.models.arguments import CheckpointArguments
from swift.models.policy import load_for_inference
from swift.rewards.model_files import find_reward_models
from swift.rewards.models import open_reward_model

MAKER = Path(__file__).parents[2] / "examples" / "train" / "preference" / "make_pairs.py"

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def maker():
    return runpy.run_path(str(MAKER))


def preferred(checkpoint, pairs):
    """Share of pairs whose chosen answer is likelier than the rejected one."""
    args = CheckpointArguments(model=str(checkpoint))
    model, template = load_for_inference(args), load_chat(args)

    def logp(prompt, answer):
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        ids, mask = (torch.tensor([one]) for one in template.encode_chat(messages))
        logps = model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return float((logps * mask[:, 1:]).sum())

    with torch.inference_mode():
        better = [logp(one["prompt"], one["chosen"]) > logp(one["prompt"], one["rejected"]) for one in pairs]
    return sum(better) / len(better)


STEPS = {"dpo": 120, "ipo": 200, "kto": 200, "orpo": 400, "simpo": 240, "cpo": 120}


@pytest.mark.parametrize("method", STEPS)
def test_margins_grow_and_held_out_preferences_are_right(settings, maker, method):
    rows = maker["pairs"]()
    train, held_out = maker["part"](rows, False), maker["part"](rows, True)
    shown = maker["labelled"](train) if method == "kto" else train
    run_dir = trained(settings(method, f"--max_steps {STEPS[method]} --per_device_train_batch_size 16", rows=shown))
    margins = list(logged(run_dir, "rewards/margins").values())
    assert sum(margins[-10:]) / 10 > sum(margins[:10]) / 10 + 0.05
    assert preferred(run_dir / f"checkpoint-{STEPS[method]}", held_out) > 0.9


@pytest.mark.parametrize("tuner", ["full", "lora"])
def test_a_reward_model_tells_held_out_answers_apart_where_grpo_asks_it(settings, maker, tmp_path, tuner):
    rows = maker["pairs"]()
    held_out = maker["part"](rows, True)
    val = written(tmp_path / "val.jsonl", held_out)
    words = "--max_steps 400 --learning_rate 1e-3 --per_device_train_batch_size 16"
    words += f" --val_dataset {val} --eval_steps 400 --per_device_eval_batch_size 64"
    lora = "--lora_rank 16 --lora_alpha 32 --modules_to_save embed_tokens" if tuner == "lora" else ()
    run_dir = trained(settings("rm", words, "--tuner_type", tuner, lora, rows=maker["part"](rows, False)))
    (accuracy,) = logged(run_dir, "eval_accuracy").values()
    assert accuracy > 0.9
    (source,) = find_reward_models(RewardTestArguments(reward_model=[str(run_dir / "checkpoint-400")]))
    model = open_reward_model(source, False)
    model.load("cpu", torch.float32)

    def scores(kind):
        chats = ([("user", one["prompt"]), ("assistant", one[kind])] for one in held_out)
        return model.score([[{"role": role, "content": text} for role, text in chat] for chat in chats])

    right = [good > bad for good, bad in zip(scores("chosen"), scores("rejected"), strict=True)]
    assert sum(right) / len(right) == pytest.approx(accuracy), "the same tokens, the same head"
