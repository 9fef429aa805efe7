import json
import re
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.errors import ConfigError
from swift.models.arguments import ModelArguments
from swift.models.template import Template, load_template
from swift.models.templates import TEMPLATES, read_template
from swift.models.tiny import build_tokenizer
from swift.models.tokenizer import load_chat, load_tokenizer

USER, ANSWER = {"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}

UNMARKED_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What reasoning models' templates do: thoughts of earlier turns disappear.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def template_of(jinja: str, **kwargs) -> Template:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = jinja
    return Template(tokenizer, kwargs=kwargs)


def masked_text(template: Template, messages) -> str:
    ids, mask = template.encode_chat(messages)
    assert len(ids) == len(mask)
    kept = [token for token, trained in zip(ids, mask, strict=True) if trained]
    return template.decode(kept, skip_special_tokens=False)


def test_a_prompt_ends_where_the_assistant_begins(qwen2):
    template = load_chat(ModelArguments(model=qwen2))
    text = template.decode(template.encode_prompt([USER]), skip_special_tokens=False)
    assert text == "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("jinja", [TEMPLATES["chatml"], UNMARKED_CHATML])
def test_the_mask_covers_words_and_end_token_of_every_assistant_turn(jinja):
    chat = [USER, ANSWER, {"role": "user", "content": "and 4+4?"}, {"role": "assistant", "content": "8!"}]
    assert masked_text(template_of(jinja), chat) == "5<|im_end|>8!<|im_end|>"


@pytest.mark.parametrize("jinja", [TEMPLATES["chatml"], UNMARKED_CHATML])
@settings(max_examples=25, deadline=None)
@given(question=st.text(max_size=12), answer=st.text(min_size=1, max_size=12))
def test_tokens_before_an_answer_are_exactly_the_sampled_prompt(jinja, question, answer):
    template = template_of(jinja)
    prompt = [{"role": "user", "content": question}]
    ids, mask = template.encode_chat([*prompt, {"role": "assistant", "content": answer}])
    assert ids[: mask.index(1)] == template.encode_prompt(prompt)
    assert template.decode(ids, skip_special_tokens=False) == template.render(
        [*prompt, {"role": "assistant", "content": answer}]
    )


def test_an_end_token_inside_an_answer_does_not_cut_the_mask():
    chat = [USER, {"role": "assistant", "content": "a<|im_end|>b"}]
    assert masked_text(template_of(TEMPLATES["chatml"]), chat) == "a<|im_end|>b<|im_end|>"


def test_a_template_that_rewrites_earlier_turns_is_refused_for_training_but_not_for_prompts():
    template = template_of(FORGETFUL)
    chat = [USER, {"role": "assistant", "content": "<think>t</think>5"}, USER, ANSWER]
    with pytest.raises(ConfigError, match=r"rewrites earlier turns.*turn 1.*--template chatml"):
        template.encode_chat(chat)
    assert masked_text(template, [USER, {"role": "assistant", "content": "<think>t</think>5"}]) == (
        "<think>t</think>5<|im_end|>"
    )
    assert template.encode_prompt(chat[:3])


def test_stop_tokens_come_from_tokenizer_template_and_generation_config(qwen2):
    tokenizer = build_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    end_of_turn, end_of_text = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert Template(tokenizer).stop_token_ids == (end_of_text, end_of_turn)  # <|im_end|> is found in the template
    assert 77 in Template(tokenizer, [77]).stop_token_ids
    assert load_template(build_tokenizer(), qwen2).stop_token_ids == (end_of_text, end_of_turn)


def test_end_tokens_of_config_json_count_where_there_is_no_generation_config(qwen2, tmp_path):
    folder = shutil.copytree(qwen2, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [77, config["eos_token_id"]]}))
    before = load_chat(ModelArguments(model=qwen2)).stop_token_ids
    assert load_chat(ModelArguments(model=str(folder))).stop_token_ids == before
    (folder / "generation_config.json").unlink()
    assert load_chat(ModelArguments(model=str(folder))).stop_token_ids == (77, config["eos_token_id"])


