import gc
import io
import json
from pathlib import Path

import pytest
import torch
from preloaded import run_ranks
from transformers import AutoModelForCausalLM
from trl_runs import words_of

from swift.arguments import parse
from swift.errors import ConfigError
from swift.models.arguments import ModelArguments
from swift.models.policy import load_policy
from swift.models.tiny import build_tiny
from swift.rollout.engines.transformers import TransformersEngine
from swift.rollout.infer import Chat, StreamPrinter, answers, load_engine, run, write_results
from swift.types import Prompt, SamplingParams

ROOT = Path(__file__).parents[2]
SAMPLING = SamplingParams(max_new_tokens=8, temperature=1.0)


@pytest.fixture
def loaded(nano_folders):
    return load_engine(parse("infer", ["--model", str(nano_folders["qwen2"])], {}).args)


def prompts_of(template, questions):
    messages = [[{"role": "user", "content": question}] for question in questions]
    return [
        Prompt(f"id-{turns[0]['content']}", turns, template.encode_prompt(turns), {"solution": n})
        for n, turns in enumerate(messages)
    ]


def test_answers_come_in_row_order_each_its_own_however_rows_are_shared_among_processes(loaded):
    template, engine = loaded
    prompts = prompts_of(template, ["a", "bb", "a", "ccc", "a", "a"])
    alone = list(answers(prompts, range(6), engine, template, SAMPLING, seed=1))
    assert [result["row"] for result in alone] == list(range(6))
    assert [result["columns"] for result in alone] == [{"solution": n} for n in range(6)]
    assert [result["prompt_tokens"] for result in alone] == [len(prompt.token_ids) for prompt in prompts]
    assert all(result["finish_reason"] in ("stop", "length") for result in alone)
    assert all(1 <= result["completion_tokens"] <= 8 for result in alone)
    assert len({result["response"] for result in alone if len(result["messages"][0]["content"]) == 1}) > 1
    shared = [one for rank in (0, 1) for one in answers(prompts, range(rank, 6, 2), engine, template, SAMPLING, seed=1)]
    assert sorted(shared, key=lambda result: result["row"]) == alone


def test_the_rows_that_are_done_are_told_now_and_then(tmp_path, capsys, monkeypatch):
    now = iter([0.0, 4.0, 11.0, 15.0, 22.0, 22.0])
    monkeypatch.setattr("swift.rollout.infer.time.monotonic", lambda: next(now))
    results = ({"row": row} for row in range(4))
    write_results(tmp_path / "out.jsonl", 4, lambda rows: results, "answered", list)
    assert capsys.readouterr().out.splitlines()[:2] == ["row 2/4 | 11s left", "row 4/4 | 0s left"]


