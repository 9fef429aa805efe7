"""Models that see: a prompt's images once per group of a packed stream, as good as rows; names, refusals, parts."""

import shutil
from types import SimpleNamespace

import pytest
import torch
import vlms
from transformers import AutoModelForImageTextToText

from swift.arguments import parse
from swift.data.image_store import images_in, images_shown, name_of, remember
from swift.data.images import digest_of
from swift.errors import ConfigError, RefusedChat
from swift.models.attention.choice import choose_streams
from swift.models.attention.forked import forks, takes_streams
from swift.models.attention.interface import is_packed
from swift.models.experts import adapted_parameter
from swift.models.export import merge_adapter
from swift.models.forward import TokenSequence, arrange, completion_logits, pack, pad
from swift.models.multimodal import parts_of
from swift.models.policy import load_policy
from swift.models.scoring import prepare_scoring, score_tokens
from swift.models.template import load_template
from swift.models.tokenizer import read_tokenizer
from swift.models.tower_passes import always_see
from swift.models.tuners import with_adapter
from swift.models.vision import Vision, as_written, load_processor, placeholder_ids, possible
from swift.trainers.parallel.sequence import require_shareable
from swift.types import Image, ShownImage

COMPLETIONS = ([5, 6, 7, 8, 9], [10], [11, 12])


def picture(seed=0, height=64, width=96):
    content = vlms.image(seed, height, width)
    one = Image(digest_of(content), content=content)
    remember([one])
    return one


def chat(*parts):
    """A user turn of texts and images."""
    content = [
        {"type": "image", "image": part.digest} if isinstance(part, Image) else {"type": "text", "text": part}
        for part in parts
    ]
    messages = [{"role": "user", "content": content}]
    if images := [part for part in parts if isinstance(part, Image)]:
        remember(images)
    return messages


@pytest.fixture
def sees(vlm_folders):
    """A model of a family, and its template."""

    def of(family, **settings):
        folder = vlm_folders(family)
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        template = load_template(read_tokenizer(folder), folder)
        processor = load_processor(folder, model.config, template.tokenizer)
        template.vision = Vision(folder, processor, model.config, template.render, **settings)
        template.vision.attach(model)
        return model, template

    return of


def rollout(template):
    """Completions of prompts with an image, two, and none; two prompts differ in their image alone."""
    first, second = picture(0), picture(1)
    prompts = [chat(first, "What?"), chat(second, "What?"), chat("One ", first, ", two ", second), chat("Nothing")]
    return [TokenSequence(template.encode_prompt(prompt), ids) for prompt in prompts for ids in COMPLETIONS]


def of_rows(model, sequences, vision):
    """Logits of each sequence alone, and the gradients of a loss on them."""
    logits_NV = torch.cat([completion_logits(model, pad([one], vision=vision)) for one in sequences])
    return possible(model, logits_NV)


def gradients(model, logits_NV):
    weights = torch.randn(logits_NV.shape, generator=torch.Generator().manual_seed(3))
    model.zero_grad()
    (logits_NV * weights).sum().backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("family", vlms.FAMILIES)
def test_a_drawn_image_gives_every_part_a_gradient_and_changes_none(family, sees):
    model, template = sees(family)
    seeing, blind = rollout(template)[:2], rollout(template)[-3:]
    logits, of_images = (of_rows(model, prompts, template.vision) for prompts in (blind, seeing))
    expected, seen = gradients(model, logits), gradients(model, of_images)
    always_see(model, template.vision)
    again = of_rows(model, blind, template.vision)
    assert again.equal(logits)
    found = gradients(model, again)
    assert found.keys() == seen.keys() > expected.keys()
    assert all(grad.equal(expected.get(name, torch.zeros_like(grad))) for name, grad in found.items())
    assert of_rows(model, seeing, template.vision).equal(of_images)