@pytest.mark.parametrize(("jinja", "warned"), [("hello", True), ("{{ messages[0].content }}", False)])
def test_a_template_that_leaves_the_messages_out_is_warned_of(qwen2, tmp_path, caplog, jinja, warned):
    (tmp_path / "own.jinja").write_text(jinja)
    load_chat(ModelArguments(model=qwen2, template=str(tmp_path / "own.jinja")))
    assert ("two different prompts become the same tokens" in caplog.text) is warned


@pytest.mark.parametrize("value", [-1, ["a"], 1.5, [[1]], "x", True, {}, [1, None], 10**30])
def test_an_odd_end_token_of_a_model_folder_is_named(qwen2, tmp_path, value):
    folder = shutil.copytree(qwen2, tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ConfigError, match=r"--model: .*generation_config.json: eos_token_id"):
        load_chat(ModelArguments(model=str(folder)))


def test_decode_drops_specials_and_keeps_tags():
    template = template_of(TEMPLATES["chatml"])
    ids = template.tokenizer("<answer>5</answer><|im_end|>").input_ids
    assert template.decode(ids) == "<answer>5</answer>"


def test_a_tokenizer_without_chat_template_names_the_flag_and_the_choices():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"--template: none: .*valid: chatml"):
        Template(tokenizer)


def test_a_template_error_names_the_messages():
    refusing = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}x"
    with pytest.raises(ConfigError, match=r"messages: the chat template of .* refuses them: user first"):
        template_of(refusing).render([ANSWER])


def test_an_error_of_a_file_names_the_file(qwen2, tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("{% if messages[0].role != 'user' %}{{ messages[9].role }}{% endif %}x")
    template = load_chat(ModelArguments(model=qwen2, template=str(file)))
    with pytest.raises(ConfigError, match=f"--template {file} refuses them: .* has no element 9"):
        template.render([ANSWER])


def test_the_template_flag_takes_a_name_or_a_jinja_file(qwen2, tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    from_file = load_chat(ModelArguments(model=qwen2, template=str(file)))
    assert from_file.render([USER]) == "[user]2+3?"
    plain = load_chat(ModelArguments(model=qwen2, template="plain"))
    assert plain.render([USER, ANSWER]) == "2+3?\n5<|im_end|>"
    assert masked_text(plain, [USER, ANSWER]) == "5<|im_end|>"


def test_an_unknown_template_gets_the_nearest_name(qwen2):
    with pytest.raises(ConfigError, match=r"--template: chatlm: neither .* nearest: chatml"):
        load_tokenizer(ModelArguments(model=qwen2, template="chatlm"))


@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("llama3", "<|start_header_id|>"), ("gemma", "<start_of_turn>"), ("gemma4", "<|turn>"),
        ("phi3", "<|user|>"), ("deepseekv3", "<\uff5cUser\uff5c>"), ("llama3_1", "<|start_header_id|>"),
    ],
)  # fmt: skip
def test_a_template_needs_its_marker_tokens(qwen2, name, token):
    with pytest.raises(ConfigError, match=rf"--template: {name}: the tokenizer lacks the tokens {re.escape(token)}"):
        load_tokenizer(ModelArguments(model=qwen2, template=name))


def test_templates_of_trl_are_offered_by_the_names_of_their_files(qwen2):
    from trl import chat_template_utils as trl_templates

    chat = load_chat(ModelArguments(model=qwen2, template="qwen2_5_training"))
    assert chat.tokenizer.chat_template == trl_templates.qwen2_5_training_chat_template
    assert masked_text(chat, [USER, ANSWER]) == "\n5<|im_end|>"  # TRL's mark begins behind the role


