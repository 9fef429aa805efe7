"""Reward models with a sequence-classification head: found, checked, batched, cut and merged with functions."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
from refusals import problems_of

from swift.errors import RefusedChat
from swift.models.tiny import build_tiny
from swift.rewards.model_files import find_reward_models
from swift.rewards.models import RewardModels, batches, open_reward_models
from swift.types import Episode


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("models") / "judge", size="nano", seed=3, reward_model=True)


def model_args(*models, **values):
    defaults = {"torch_dtype": "float32", "use_hf": False, "trust_remote_code": False}
    defaults |= {"reward_model_revision": [], "reward_adapters": [], "reward_model_plugin": [], "external_plugins": []}
    return SimpleNamespace(reward_model=[str(model) for model in models], **{**defaults, **values})


def judges(*models, **values):
    args = model_args(*models, **values)
    opened = open_reward_models(args)
    opened.load(args, "cpu")
    return opened


def edited_copy(folder, target, **changes):
    import shutil

    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    config.update(changes)
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_scores_are_the_heads_output_for_the_rendered_chat(folder, group):
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    models = judges(folder)
    ((row,),) = models.score([group(["an answer"])])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "an answer"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        assert row == [pytest.approx(model(input_ids=ids).logits[0, 0].item(), abs=1e-5)]
    assert not any(parameter.requires_grad for parameter in models._models[0]._model.parameters())
    assert "reads texts only" in models.blind()[0]


def test_a_model_sees_the_turns_of_a_trajectory_up_to_the_last_answer(folder, group):
    models = judges(folder)
    whole, seen = group(["7"]), []
    chat = [
        {"role": "user", "content": "guess"}, {"role": "assistant", "content": "5"},
        {"role": "user", "content": "higher"}, {"role": "assistant", "content": "7"},
    ]  # fmt: skip
    whole.completions[0].episode = Episode([*chat, {"role": "user", "content": "right"}], 1, 2)
    models._models[0].score = lambda chats, on_progress: seen.extend(chats) or [0.0]
    models.score([whole])
    assert seen == [chat]


def test_a_chat_that_the_template_refuses_has_no_score(folder, group, caplog):
    models = judges(folder)
    ((wanted,),) = models.score([group(["fine"])])
    model = models._models[0]
    encode = model.encode

    def refusing(chat):
        if chat[-1]["content"] == "no":
            raise RefusedChat("roles must alternate")
        return encode(chat)

    model.encode = refusing
    (rows,) = models.score([group(["no", "fine", "no"])])
    assert [math.isnan(row[0]) for row in rows] == [True, False, True]
    assert rows[1] == pytest.approx(wanted, abs=1e-5)
    assert caplog.text.count("roles must alternate: 'question no'") == 1


def test_a_batch_of_different_lengths_gives_the_scores_of_its_rows_alone(folder, group):
    models = judges(folder)
    texts = ["a", "a much longer answer " * 9, "", "medium size"]
    (together,) = models.score([group(texts)])
    alone = [models.score([group([text])])[0][0] for text in texts]
    assert [row[0] for row in together] == [pytest.approx(row[0], abs=1e-5) for row in alone]
    assert len({round(row[0], 4) for row in together}) == 4


def test_a_model_without_a_pad_token_scores_its_rows_one_by_one(folder, group, tmp_path):
    bare = edited_copy(folder, tmp_path / "bare", pad_token_id=None)
    texts = ["a", "a much longer answer"]
    with_pad = judges(folder).score([group(texts)])
    without = judges(bare).score([group(texts)])
    assert [row[0] for row in without[0]] == [pytest.approx(row[0], abs=1e-5) for row in with_pad[0]]


def test_over_long_chats_lose_tokens_on_the_left_and_are_counted(folder, group):
    models = judges(folder)
    (model,) = models._models
    chat = [{"role": "user", "content": "x" * 2000}, {"role": "assistant", "content": "the end"}]
    ids = model.encode(chat)
    assert len(ids) == 1024
    assert model._template.decode(ids).rstrip().endswith("the end")
    assert models.drain_metrics()["health/reward_truncated/judge"] == 1
    assert models.drain_metrics()["health/reward_truncated/judge"] == 0


def test_a_template_without_an_end_token_gets_one(folder):
    models = judges(folder)
    (model,) = models._models
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    end = model._template.tokenizer.eos_token_id
    assert model.encode(chat).count(end) == 2
    model._template.tokenizer.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    assert model.encode(chat)[-1] == end


def test_models_come_after_functions_and_share_the_weights(folder, group, progress, arguments):
    from swift.rewards.pipeline import RewardPipeline

    args = arguments(reward_funcs=["format"], reward_model=[str(folder)], reward_weights=[1.0, 0.5])
    models = judges(folder)
    with RewardPipeline(args, seed=1, max_completion_length=10, reward_models=models) as rewards:
        assert (rewards.names, rewards.weights) == (["format", "judge"], [1.0, 0.5])
        asked = [group(["a", "b"])]
        [early] = [future.result(20) for future in rewards.submit(asked, progress)]
        assert [row[1] for row in early.values] == [None, None]
        (scores,) = rewards.add_model_scores(asked, [early])
        assert [row[1] for row in scores.values] == [row[0] for row in models.score(asked)[0]]
        assert "rewards/judge/mean" in rewards.drain_metrics()


def test_a_run_may_have_models_only(folder, group, progress, arguments):
    from swift.rewards.pipeline import RewardPipeline

    models = judges(folder)
    args = arguments(reward_model=[str(folder)])
    with RewardPipeline(args, seed=1, max_completion_length=10, reward_models=models) as rewards:
        (scores,) = rewards.score([group(["a"])], progress)
        assert scores.excluded == [None]
        assert isinstance(scores.values[0][0], float)


def test_a_value_that_is_not_finite_excludes_its_sample(group, progress, arguments):
    from swift.rewards.pipeline import RewardPipeline

    class Broken(RewardModels):
        def __init__(self):
            super().__init__([])

        def score(self, groups):
            return [[[float("nan")], [1.0]] for _ in groups]

    args = arguments(reward_model=["some/judge"])
    with RewardPipeline(args, seed=1, max_completion_length=10, reward_models=Broken()) as rewards:
        (scores,) = rewards.score([group(["a", "b"])], progress)
    assert scores.excluded == ["not_finite: judge", None]


def test_two_folders_of_one_name_keep_two_columns(folder, tmp_path):
    other = edited_copy(folder, tmp_path / "judge")
    assert [item.name for item in find_reward_models(model_args(folder, other))] == ["judge", "judge-2"]


def test_a_causal_model_has_no_score_head(tmp_path):
    (line,) = problems_of(find_reward_models, model_args(build_tiny(tmp_path / "causal", size="nano")))
    assert "Qwen2ForCausalLM has no score head" in line


def test_more_than_one_label_is_refused(folder, tmp_path):
    three = edited_copy(folder, tmp_path / "three", id2label={"0": "a", "1": "b", "2": "c"})
    assert "3 labels" in problems_of(find_reward_models, model_args(three))[0]
    default = edited_copy(folder, tmp_path / "default", id2label=None)
    assert "2 labels" in problems_of(find_reward_models, model_args(default))[0]


def test_an_adapter_brings_its_own_head(tmp_path, group):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    base = build_tiny(tmp_path / "base", size="nano", seed=5)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
        tuned = get_peft_model(
            model, LoraConfig(task_type="SEQ_CLS", target_modules="all-linear", init_lora_weights=False)
        )
    tuned.save_pretrained(tmp_path / "adapter")
    first = judges(base, reward_adapters=[str(tmp_path / "adapter")]).score([group(["a", "b"])])
    second = judges(base, reward_adapters=[str(tmp_path / "adapter")]).score([group(["a", "b"])])
    assert first == second
    assert first[0][0] != first[0][1]


def test_batches_hold_similar_lengths_within_both_limits():
    assert list(batches([2, 5, 3], max_rows=2, max_tokens=100)) == [[1, 2], [0]]
    assert list(batches([4, 4, 4], max_rows=9, max_tokens=8)) == [[0, 1], [2]]
    assert list(batches([50], max_rows=9, max_tokens=8)) == [[0]]
    assert list(batches([], 1, 1)) == []