@pytest.mark.parametrize("family", vlms.FAMILIES)
def test_a_stream_is_as_good_as_rows_and_the_tower_sees_an_image_once(family, sees):
    model, template = sees(family)
    sequences, vision = rollout(template), template.vision
    rows_NV = of_rows(model, sequences, vision)
    expected = gradients(model, rows_NV)
    obstacle = choose_streams(model)
    assert takes_streams(model), obstacle
    assert forks(model) == (family in vlms.FORKED) and is_packed(model) == (family in vlms.PACKED)
    seen = []
    tower = next(
        module for name, module in model.named_modules() if name.endswith(("visual", "vision_tower", "vision_model"))
    )
    hook = tower.register_forward_hook(lambda module, given, kept, _: seen.append(kept), with_kwargs=True)
    tokens = arrange(model, sequences)
    found_NV = possible(model, completion_logits(model, tokens))
    hook.remove()
    assert len(seen) == 1
    assert float((found_NV - rows_NV).detach().abs().max() / rows_NV.detach().std()) < 1e-5
    found = gradients(model, found_NV)
    assert found.keys() == expected.keys()
    gap = sum(float((found[name] - expected[name]).square().sum()) for name in found) ** 0.5
    assert gap < 1e-5 * sum(float(one.square().sum()) for one in expected.values()) ** 0.5


@pytest.mark.parametrize("family", vlms.PACKED)
def test_pixels_are_there_once_per_group(family, sees):
    _, template = sees(family)
    sequences, vision = rollout(template), template.vision
    streamed, rows = pack(sequences, vision=vision).inputs, pad(sequences, vision=vision).inputs
    assert rows["pixel_values"].shape[0] == len(COMPLETIONS) * streamed["pixel_values"].shape[0]


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "gemma3"])
def test_scores_are_those_of_logits_without_placeholders(family, sees):
    model, template = sees(family)
    sequences = rollout(template)
    choose_streams(model)
    assert prepare_scoring(model) is None
    logits_NV = completion_logits(model, arrange(model, sequences))
    targets_N = torch.tensor([token for one in sequences for token in one.completion_ids])
    logprobs_N, entropy_N = score_tokens(model, arrange(model, sequences), entropy="value")
    expected_NV = logits_NV.log_softmax(-1)
    torch.testing.assert_close(logprobs_N, expected_NV.gather(1, targets_N[:, None])[:, 0])
    torch.testing.assert_close(entropy_N, -(expected_NV.exp() * expected_NV).sum(-1))
    banned = placeholder_ids(model.config)
    assert banned and float(expected_NV.exp()[:, banned].abs().max()) == 0.0


def test_images_are_named_in_the_ids(sees):
    _, template = sees("qwen3_vl")
    first, second = picture(0), picture(1)
    one, other = (template.encode_prompt(chat(image, "What?")) for image in (first, second))
    assert len(one) == len(other) and one != other
    assert [token for token in one if token < 0][:4] == list(name_of([first]))
    assert template.vision.visible(one) == template.vision.visible(other)
    both = template.encode_prompt(chat(first, second))
    assert (
        [token for token in both if token < 0][:4] == list(name_of([first, second])) != list(name_of([second, first]))
    )
    assert all(token >= -(2**31) for token in both)


@pytest.mark.parametrize("family", vlms.FAMILIES)
def test_prompts_are_found_as_their_chat_template_wrote_them(family, sees):
    _, template = sees(family)
    tail = template.tokenizer("and more", add_special_tokens=False)["input_ids"]
    for parts in ([picture(0), "What?"], ["a ", picture(1, 96, 160), ", b", picture(2), "?", picture(1, 96, 160)]):
        messages = chat(*parts)
        ids = template.encode_prompt(messages) + tail
        text = template.render(messages, add_generation_prompt=True)
        written = template.tokenizer(text, add_special_tokens=False)["input_ids"]
        shown = images_shown(ids)
        assert as_written(ids, shown) == written + tail != template.vision.visible(ids)
        assert [one.image for one in shown] == list(images_in(messages))


def test_images_whose_tokens_are_not_known_are_not_guessed(sees):
    _, template = sees("qwen3_vl")
    ids = template.encode_prompt(chat(picture(0), "What?"))
    with pytest.raises(ValueError, match="cannot be told from"):
        as_written(ids, [ShownImage(picture(0), -1, ())])


def test_the_positions_are_those_of_the_model(sees):
    model, template = sees("qwen3_vl")
    ids = template.encode_prompt(chat("One ", picture(0), ", two ", picture(1, 96, 64)))
    inputs = pad([TokenSequence(ids, [1])], vision=template.vision).inputs
    expected, delta = model.model.get_rope_index(
        inputs["input_ids"], mm_token_type_ids=inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"]
    )
    places, following = template.vision.positions(ids)
    assert places == expected[:, 0].tolist()
    assert following == len(ids) + int(delta) < len(ids)


