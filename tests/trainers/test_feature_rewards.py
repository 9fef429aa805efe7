"""Structured EBFT in the trainer: rewards from features, references, lengths, and the cross-entropy term."""

import asyncio
import functools
import json
from types import SimpleNamespace

import pytest
import torch
from grpo_parts import Scorer, make_trainer, one_step, policy_of
from threaded_ranks import on_ranks
from transformers import AutoTokenizer

from swift.arguments import parse
from swift.arguments.ebft import FeatureArguments
from swift.cli.dry_run import dry_run_rlhf
from swift.data.arguments import PromptArguments
from swift.data.loading import Example
from swift.data.prompts import load_prompts
from swift.data.source import StreamingPrompts
from swift.errors import ConfigError
from swift.models.attention.choice import choose_attention
from swift.models.features import FeatureNetwork
from swift.models.forward import TokenSequence
from swift.models.reference import FrozenReference
from swift.models.template import load_template
from swift.plugin import Env, envs
from swift.rl.energy import cfm_loss, energy_advantages, energy_rewards, pooled_whitening, whiten
from swift.rollout.sources.multi_turn.trajectory import Limits, Trajectory
from swift.trainers.distributed import Collectives
from swift.trainers.ebft.references import References, ReferenceTokenizer
from swift.trainers.ebft.rewards import FeatureRewards
from swift.trainers.ebft.turns import play
from swift.types import Completion, GroupScores, Prompt, Request, RolloutGroup, SamplingParams

END = 262
TEMPLATE = SimpleNamespace(encode_text=lambda text: [ord(one) for one in text], stop_token_ids=(END,))
ANSWERS = [[65, 66, 67, END], [68], [69, 70], [71, 72, 73]]


def references(**settings):
    return References(TEMPLATE, **{"max_tokens": 256, **settings})


def prompt(text="ABCD", ids=(80, 81, 82)):
    return Prompt("p", [], list(ids), {"ground_truth": text})


def group(answers=ANSWERS, number=0, reasons=(), **columns):
    """A scored group whose completions ended for `reasons`, in order."""
    finish = [*reasons, *["stop"] * len(answers)]
    completions = [Completion(f"g{number}/{i}", ids, [-1.0] * len(ids), finish[i]) for i, ids in enumerate(answers)]
    scores = GroupScores([[] for _ in answers], [None] * len(answers))
    return RolloutGroup(f"g{number}", number, 0, prompt(**columns), completions, scores)


@pytest.fixture(scope="module")
def network(nano_folders):
    model = policy_of(nano_folders["qwen2"])
    choose_attention(model)
    return FeatureNetwork(FrozenReference(model), fractions=[0.5, 1.0], norm="concat", method="completion_mean")


def scorer(network, ranks=None, max_tokens=lambda: None, in_step=lambda: False, **settings):
    args = FeatureArguments(**{f"ebft_{name}": value for name, value in settings.items()})
    return FeatureRewards(network, references(), ranks or Collectives(), args, max_tokens=max_tokens, in_step=in_step)


def features(network, answers, text="ABCD", ids=(80, 81, 82)):
    """Of the reference and of answers, each from a pass of its own."""
    rows = [[ord(one) for one in text], *answers]
    return torch.cat([network.of_sequences([TokenSequence(list(ids), row)]) for row in rows]).double()


@pytest.mark.parametrize("whitening", ["none", "pooled", "group"])
def test_rewards_and_advantages_are_those_of_the_features(network, whitening):
    groups = [group(), group(number=1, text="xyz", ids=(90, 91))]
    metrics = scorer(network, whitening=whitening, diversity_coef=0.5, rl_coef=2.0).score(groups)
    plain = [[one if one[-1] != END else one[:-1] for one in ANSWERS]] * 2
    found = [features(network, plain[0]), features(network, plain[1], "xyz", (90, 91))]
    stars = torch.stack([one[0] for one in found])
    losses = []
    for one, rows in zip(groups, found, strict=True):
        phi, star, _ = whiten(rows[None, 1:], rows[:1], whitening, pooled_whitening(stars, 0.1))
        a, d = energy_rewards(phi, star)
        wanted = energy_advantages(a, d, alignment_coef=1.0, diversity_coef=0.5)
        assert [row[-1] for row in one.scores.values] == pytest.approx((a - 0.5 * d)[0].tolist(), abs=1e-4)
        assert one.scores.advantages == pytest.approx((2 * wanted)[0].tolist(), abs=1e-4)
        losses.append(float(cfm_loss(phi, star, a, d)))
    assert metrics["ebft/cfm_loss"] == pytest.approx(sum(losses) / 2, abs=1e-4)