WRITTEN = {  # a system prompt S, a question and its answer, as models of the name read them
    "llama4": "<|header_start|>system<|header_end|>\n\nS<|eot|><|header_start|>user<|header_end|>\n\n2+3?<|eot|>"
    "<|header_start|>assistant<|header_end|>\n\n5<|eot|>",
    "phi_3": "<|system|>\nS<|end|>\n<|user|>\n2+3?<|end|>\n<|assistant|>\n5<|end|>\n",
    "phi_35": "<|system|>\nS<|end|>\n<|user|>\n2+3?<|end|>\n<|assistant|>\n5<|end|>\n",
    "deepseek_v2": "S\n\n<｜User｜>2+3?<｜Assistant｜>5<|im_end|>",
    "mistral_v1": " [INST] S\n\n2+3? [/INST] 5<|im_end|>",
    "falcon_h1": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n"
    "5<|im_end|>\n",
}


@pytest.mark.parametrize("name", [*WRITTEN, "llama3", "gemma", "gemma3_text", "chatml", "plain"])
def test_every_built_in_template_marks_what_the_assistant_says(name):
    template = template_of(TEMPLATES[name])
    ends = {"llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "gemma3_text": "<end_of_turn>", "llama4": "<|eot|>"}
    ends |= {"phi_3": "<|end|>", "phi_35": "<|end|>"}
    chat = [{"role": "system", "content": "S"}, USER, ANSWER]
    assert masked_text(template, chat).lstrip().startswith("5" + ends.get(name, "<|im_end|>"))
    assert "S" in template.render(chat) and template.render(chat) == WRITTEN.get(name, template.render(chat))
    prompt = template.render(chat[:2], add_generation_prompt=True)
    assert template.render(chat).startswith(prompt)


def test_gemma_has_a_system_turn_and_gemma3_text_puts_it_before_the_question():
    chat = [{"role": "system", "content": "S"}, USER]
    question = USER["content"]
    turns = f"<start_of_turn>system\nS<end_of_turn>\n<start_of_turn>user\n{question}<end_of_turn>\n"
    assert template_of(TEMPLATES["gemma"]).render(chat).endswith(turns)
    joined = f"<start_of_turn>user\nS\n\n{question}<end_of_turn>\n"
    assert template_of(TEMPLATES["gemma3_text"]).render(chat).endswith(joined)


def test_templates_named_after_models_are_those_of_the_models():
    """`qwen2_5` and `qwen` have their default system prompts; `qwen3` thinks and shows tools."""
    for name, system in (("qwen2_5", "You are Qwen, created by Alibaba Cloud."), ("qwen", "You are a helpful")):
        template = template_of(read_template(name))
        assert template.render([USER]).startswith(f"<|im_start|>system\n{system}")
        assert system not in template.render([{"role": "system", "content": "S"}, USER])
    training = template_of(read_template("qwen3_training"))
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n5"}
    assert "hm" in training.render([USER, thought, USER])
    qwen3 = template_of(read_template("qwen3"))
    assert "hm" not in qwen3.render([USER, thought, USER])
    assert qwen3.render([USER]) == "<|im_start|>user\n2+3?<|im_end|>\n"
    assert "<think>" in qwen3.render([USER], add_generation_prompt=True, kwargs={"enable_thinking": False})
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    assert '"name": "add"' in qwen3.decode(qwen3.encode_prompt([USER], tools))
    with pytest.raises(ConfigError, match="shows no tools"):
        template_of(TEMPLATES["chatml"]).encode_prompt([USER], tools)


def test_a_template_may_be_given_as_a_text(qwen2):
    chat = load_chat(ModelArguments(model=qwen2, template="{{ messages[-1].content }}"))
    assert (chat.render([USER]), chat.name) == ("2+3?", "--template (a text in Jinja)")


def test_tokens_of_the_vocabulary_get_other_roles(qwen2):
    args = ModelArguments(model=qwen2, special_tokens={"eos_token": "<|endoftext|>"})
    assert load_tokenizer(args).eos_token == "<|endoftext|>"
    assert load_chat(args).tokenizer.convert_tokens_to_ids("<|endoftext|>") in load_chat(args).stop_token_ids
    for roles, said in (
        ({"eos_token": "<x>"}, "<x>: no token of"),
        ({"eos": "a"}, "no role of a token; nearest: eos_"),
    ):
        with pytest.raises(ConfigError, match=f"--special_tokens: .*{said}"):
            load_tokenizer(ModelArguments(model=qwen2, special_tokens=roles))


def test_a_tokenizer_without_pad_token_pads_with_its_end_token(qwen2, tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(ModelArguments(model=qwen2))
    assert loaded.pad_token == "<|endoftext|>"
    from swift.models.tokenizer import read_tokenizer

    assert read_tokenizer(tmp_path).pad_token == "<|im_end|>"


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "LlamaTokenizer", "GPT2Tokenizer", "GemmaTokenizer", "T5Tokenizer"])
def test_a_tokenizer_without_its_vocabulary_is_refused(qwen2, tmp_path, name):
    folder = shutil.copytree(qwen2, tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, "pad_token": "<|endoftext|>"}))
    with pytest.raises(ConfigError, match="knows no text"):
        load_chat(ModelArguments(model=str(folder)))