def test_temperature_zero_takes_the_likeliest_token(loaded, nano_folders):
    template, engine = loaded
    (prompt,) = prompts_of(template, ["hello"])
    greedy = SamplingParams(max_new_tokens=6, temperature=0.0)
    (result,) = answers([prompt], range(1), engine, template, greedy, seed=1)
    plain = AutoModelForCausalLM.from_pretrained(nano_folders["qwen2"])
    ids = list(prompt.token_ids)
    for _ in range(result["completion_tokens"]):
        with torch.no_grad():
            ids.append(int(plain(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    assert template.decode(ids[len(prompt.token_ids) :]) == result["response"]


def converse(chat: Chat, *lines: str) -> str:
    out = io.StringIO()
    assert chat.loop(io.StringIO("".join(f"{line}\n" for line in lines)), out) == 0
    return out.getvalue()


def test_a_conversation_remembers_its_turns_until_reset(loaded):
    template, engine = loaded
    chat = Chat(template, engine, SAMPLING)
    converse(chat, "hi", "again")
    assert [turn["role"] for turn in chat.history] == ["user", "assistant", "user", "assistant"]
    assert converse(chat, "/reset") == "conversation forgotten\n"
    assert chat.history == []


def test_what_is_printed_is_what_is_remembered_and_equal_seeds_repeat_it(loaded):
    template, engine = loaded
    first, second = Chat(template, engine, SAMPLING, seed=7), Chat(template, engine, SAMPLING, seed=7)
    printed = converse(first, "hi")
    assert printed == first.history[-1]["content"] + "\n" == converse(second, "hi")
    assert converse(Chat(template, engine, SAMPLING, seed=8), "hi") != printed


def test_an_answer_is_printed_while_it_is_sampled(loaded):
    template, engine = loaded
    steps = set()

    class Screen(io.StringIO):
        def write(self, text):
            steps.update([engine.counters.decode_steps] if text else [])

    Chat(template, engine, SAMPLING).handle("hi", Screen())
    assert len(steps) > 2


def test_ctrl_c_ends_an_answer_whose_part_is_remembered_and_the_conversation_goes_on(loaded, caplog):
    template, engine = loaded
    chat, whole = Chat(template, engine, SAMPLING, seed=7), Chat(template, engine, SAMPLING, seed=7)
    printed = converse(whole, "hi")
    fifth = engine.counters.decode_steps + 5

    def interrupt(*_):
        if engine.counters.decode_steps == fifth:
            raise KeyboardInterrupt

    hook = engine.model.register_forward_pre_hook(interrupt)
    stopped = converse(chat, "hi")
    hook.remove()
    gc.collect()
    assert not caplog.records, "a traceback within a conversation"
    said = chat.history[-1]["content"]
    assert said and stopped == f"{said} [stopped]\n"
    assert printed.startswith(said.rstrip("\ufffd")) and len(said) + 1 < len(printed)
    converse(chat, "more")
    assert [turn["role"] for turn in chat.history] == ["user", "assistant"] * 2


def test_commands_end_the_conversation_and_set_the_system_prompt(loaded):
    chat = Chat(*loaded, SAMPLING)
    converse(chat, "/exit", "not read")
    converse(chat)
    assert chat.history == []
    assert converse(chat, "/system be brief") == "system prompt: be brief\n"
    assert chat.system == "be brief"
    assert converse(chat, "/system") == "system prompt: none\n"
    assert "unknown; commands: /reset" in converse(chat, "/sytsem x")


def test_a_conversation_longer_than_the_context_says_so_and_keeps_its_history(loaded, nano_folders):
    template, _ = loaded
    model = AutoModelForCausalLM.from_pretrained(nano_folders["qwen2"])
    engine = TransformersEngine(
        model, eos_token_ids=template.stop_token_ids, tokenizer=template.tokenizer, max_model_len=64
    )
    chat = Chat(template, engine, SAMPLING)
    assert "/reset starts again" in converse(chat, "x" * 100)
    assert chat.history == []


def test_a_character_is_printed_when_its_bytes_are_complete(loaded):
    template, _ = loaded
    out = io.StringIO()
    printer = StreamPrinter(template, out)
    seen, ids = [], template.tokenizer("é😀!").input_ids
    for count in range(1, len(ids) + 1):
        printer.show(ids[:count])
        seen.append(out.getvalue())
    assert seen == ["", "é", "é", "é", "é", "é😀", "é😀!"]


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    rows = [{"query": f"{n}+1?", "solution": str(n + 1)} for n in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def infer(*flags: str) -> int:
    return run(parse("infer", list(words_of([*flags, "--max_completion_length 6"])), {}))


def test_a_dataset_is_answered_into_a_file_that_is_never_overwritten(nano_folders, questions, tmp_path, capsys):
    result = tmp_path / "deep" / "answers.jsonl"
    flags = f"--model {nano_folders['llama']} --val_dataset {questions} --result_path {result}"
    assert infer(flags, "--max_length 10") == 0
    text = result.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["columns"] for line in lines] == [{"solution": str(n + 1)} for n in range(5)]
    assert [line["messages"][0]["content"] for line in lines] == [f"{n}+1?" for n in range(5)]
    assert {line["prompt_tokens"] for line in lines} == {10}
    printed = capsys.readouterr().out
    assert "5 rows answered" in printed and "5 prompts truncated" in printed
    assert [path.name for path in result.parent.iterdir()] == ["answers.jsonl"]
    with pytest.raises(ConfigError, match=r"--result_path: .*exists; name a new file"):
        infer(flags)
    assert result.read_text() == text


def test_without_a_dataset_it_is_a_conversation(nano_folders, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("/system be kind\nhi\n/exit\n"))
    assert infer(f"--model {nano_folders['qwen3']}") == 0
    assert capsys.readouterr().out.startswith("system prompt: be kind\n")


@pytest.mark.long
def test_two_processes_write_the_file_that_one_writes(nano_folders, questions, tmp_path):
    flags = f"--model {nano_folders['qwen2']} --dataset {questions} --result_path {tmp_path}"
    assert infer(f"{flags}/one.jsonl") == 0
    words = f"-m swift infer {flags}/two.jsonl --max_completion_length 6".split()
    run_ranks(words, tmp_path / "logs", limit_s=240)
    assert (tmp_path / "one.jsonl").read_text() == (tmp_path / "two.jsonl").read_text()


@pytest.mark.long
@pytest.mark.parametrize("tuner", [{"use_dora": True}, {"tuner_type": "ia3"}], ids=["dora", "ia3"])
def test_vllm_gives_the_answers_of_transformers_with_any_adapter(questions, tmp_path, tuner):
    pytest.importorskip("vllm")
    model = str(build_tiny(tmp_path / "model", arch="qwen2", size="tiny", init_std=0.2))
    policy = load_policy(ModelArguments(model=model, lora_dropout=0.0, **{"tuner_type": "lora", **tuner}))
    torch.manual_seed(0)
    with torch.no_grad():
        for one in policy.parameters():
            if one.requires_grad:
                one.add_(0.5 * torch.randn_like(one))
    policy.save_pretrained(tmp_path / "adapter")
    adapter = f"--adapters {tmp_path / 'adapter'}"
    texts = []
    for name, more in (("plain", ()), ("hf", (adapter,)), ("vllm", ("--infer_backend vllm", adapter))):
        flags = f"--model {model} --val_dataset {questions} --temperature 0 --result_path {tmp_path / name}"
        assert infer(flags, *more) == 0
        texts.append([json.loads(line)["response"] for line in (tmp_path / name).read_text().splitlines()])
    assert texts[0] != texts[1] == texts[2]


def test_vllm_runs_in_one_process_with_unquantised_weights(nano_folders, questions, monkeypatch):
    flags = f"--model {nano_folders['qwen2']} --val_dataset {questions} --infer_backend vllm"
    with pytest.raises(ConfigError, match="--quant_method: bnb: vLLM gets merged, unquantised weights"):
        infer(flags, "--quant_method bnb --quant_bits 4")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="NPROC_PER_NODE: 2: vLLM runs in one process here"):
        infer(flags)