def test_a_failed_sample_is_in_no_mean_and_a_reward_function_excludes_none(network):
    whole, failed = group(ANSWERS[1:]), group(reasons=["error"])
    failed.scores.excluded[2] = "no_reward"
    scorer(network).score([whole])
    scorer(network).score([failed])
    assert failed.scores.excluded == ["engine: error", None, None, None]
    assert failed.scores.values[0] == [None]
    assert failed.scores.advantages == pytest.approx([0.0, *whole.scores.advantages], abs=1e-6)


def test_a_group_without_a_sample_has_no_metrics(network):
    none = group(reasons=["error"] * 4)
    assert scorer(network).score([none]) == {"ebft/skipped_rows": 0.0}
    assert none.scores.advantages == [0.0] * 4


def test_more_passes_and_more_ranks_change_nothing(network):
    def groups():
        return [group(number=i, text="abcdef"[: i + 1], ids=range(80, 84 + i)) for i in range(3)]

    one = groups()
    whole = scorer(network, whitening="pooled").score(one)
    cut = groups()
    passes = scorer(network, whitening="pooled", max_tokens=lambda: 8).score(cut)

    def rank(ranks):
        mine = groups()
        found = scorer(network, ranks, whitening="pooled", in_step=lambda: True).score(mine)
        return found, [one.scores.advantages for one in mine]

    two = on_ranks(2, rank)
    for metrics, advantages in [(passes, [one.scores.advantages for one in cut]), *two]:
        assert metrics == pytest.approx(whole, abs=1e-5)
        for found, wanted in zip(advantages, one, strict=True):
            assert found == pytest.approx(wanted.scores.advantages, abs=1e-5)


# --- references -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "most", "limit"), [(10, 256, 64), (100, 256, 150), (300, 256, 256), (10, 32, 32)])
def test_the_length_of_a_completion_adapts_to_its_reference(length, most, limit):
    assert references(max_tokens=most, multiplier=1.5).max_new_tokens(prompt("a" * length)) == limit
    assert references(max_tokens=most).max_new_tokens(prompt("a" * length)) == most


def test_a_reference_is_tokenised_once_and_has_no_stop_token():
    calls = []

    def encode(text):
        calls.append(text)
        return [1, 2, END]

    made = References(SimpleNamespace(encode_text=encode, stop_token_ids=(END,)), 256)
    assert made.of(prompt("x")) == made.of(prompt("x", [5])) == [1, 2]
    assert calls == ["x"]
    assert made.without_stop([END]) == []
    assert made.without_stop([]) == []


def test_the_ids_of_a_stream_of_references_do_not_pile_up(monkeypatch):
    calls = []
    monkeypatch.setattr("swift.trainers.ebft.references.MOST_KEPT", 2)
    made = References(SimpleNamespace(encode_text=lambda text: calls.append(text) or [1], stop_token_ids=()), 256)
    for text in "aabbccaacc":
        assert made.of(prompt(text)) == [1]
    assert calls == ["a", "b", "c", "a"], "the oldest goes first"


@pytest.mark.parametrize(("value", "said"), [(None, "missing"), ("", "empty"), (["a"], "not a text")])
def test_a_row_without_a_reference_is_an_error(value, said):
    tokenizer = ReferenceTokenizer(list, references=references())
    with pytest.raises(ConfigError, match=rf"rows.jsonl:3: --dataset: ground_truth: .*{said}"):
        tokenizer.too_long(Example([], {"ground_truth": value}, "rows.jsonl:3"), [1])


def test_a_row_is_left_out_for_its_prompt_or_its_reference():
    tokenizer = ReferenceTokenizer(list, 3, references=references(max_tokens=5))
    assert tokenizer.deletes
    example = functools.partial(Example, [], origin="rows.jsonl:1")
    found = [
        tokenizer.too_long(example(columns={"ground_truth": "a" * n}), [0] * m) for n, m in [(5, 3), (6, 3), (5, 4)]
    ]
    assert found == [False, True, True]