def test_processed_images_are_made_again_where_they_are_not_kept(sees, monkeypatch):
    import swift.models.vision

    _, template = sees("llava_onevision")
    ids = [template.encode_prompt(chat(*images)) for images in ((picture(0), picture(1)), (picture(2),))]
    kept = template.vision.features(ids, "cpu")
    monkeypatch.setattr(swift.models.vision, "KEPT_BYTES", 0)
    template.vision._made.clear()
    again = template.vision.features(ids, "cpu")
    assert len(template.vision._made) == 1 and kept.keys() == again.keys()
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_large_images_are_made_smaller(sees):
    _, template = sees("qwen3_vl", max_pixels=32 * 32)
    _, whole = sees("qwen3_vl")
    large = picture(3, 96, 128)
    assert len(template.encode_prompt(chat(large))) < len(whole.encode_prompt(chat(large)))


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        (("a <|image_pad|> b",), r"<\|image_pad\|> in a text stands for an image"),
        (("a <|image_pad|> b", 0), r"<\|image_pad\|> is 2 times in the prompt of 1 image"),
        (("a <|video_pad|> b", 0), r"<\|video_pad\|> in a text stands for an image"),
        (("<|vision_start|><|image_pad|><|vision_end|>", 0), r"<\|vision_start\|> is 2 times in the prompt of 1 image"),
    ],
)
def test_texts_that_look_like_an_image_are_refused(sees, parts, problem):
    _, template = sees("qwen3_vl")
    with pytest.raises(RefusedChat, match=problem):
        template.encode_prompt(chat(*(picture(part) if isinstance(part, int) else part for part in parts)))


def test_a_template_without_images_is_refused(vlm_folders):
    folder = vlm_folders("qwen3_vl")
    tokenizer = read_tokenizer(folder, template="chatml")
    template = load_template(tokenizer, folder)
    config = AutoModelForImageTextToText.from_pretrained(folder).config
    with pytest.raises(ConfigError, match="the chat template"):
        Vision(folder, load_processor(folder, config, tokenizer), config, template.render)


@pytest.mark.parametrize("family", vlms.FAMILIES)
def test_parts_of_a_model(family, sees):
    model, _ = sees(family)
    parts = parts_of(model)
    of = {name: parts.get(name.rpartition(".")[0], "aligner") for name, _ in model.named_parameters()}
    texts = ("language_model.", "text_model.", "thinker.model.", "lm_head.")
    assert {part for name, part in of.items() if any(text in name for text in texts)} == {"llm"}
    assert set(of.values()) == {"llm", "aligner", "vit"}
    assert all(part == "aligner" for name, part in of.items() if "merger" in name or "projector" in name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_images_that_see_themselves_in_a_way_that_is_not_known_are_not_packed_in_16_bits(sees, dtype, monkeypatch):
    monkeypatch.setattr("swift.models.attention.choice.SEE_THEMSELVES", set())
    model, _ = sees("gemma3")
    assert "tokens of an image see each other" in choose_streams(model.to(dtype))
    assert not takes_streams(model)


def test_gemma_4_takes_rows_if_its_images_see_themselves(sees):
    model, template = sees("gemma4")
    sequences = rollout(template)[3:7]
    causal_NV = of_rows(model, sequences, template.vision).detach()
    model.config.text_config.use_bidirectional_attention = "vision"
    gap_NV = (of_rows(model, sequences, template.vision).detach() - causal_NV).abs()
    assert float(gap_NV.max()) > 1e-2 * float(causal_NV.std())
    assert "tokens of an image see each other" in choose_streams(model)
    assert not takes_streams(model)


def test_images_that_see_themselves_are_not_shared_by_ranks(sees):
    model, _ = sees("gemma3")
    with pytest.raises(ConfigError, match=r"computed in parts \(tokens of an image see each other\)"):
        require_shareable(model, SimpleNamespace(sequence_parallel_size=2))


def test_images_may_be_numbered(vlm_folders):
    folder = vlm_folders("qwen3_vl")
    tokenizer = read_tokenizer(folder)
    mark = "<|vision_start|>"
    numbered = "{% set shown = namespace(count=0) %}" + tokenizer.chat_template.replace(
        mark, "{% set shown.count = shown.count + 1 %}Picture {{ shown.count }}: " + mark
    )
    tokenizer.chat_template = numbered
    config = AutoModelForImageTextToText.from_pretrained(folder).config
    template = load_template(tokenizer, folder)
    template.vision = Vision(folder, load_processor(folder, config, tokenizer), config, template.render)
    ids = template.encode_prompt(chat(picture(0), "and", picture(1)))
    assert "Picture 2: " in template.decode(template.vision.visible(ids))


def tuned(folder, **settings):
    from swift.arguments import parse

    words = ["--rlhf_type", "grpo", "--dataset", "d", "--reward_funcs", "accuracy", "--tuner_type", "lora", "--model"]
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return load_policy(parse("rlhf", [*words, str(folder), *flags], {}).args)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "qwen2_5_omni", "idefics3"])
def test_adapters_reach_the_parts_that_are_not_frozen(family, vlm_folders):
    def reached(**settings):
        policy = tuned(vlm_folders(family), **settings)
        parts = parts_of(policy.get_base_model())
        names = [name.removeprefix("base_model.model.") for name, one in policy.named_parameters() if one.requires_grad]
        return {parts[name.partition(".lora_")[0]] for name in names}

    assert reached() == {"llm"}
    assert reached(freeze_aligner="false") == {"llm", "aligner"}
    assert reached(freeze_vit="false") == {"llm", "vit"}
    assert reached(freeze_vit="false", freeze_llm="true") == {"vit"}


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_omni"])
def test_an_engine_can_take_the_adapter_by_itself(family, vlm_folders):
    words = "--rlhf_type grpo --dataset rows.jsonl --reward_funcs format --tuner_type lora --model"
    assert adapted_parameter(parse("rlhf", [*words.split(), str(vlm_folders(family))], {}).args) == ""


