"""Plugins of reward models, written as for ms-swift: classes that get a model and its template, and judges."""

from types import SimpleNamespace

import pytest
import torch
from refusals import problems_of

from swift.errors import RewardError
from swift.infer_engine import InferRequest, RequestConfig, TransformersEngine
from swift.models.template import Template as ChatTemplate
from swift.models.tiny import build_tiny
from swift.models.tokenizer import read_tokenizer
from swift.plugin import rm_plugins
from swift.rewards.model_files import find_reward_models
from swift.rewards.models import open_reward_models
from swift.rewards.rm_plugin import DefaultRMPlugin, GenRMPlugin
from swift.template import Template


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("models") / "scorer", size="nano", seed=3, reward_model=True)


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("models") / "writer", size="nano", seed=3)


def settings(folder, plugin):
    values = {"torch_dtype": "float32", "use_hf": False, "trust_remote_code": False, "external_plugins": []}
    values |= {"reward_model": [str(folder)], "reward_model_revision": [], "reward_adapters": []}
    return SimpleNamespace(**values, reward_model_plugin=[plugin] if plugin else [])


def scores(folder, plugin, groups):
    args = settings(folder, plugin)
    models = open_reward_models(args)
    models.load(args, "cpu")
    return models.score(groups)


def test_a_plugin_scores_with_the_model_and_its_template(scorer, group):
    rm_plugins["plain"] = DefaultRMPlugin
    groups = [group(["an answer", "a much longer answer than that"]), group(["no"], group_id="g1")]
    own, plain = scores(scorer, None, groups), scores(scorer, "plain", groups)
    for one, other in zip(own, plain, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), atol=1e-5, rtol=0)


def test_a_plugin_gets_the_columns_and_the_whole_conversation(writer, group):
    seen = []

    class Reads:
        def __init__(self, model, template):
            self.model = model

        def __call__(self, inputs, **kwargs):
            seen.extend(inputs)
            return [float(row["gold"] == row["messages"][-1]["content"]) or None for row in inputs]

    rm_plugins["reads"] = Reads
    assert scores(writer, "reads", [group(["5", "6"], gold="5")]) == [[[1.0], [None]]]
    assert seen[0]["messages"] == [{"role": "user", "content": "question"}, {"role": "assistant", "content": "5"}]


@pytest.mark.parametrize(
    ("returned", "line"),
    [(ZeroDivisionError("no"), "raises: ZeroDivisionError: no"), ([1.0], "raises: ContractBroken: returned 1 value")],
)
def test_a_plugin_that_fails_ends_the_run_with_a_line(writer, group, returned, line):
    class Raises(DefaultRMPlugin):
        def __call__(self, inputs, **kwargs):
            if isinstance(returned, Exception):
                raise returned
            return returned

    rm_plugins["raises"] = Raises
    with pytest.raises(RewardError, match=f"--reward_model_plugin: {line}"):
        scores(writer, "raises", [group(["5", "6"])])


def test_names_and_heads_are_checked_before_weights_are_loaded(scorer, writer):
    (unknown,) = problems_of(find_reward_models, settings(scorer, "genmr"))
    assert unknown.startswith("--reward_model_plugin: genmr: no plugin has registered it;") and "genrm" in unknown
    (headless,) = problems_of(find_reward_models, settings(writer, None))
    assert "--reward_model_plugin genrm" in headless
    assert find_reward_models(settings(writer, "genrm"))[0].plugin == "genrm"


# --- judges ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(writer):
    from transformers import AutoModelForCausalLM

    template = Template(ChatTemplate(read_tokenizer(writer, trust_remote_code=False)))
    return TransformersEngine(AutoModelForCausalLM.from_pretrained(writer).eval(), template=template, max_batch_size=2)


CHATS = [[{"role": "user", "content": text}] for text in ("2 + 3?", "Is this a longer question?", "no")]
CHATS_AS_ROWS = [{"messages": CHATS[0]}, InferRequest(CHATS[1]), {"messages": CHATS[2]}]


def test_a_batch_is_answered_as_each_chat_alone(engine):
    config = RequestConfig(max_tokens=6, temperature=0)
    together = engine.infer(CHATS_AS_ROWS, config)
    for chat, response in zip(CHATS, together, strict=True):
        ids = torch.tensor([engine.template.chat.encode_prompt(chat)])
        plain = engine.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
        (choice,) = response.choices
        assert choice.token_ids == plain[0, ids.shape[1] :].tolist()[: len(choice.token_ids)]
        assert choice.message.content == engine.template.chat.decode(choice.token_ids)
        assert choice.finish_reason in ("stop", "length")


def test_sampled_answers_repeat_and_leave_the_generators_of_the_run_alone(engine):
    config = RequestConfig(max_tokens=6, temperature=1.0, n=3)
    before = torch.random.get_rng_state()
    first, second = engine.infer(CHATS_AS_ROWS, config), engine.infer(CHATS_AS_ROWS, config)
    assert torch.equal(before, torch.random.get_rng_state())
    assert first == second
    assert all(len(response.choices) == 3 for response in first)
    assert len({tuple(choice.token_ids) for choice in first[0].choices}) > 1
    other = engine.infer(CHATS_AS_ROWS, RequestConfig(max_tokens=6, temperature=1.0, n=3, seed=1))
    assert first != other


def test_a_chat_beyond_the_context_has_no_answer(engine):
    chat = [{"role": "user", "content": "many words " * 4000}]
    (response,) = engine.infer([{"messages": chat}])
    assert [(choice.message.content, choice.finish_reason) for choice in response.choices] == [("", "length")]


def test_the_judge_reads_the_conversation_and_its_score_is_found(engine, group):
    judge = GenRMPlugin(engine.model, engine.template)
    asked = judge.prepare_rm_inputs([{"messages": [*CHATS[0], {"role": "assistant", "content": "5"}], "gold": "5"}])
    assert asked[0]["messages"][1]["content"] == "User: 2 + 3?\nAssistant: 5"
    assert asked[0]["gold"] == "5"
    texts = {"Good.\n\nReward: 0.85": 0.85, "Reward: 0\nno, Reward: 1": 1.0, "Reward: 7": None, "well": None}
    assert [judge.extract_reward(text) for text in texts] == list(texts.values())
    answer = SimpleNamespace
    choices = [answer(message=answer(content=text)) for text in ("Reward: 0.5", "Reward: 1.0", "?")]
    assert judge.compute_rewards([answer(choices=choices), answer(choices=choices[2:])]) == [0.75, None]


def test_a_judge_without_a_readable_score_gives_none(writer, group):
    """The tiny model writes nothing that reads as a score."""
    assert scores(writer, "genrm", [group(["5"])]) == [[[None]]]