def test_a_stream_leaves_them_out_too(tmp_path):
    """It used to cut their prompts and to keep their references."""
    rows = [{"prompt": "abcd", "ground_truth": "x"}, {"prompt": "a", "ground_truth": "x" * 6}]
    rows += [{"prompt": "a", "ground_truth": "x" * n} for n in (1, 2)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def ids(messages):
        return [ord(one) for one in messages[0]["content"]]

    tokenizer = ReferenceTokenizer(ids, 3, references=references(max_tokens=5))
    args = PromptArguments(dataset=[str(data)], streaming=True, dataset_shuffle=False)
    stream = StreamingPrompts(args, tokenizer)
    assert [stream.next().columns["ground_truth"] for _ in range(2)] == ["x", "xx"]
    assert stream.report.num_deleted == 2


@pytest.mark.parametrize(
    ("rows", "limit", "said"),
    [
        (
            [("a", 6), ("a", 9)],
            None,
            "--max_completion_length 5: 2 references longer, the shortest has 6 tokens; raise it",
        ),
        ([("abcd", 2)], 3, "--max_length 3: 1 prompt longer, the shortest has 4 tokens; raise it"),
        ([("abcd", 2), ("a", 6)], 3, "1 prompt longer, .*: 1 reference longer, the shortest has 2 tokens; raise it"),
    ],
)
def test_rows_that_are_all_left_out_are_an_error_that_says_what_to_raise(tmp_path, rows, limit, said):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": p, "ground_truth": "x" * n}) + "\n" for p, n in rows))
    tokenizer = ReferenceTokenizer(
        lambda chat: list(chat[0]["content"].encode()), limit, references=references(max_tokens=5)
    )
    with pytest.raises(ConfigError, match=f"--dataset: none of {len(rows)} rows? is left: .*{said}"):
        load_prompts(PromptArguments(dataset=[str(data)]), tokenizer)


CHAT = {
    "ground_truth": "one",
    "remaining_turns": [
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "and"},
        {"role": "assistant", "content": "three"},
    ],
}


def test_a_conversation_is_laid_out_as_its_samples_are(nano_folders):
    """Answers that are the row's own have the reference's ids, but for the last stop token."""
    template = load_template(AutoTokenizer.from_pretrained(nano_folders["qwen2"]))
    messages = [{"role": "user", "content": "count"}]
    row = Prompt("p", messages, template.encode_prompt(messages), CHAT)
    words = iter(["one", "two", "three"])

    async def sample(request):
        ids = [*template.encode_text(next(words)), template.stop_token_ids[0]]
        return Completion(request.request_id, ids, [-1.0] * len(ids), "stop")

    request = Request("g/0", row.token_ids, SamplingParams(64), row)
    trajectory = Trajectory(request, template, sample, Limits(8, "per_round", 512), [dict(messages[0])])
    asyncio.run(play(trajectory))
    done = trajectory.completion()
    made = References(template, 256)
    assert made.of(row) == made.without_stop(done.token_ids)
    assert made.of(row) != done.token_ids
    written = [
        own and token not in template.stop_token_ids for own, token in zip(done.mask, done.token_ids, strict=True)
    ]
    assert made.learnt(row) == written[:-1]
    assert template.decode([i for i, own in zip(made.of(row), made.learnt(row), strict=True) if own]) == "onetwothree"


@pytest.mark.parametrize(
    "turns", ["more", [{"role": "assistant", "content": "x"}], [{"role": "user", "content": "x"}], ["x", "y"]]
)
def test_turns_that_are_no_conversation_are_refused(turns):
    row = Prompt("p", [], [1], {"ground_truth": "a", "remaining_turns": turns})
    with pytest.raises(ConfigError, match=r"--dataset: remaining_turns: .*end with the assistant's"):
        references().of(row)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--gym_env x", "--gym_env: x: makes the completions, and rows have remaining_turns"),
        ("--multi_turn_scheduler math_tip_trick", "--multi_turn_scheduler: math_tip_trick: makes the completions"),
        ("--steps_per_generation 2 --per_device_train_batch_size 8", "--steps_per_generation: 2 optimizer steps per"),
    ],
)
def test_conversations_are_seen_wherever_they_stand(nano_folders, tmp_path, flags, said):
    """The first 64 rows have none; one that came later used to be answered once and compared with all its turns."""
    envs["x"] = Env
    rows = [{"prompt": "count", "ground_truth": "one"}] * 70 + [{"prompt": "count", **CHAT}]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = f"--rlhf_type ebft --model {nano_folders['qwen2']} --dataset {data} --dry_run true {flags}"
    with pytest.raises(ConfigError, match=said):
        dry_run_rlhf(parse("rlhf", words.split(), {"CUDA_VISIBLE_DEVICES": ""}))