def test_what_an_adapter_would_not_reach_is_refused(vlm_folders):
    with pytest.raises(ConfigError, match="--freeze_aligner: false: the adapter reaches no layer there"):
        tuned(vlm_folders("gemma3"), freeze_aligner="false")
    with pytest.raises(ConfigError, match=r"--target_regex: .*: fits model.visual.* leaves out"):
        tuned(vlm_folders("qwen3_vl"), target_regex=r".*\.(qkv|q_proj)")


def test_an_adapter_of_a_whole_model_does_not_fit_its_text_part(vlm_folders, tmp_path):
    from transformers import AutoModelForCausalLM

    policy = tuned(vlm_folders("qwen3_5"))
    policy.save_pretrained(tmp_path / "adapter")
    text = AutoModelForCausalLM.from_pretrained(vlm_folders("qwen3_5"))
    with pytest.raises(ConfigError, match="tensors have no place in the model"):
        with_adapter(text, tmp_path / "adapter")


def test_messages_name_their_images():
    first, second = picture(0), picture(1)
    messages = [{"role": "system", "content": "text"}, *chat(second, "and", first, second)]
    assert images_in(messages) == (second, first, second)


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("qwen2_5_vl", True),
        *(
            pytest.param(family, False, marks=() if family in ("gemma3", "qwen3_vl_moe") else pytest.mark.long)
            for family in vlms.FAMILIES
        ),
    ],
)
def test_an_adapter_is_merged_into_a_whole_model(family, tied, vlm_folders, tmp_path):
    from peft import LoraConfig, get_peft_model

    base = vlm_folders(family)
    if tied:
        base = tmp_path / "tied"
        shutil.copytree(vlm_folders(family), base)
        model = AutoModelForImageTextToText.from_pretrained(base, tie_word_embeddings=True)
        model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = True
        model.tie_weights()
        model.save_pretrained(base)
    model = AutoModelForImageTextToText.from_pretrained(base)
    policy = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
    policy.save_pretrained(tmp_path / "adapter")
    args = parse("merge-lora", ["--model", str(base), "--adapters", str(tmp_path / "adapter")], {}).args
    merged = AutoModelForImageTextToText.from_pretrained(merge_adapter(args, tmp_path / "merged"))
    expected = policy.merge_and_unload().state_dict()
    found = merged.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)
    assert load_processor(tmp_path / "merged", merged.config, read_tokenizer(tmp_path / "merged"))
    assert getattr(merged.config, "tie_word_embeddings", False) == tied
