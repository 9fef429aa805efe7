"""`swift infer` with reward models: the scores that GRPO would get, in files like those of answers."""

import json

import pytest
import torch

from swift.arguments import parse
from swift.cli.infer import run
from swift.errors import ConfigError
from swift.models.arguments import ModelArguments
from swift.models.policy import load_policy
from swift.models.tokenizer import load_chat

CHATS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"a\nb{n}"}], "n": n}
    for n in range(5)
]
STEPS = [{"prompt": f"{n}?", "completions": ["a", f"b{n}"], "labels": [True, False], "n": n} for n in range(5)]


@pytest.fixture
def infer(tmp_path):
    def call(rows, *words: str) -> list[dict]:
        data, result = tmp_path / "rows.jsonl", tmp_path / f"{len(list(tmp_path.iterdir()))}-result.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert run(parse("infer", [*words, "--val_dataset", str(data), "--result_path", str(result)], {})) == 0
        return [json.loads(line) for line in result.read_text().splitlines()]

    return call


def judge(nano_folders, folder, head: str, tuner: str):
    """Words that name a reward model with random weights, and its module."""
    model = str(nano_folders["qwen2"])
    torch.manual_seed(0)
    module = load_policy(ModelArguments(model=model, tuner_type=tuner, lora_dropout=0.0), reward_head=head).eval()
    with torch.no_grad():
        for one in module.parameters():
            if one.requires_grad:
                one.add_(0.1 * torch.randn_like(one))
    template = load_chat(ModelArguments(model=model))
    module.config.pad_token_id = template.tokenizer.pad_token_id
    module.save_pretrained(folder)
    template.tokenizer.save_pretrained(folder)
    return (["--model", str(folder)] if tuner == "full" else ["--model", model, "--adapters", str(folder)]), module


@pytest.mark.parametrize("tuner", ["full", "lora"])
def test_a_row_has_the_score_of_its_chat(nano_folders, infer, tmp_path, tuner):
    words, module = judge(nano_folders, tmp_path / "judge", "answer", tuner)
    template = load_chat(ModelArguments(model=str(nano_folders["qwen2"])))
    lines = infer(CHATS, *words)
    for line, row in zip(lines, CHATS, strict=True):
        with torch.no_grad():
            wanted = module(input_ids=torch.tensor([template.encode_finished(row["messages"])])).logits
        assert line["score"] == pytest.approx(float(wanted), abs=1e-5)
        assert [*line["messages"], {"role": "assistant", "content": line["response"]}] == row["messages"]
        assert line["columns"] == {"n": row["n"]} and line["row"] == row["n"]


@pytest.mark.parametrize("tuner", ["full", "ia3"])
def test_a_process_reward_model_scores_each_step_of_chats_and_of_its_own_rows(nano_folders, infer, tmp_path, tuner):
    words, _ = judge(nano_folders, tmp_path / "judge", "step", tuner)
    lines = infer(CHATS, *words)
    assert all(len(line["step_scores"]) == 2 and line["score"] == min(line["step_scores"]) for line in lines)
    assert len({line["score"] for line in lines}) > 1
    keys = ("messages", "response", "score", "step_scores")
    for own, line in zip(infer(STEPS, *words), lines, strict=True):
        assert {key: own[key] for key in keys} == {key: line[key] for key in keys}


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ([], "it has scores and does not chat; give rows with --val_dataset"),
        (["--val_dataset", "x.jsonl", "--template", "chatml"], "--template: such a model reads chats as it was"),
        (["--val_dataset", "x.jsonl", "--infer_backend", "vllm"], "--infer_backend: vllm: scores come from transf"),
    ],
)
def test_what_scores_do_not_have_is_refused_in_one_line(nano_folders, tmp_path, more, problem):
    words, _ = judge(nano_folders, tmp_path / "judge", "answer", "full")
    with pytest.raises(ConfigError, match=problem):
        run(parse("infer", [*words, *more], {}))