def test_a_stream_whose_first_rows_have_no_turns_refuses_later_ones(nano_folders):
    made = References(load_template(AutoTokenizer.from_pretrained(nano_folders["qwen2"])), 256)
    made.of(prompt("a"))
    made.settle()
    assert made.conversations is False
    with pytest.raises(ConfigError, match="--dataset: remaining_turns: not in the first rows"):
        made.of(Prompt("p", [], [1], CHAT))


# --- the step -------------------------------------------------------------------------------------------------------


class NoRewards(Scorer):
    """Reward functions, of which there are none."""

    def submit_group(self, group, progress):
        future = super().submit_group(group, progress)
        future.result().values[:] = [[] for _ in group.completions]
        future.result().excluded[:] = [None] * len(group.completions)
        return future


def ebft_trainer(folder, output, network, *, ce_coef=0.0, rl_coef=1.0):
    trainer = make_trainer(folder, output, scorer=NoRewards(lambda *_: 0.0), ce_coef=ce_coef, rl_coef=rl_coef)
    for one in trainer.pipeline.scheduler.source.prompts:
        one.columns["ground_truth"] = "abc" * len(one.token_ids)
    trainer.pipeline.features = scorer(network, ce_coef=ce_coef, rl_coef=rl_coef)
    return trainer


def summed_logprobs(model, sequences):
    """Log-probs of the completions, from an ordinary pass of each."""
    found = []
    for start, rest in sequences:
        ids = torch.tensor([[*start, *rest]])
        logits = model(input_ids=ids).logits[0, len(start) - 1 : -1].log_softmax(-1)
        found.append(logits.gather(1, ids[0, len(start) :, None]).sum())
    return torch.stack(found)


@pytest.mark.parametrize(("ce_coef", "rl_coef"), [(0.0, 1.0), (0.3, 1.0), (0.3, 0.0)])
def test_the_gradient_is_reinforce_and_the_cross_entropy_of_references(
    nano_folders, tmp_path, network, ce_coef, rl_coef
):
    folder = nano_folders["qwen2"]
    trainer = ebft_trainer(folder, tmp_path, network, ce_coef=ce_coef, rl_coef=rl_coef)
    found = one_step(trainer).gradients
    batch = trainer.pipeline.batch
    plain = policy_of(folder)
    samples = [(one.prompt_ids.tolist(), one.token_ids.tolist()) for one in batch.samples]
    advantages = torch.tensor([one.advantage for one in batch.samples])
    loss = -(advantages * summed_logprobs(plain, samples)).sum() / sum(one.num_trained for one in batch.samples)
    if ce_coef:
        prompts = [trainer.rounds[0].groups[number].prompt for number in range(2)]
        learnt = [(one.token_ids, [ord(c) for c in one.columns["ground_truth"]]) for one in prompts]
        loss = loss - ce_coef * summed_logprobs(plain, learnt).sum() / sum(len(rest) for _, rest in learnt)
    loss.backward()
    assert bool(advantages.any()) == bool(rl_coef)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-6)


def test_what_is_logged(nano_folders, tmp_path, network):
    rows, weighted = [], []
    for rl_coef, found in ((1.0, rows), (0.25, weighted)):
        trainer = ebft_trainer(nano_folders["qwen2"], tmp_path, network, ce_coef=0.1, rl_coef=rl_coef)
        trainer.train()
        found += [row for row in trainer.state.log_history if "loss" in row]
    for name in ("ebft/rl_loss", "ebft/ce_loss"):
        assert weighted[0][name] == pytest.approx(rows[0][name], rel=1e-4), "without its coefficient"
    names = ["alignment", "diversity", "reward", "effective_reward", "cfm_loss", "advantages_std", "skipped_rows"]
    assert len(rows) == 2
    assert all({f"ebft/{name}" for name in [*names, "rl_loss", "ce_loss"]} <= row.keys() for row in rows)
    assert all(row["reward"] == pytest.approx(row["ebft/reward"]) for row in rows)
