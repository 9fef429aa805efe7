import io

import pytest
import torch
from swift.models.arguments import ModelArguments
from transformers import AutoModelForCausalLM

from swift.rollout.engines.transformers import TransformersEngine
from swift.rollout.infer import Chat, StreamPrinter, answers, load_engine
from swift.types import Prompt, SamplingParams

SAMPLING = SamplingParams(max_new_tokens=8, temperature=1.0)


@pytest.fixture
def loaded(nano_folders):
    return load_engine(ModelArguments(model=str(nano_folders["qwen2"])))


def prompts_of(template, questions):
    messages = [[{"role": "user", "content": question}] for question in questions]
    return [
        Prompt(f"id-{turns[0]['content']}", turns, template.encode_prompt(turns), {"solution": n})
        for n, turns in enumerate(messages)
    ]


def test_results_come_in_row_order_with_everything_about_the_row(loaded):
    template, engine = loaded
    prompts = prompts_of(template, ["a", "bb", "ccc", "dddd"])
    results = list(answers(prompts, range(4), engine, template, SAMPLING, seed=1))
    assert [result["row"] for result in results] == [0, 1, 2, 3]
    assert [result["columns"] for result in results] == [{"solution": n} for n in range(4)]
    assert [result["prompt_tokens"] for result in results] == [len(prompt.token_ids) for prompt in prompts]
    assert all(result["finish_reason"] in ("stop", "length") for result in results)
    assert all(1 <= result["completion_tokens"] <= 8 for result in results)


def test_the_answers_do_not_depend_on_how_rows_are_shared_among_processes(loaded):
    template, engine = loaded
    prompts = prompts_of(template, ["a", "bb", "a", "ccc", "a"])
    alone = list(answers(prompts, range(5), engine, template, SAMPLING, seed=1))
    shared = [
        result for rank in (0, 1) for result in answers(prompts, range(rank, 5, 2), engine, template, SAMPLING, seed=1)
    ]
    assert sorted(shared, key=lambda result: result["row"]) == alone


def test_equal_rows_get_answers_of_their_own(loaded):
    template, engine = loaded
    results = list(answers(prompts_of(template, ["a"] * 4), range(4), engine, template, SAMPLING, seed=1))
    assert len({result["response"] for result in results}) > 1


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


def test_exit_and_end_of_input_end_the_conversation(loaded):
    chat = Chat(*loaded, SAMPLING)
    converse(chat, "/exit", "not read")
    converse(chat)
    assert chat.history == []


def test_the_system_prompt_can_be_set_and_cleared(loaded):
    chat = Chat(*loaded, SAMPLING)
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
    seen = []
    for token in template.tokenizer("é😀!").input_ids:
        printer.add(token)
        seen.append(out.getvalue())
    assert seen == ["", "é", "é", "é", "é", "é😀", "é😀!"]