def test_a_token_that_was_added_and_that_no_chat_contains_needs_no_embedding(qwen2, tmp_path):
    folder = shutil.copytree(qwen2, tmp_path / "model")
    tokenizer = build_tokenizer()
    assert tokenizer.add_tokens(["<an image>"]) == 1
    tokenizer.save_pretrained(folder)
    assert (
        load_chat(ModelArguments(model=str(folder))).tokenizer.convert_tokens_to_ids("<an image>") == len(tokenizer) - 1
    )
    tokenizer.pad_token = "<an image>"
    tokenizer.save_pretrained(folder)
    with pytest.raises(ConfigError, match="its tokenizer has ids up to"):
        load_chat(ModelArguments(model=str(folder)))


def test_a_folder_without_tokenizer_says_so(qwen2, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(f"{qwen2}/{name}", tmp_path)
    with pytest.raises(ConfigError, match=r"sought tokenizer\.json there and found none"):
        load_tokenizer(ModelArguments(model=str(tmp_path)))


# --- variables of the template ------------------------------------------------------------------------------

THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)


def test_variables_of_the_flag_reach_every_rendering(qwen2, tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text(THINKING)
    off = load_chat(ModelArguments(model=qwen2, template=str(file), chat_template_kwargs={"enable_thinking": False}))
    assert off.render([USER], add_generation_prompt=True).endswith("assistant\n<think></think>")
    assert template_of(THINKING).render([USER], add_generation_prompt=True).endswith("assistant\n")
    assert off.decode(off.encode_prompt([USER]), skip_special_tokens=False).endswith("<think></think>")
    assert masked_text(off, [USER, ANSWER]) == "5<|im_end|>"


def test_a_rendering_may_have_variables_of_its_own_and_never_those_of_swift():
    text = template_of(THINKING, enable_thinking=False).render(
        [USER], kwargs={"enable_thinking": True, "add_generation_prompt": False, "messages": []},
        add_generation_prompt=True,
    )  # fmt: skip
    assert text.endswith("2+3?<|im_end|><|im_start|>assistant\n")


def test_a_variable_that_swift_sets_is_refused_and_one_that_nothing_reads_is_noted_with_the_nearest(caplog):
    with pytest.raises(ConfigError, match="--chat_template_kwargs: messages: is set by swift itself"):
        template_of(THINKING, messages=[])
    template_of(THINKING, enable_thinkng=False)
    assert "enable_thinkng: the chat template does not read it, so it changes nothing; nearest: enable_thinking" in (
        caplog.text
    )
    caplog.clear()
    template_of(THINKING, enable_thinking=False)
    assert not caplog.text
