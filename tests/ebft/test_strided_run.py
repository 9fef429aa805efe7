"""`swift rlhf --rlhf_type ebft --ebft_mode strided` from its flags to its folder."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoModelForCausalLM
from trl_runs import assert_resumes_exactly, in_two, rows, trained, untimed, weights, written

from swift.arguments import parse
from swift.cli.dry_run import dry_run_trl
from swift.errors import ConfigError
from swift.rl.energy import energy_advantages, energy_rewards
from swift.trainers.checkpoint import list_checkpoints
from swift.trainers.ebft.strided import METRICS


def strided(argv) -> Path:
    """Runs the mode in this process; the run's folder."""
    resolved = parse("rlhf", argv, {})
    assert resolved.mode == "ebft_strided"
    return trained(resolved)


def test_a_run_logs_its_metrics_and_both_losses(strided_argv):
    run_dir = strided(strided_argv())
    lines = untimed(run_dir)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert set(METRICS) <= line.keys()
        parts = line["ebft/rl_loss"] + 0.1 * line["ebft/ce_loss"]
        assert line["loss"] == pytest.approx(parts, abs=1e-4), "each is a mean over the tokens of the global batch"
        energy = 1 - 2 * line["ebft/alignment"] + line["ebft/diversity"]
        assert line["ebft/cfm_loss"] == pytest.approx(energy, abs=1e-5)
    assert [path.name for path in list_checkpoints(run_dir)] == ["checkpoint-4"]
    assert (run_dir / "images").is_dir()


def test_a_step_follows_the_gradient_that_ordinary_passes_give(strided_argv, nano_folders, monkeypatch):
    """Two micro-batches, one step of plain gradient descent, against REINFORCE and cross-entropy by hand."""
    from swift.trainers.ebft import strided as module

    drawn, original = [], module.sample_blocks

    def noted(model, ids, stream, *rest, **more):
        tokens = original(model, ids, stream, *rest, **more)
        drawn.append((ids, stream, tokens))
        return tokens

    monkeypatch.setattr(module, "sample_blocks", noted)
    descent = "--optim sgd --weight_decay 0 --learning_rate 1 --lr_scheduler_type constant --max_grad_norm 0"
    batch = "--max_steps 1 --per_device_train_batch_size 2 --gradient_accumulation_steps 2"
    loss = "--ebft_rl_coef 0.5 --ebft_ce_coef 0.3 --ebft_n_samples_per_prompt 3"
    after = weights(strided(strided_argv(descent, batch, loss)) / "checkpoint-1")
    plain = AutoModelForCausalLM.from_pretrained(nano_folders["qwen2"], dtype=torch.float32).eval()

    def last_feature(ids):
        with torch.no_grad():
            states = plain(input_ids=ids[None], output_hidden_states=True).hidden_states
        return normalize(torch.cat([states[1][0, -1], states[2][0, -1]]), dim=0)

    reinforce = entropy = num_sampled = num_targets = 0
    for ids, stream, tokens in drawn:
        documents = ids.split(stream.lengths)
        for one in documents:
            entropy = entropy + cross_entropy(plain(input_ids=one[None]).logits[0, :-1], one[1:], reduction="sum")
            num_targets += len(one) - 1
        num_sampled += tokens.numel()
        for first in range(0, len(stream.columns), 3):
            document, anchor = stream.columns[first]
            prefix = documents[document][:anchor]
            rows = [torch.cat([prefix, tokens[:, first + sample]]) for sample in range(3)]
            star = last_feature(documents[document][: anchor + 4])
            a, d = energy_rewards(torch.stack([last_feature(row) for row in rows])[None], star[None])
            advantages = energy_advantages(a, d, alignment_coef=1.0, diversity_coef=1.0)[0]
            for row, advantage in zip(rows, advantages, strict=True):
                logits = plain(input_ids=row[None]).logits[0, anchor - 1 : -1] / 0.6
                reinforce = reinforce + advantage * cross_entropy(logits, row[anchor:], reduction="sum")
    (0.5 * reinforce / num_sampled + 0.3 * entropy / num_targets).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(parameter.detach() - after[name], parameter.grad, rtol=2e-3, atol=2e-6)


@pytest.mark.parametrize("whitening", ["pooled", pytest.param("group", marks=pytest.mark.long)])
def test_gradient_accumulation_equals_a_larger_batch(strided_argv, whitening):
    flags = ("--ebft_whitening", whitening, "--ebft_advantage_estimator reinforce")
    once = strided(strided_argv(flags, "--per_device_train_batch_size 4"))
    parts = "--per_device_train_batch_size 1 --gradient_accumulation_steps 4"
    twice = strided(strided_argv(flags, parts, "--gradient_checkpointing true"))
    for line in (lines := (untimed(once), untimed(twice)))[0] + lines[1]:
        line.pop("ebft/advantages_std")  # of a micro-batch
        assert ("ebft/rank_deficient_frac" in line) and line["ebft/rank_deficient_frac"] <= 1
    for ours, theirs in zip(*lines, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("tuner", [pytest.param("full", marks=pytest.mark.long), "lora"])
def test_a_resumed_run_ends_with_the_weights_and_logs_of_an_uninterrupted_one(strided_argv, tuner):
    argv = strided_argv("--ebft_whitening pooled", tuner=tuner)
    assert_resumes_exactly(lambda *flags: parse("rlhf", [*argv, *flags], {}))


def test_cross_entropy_alone_samples_in_evaluation_only(strided_argv, texts, monkeypatch):
    from swift.trainers.ebft import strided as module

    calls = []
    original = module.sample_blocks
    monkeypatch.setattr(module, "sample_blocks", lambda *a, **k: calls.append(a) or original(*a, **k))
    argv = strided_argv(
        f"--ebft_rl_coef 0 --ebft_ce_coef 1 --val_dataset {texts}#4 --eval_steps 2",
        "--save_steps 2 --load_best_model_at_end true --per_device_eval_batch_size 2",
    )
    lines = untimed(strided(argv))
    assert len(calls) == 4, "two batches of two evaluations"
    assert "ebft/cfm_loss" not in lines[0] and lines[0]["loss"] == pytest.approx(lines[0]["ebft/ce_loss"], abs=1e-5)
    evaluations = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [2, 4]
    assert {f"eval_{name}" for name in METRICS} <= evaluations[0].keys()


def test_an_evaluation_is_that_of_its_tokens_at_any_step_and_however_it_is_cut(strided_argv, texts, tmp_path):
    """Batches of other sizes, of which the last holds one document, and weights that do not move."""
    flags = f"--val_dataset {texts}#5 --eval_steps 1 --learning_rate 1e-12"
    found = []
    for size, steps in (("2", "2"), ("5", "1")):
        own = ("--per_device_eval_batch_size", size, "--max_steps", steps, f"--output_dir {tmp_path / size}")
        found += [line for line in untimed(strided(strided_argv(flags, own))) if "eval_loss" in line]
    for line in found:
        for name in ("step", "max_steps", "epoch", "eval_ebft/advantages_std"):  # the deviation is of a batch
            line.pop(name, None)
    first, second, other = found
    assert first["eval_loss"] == pytest.approx(first["eval_ebft/rl_loss"] + 0.1 * first["eval_ebft/ce_loss"])
    assert first == pytest.approx(second, abs=1e-5) and first == pytest.approx(other, abs=1e-5)


def test_several_evaluation_sets_have_metrics_of_their_own(strided_argv, texts, tmp_path):
    other = written(tmp_path / "other.jsonl", rows(texts)[:3])
    lines = untimed(strided([*strided_argv("--eval_steps 4"), "--val_dataset", f"{texts}#4", str(other)]))
    for name in ("texts", "other"):
        (found,) = [line for line in lines if f"eval_{name}_loss" in line]
        assert {f"eval_{name}_{metric}" for metric in METRICS} <= found.keys()


@pytest.mark.long
def test_weights_of_16_bits_and_other_pooling_and_truncated_samples(strided_argv):
    """Everything that the other runs leave at its default, at once."""
    own = "--torch_dtype bfloat16 --ebft_embed_method concat --ebft_feature_norm per_layer"
    own += " --ebft_top_p 0.9 --ebft_advantage_estimator group_norm --ebft_alignment_coef 0.5"
    lines = untimed(strided(strided_argv(own, tuner="lora")))
    for line in lines:
        assert line["grad_norm"] > 0 and abs(line["ebft/alignment"]) <= 1
        assert line["ebft/effective_reward"] == pytest.approx(line["ebft/alignment"] - line["ebft/diversity"], abs=1e-5)


def test_a_dry_run_counts_documents_and_blocks_and_writes_nothing(strided_argv, tmp_path, capsys):
    data = tmp_path / "mixed.jsonl"
    data.write_text("".join(json.dumps({"text": "x" * n}) + "\n" for n in (30, 5, 45)))
    flags = f"--dataset {data} --max_length 40 --dry_run true"
    assert dry_run_trl(parse("rlhf", strided_argv(flags), {})) == 0
    printed = capsys.readouterr().out
    assert "train: 2 rows, 70 tokens, 70 of them trained on" in printed and "train: 7 blocks" in printed
    assert "train: left out 2 rows: 2 (no block fits behind the context" in printed, "a short text and a rest of 5"
    assert not (tmp_path / "out").exists()


WRONG = {
    "a setting of rollouts": ("--num_generations 4", "--num_generations: 4: not a flag of .*strided"),
    "an engine": ("--use_vllm true", "--use_vllm: true: not a flag of"),
    "a reward": ("--reward_funcs accuracy", "--reward_funcs: accuracy: not a flag of"),
    "asynchronous": ("--async_generate true", "--async_generate: true: not a flag of"),
    "an option of structured mode": ("--ebft_gt_length_multiplier 2", "--ebft_gt_length_multiplier: 2"),
    "no stride": ("--ebft_stride 0", "--ebft_stride: 0"),
    "no context": ("--ebft_context_length 0", "--ebft_context_length: 0"),
    "no block": ("--ebft_generate_max_len 0", "--ebft_generate_max_len: 0"),
    "greedy samples": ("--ebft_temperature 0", "--ebft_temperature: 0"),
    "a nucleus above 1": ("--ebft_top_p 1.5", "--ebft_top_p: 1.5"),
    "no loss": ("--ebft_rl_coef 0 --ebft_ce_coef 0", "--ebft_rl_coef: 0"),
    "diversity of one": ("--ebft_n_samples_per_prompt 1", "--ebft_n_samples_per_prompt: 1"),
    "documents shorter than a block": ("--max_length 11", "--max_length: 11: no block fits"),
    "a transform of prompts": ("--dataset_transform opencode", "--dataset_transform: opencode"),
    "half precision": ("--torch_dtype float16", "--torch_dtype: float16"),
}


@pytest.mark.parametrize(("flags", "said"), WRONG.values(), ids=WRONG)
def test_wrong_settings_are_refused_before_anything_is_loaded(strided_argv, flags, said):
    with pytest.raises(ConfigError, match=said):
        parse("rlhf", strided_argv(flags), {})


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"text": "short"}], "--dataset: no usable row .*: no block fits"),
        ([{"title": "x"}], "none of input, prompt"),
    ],
)
def test_data_without_documents_is_refused(strided_argv, tmp_path, rows, said):
    data = tmp_path / "wrong.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=said):
        strided(strided_argv(f"--dataset {data}"))


def test_a_model_that_cannot_be_packed_is_refused(strided_argv, small_model, nano_folders, tmp_path, monkeypatch):
    from swift.models.attention import choice

    monkeypatch.setattr(choice, "packing_obstacle", lambda model: "no rotary positions")
    with pytest.raises(ConfigError, match=r"--model: .*no rotary positions: .*--ebft_mode structured"):
        strided(strided_argv())
    assert not (tmp_path / "out").exists()


def test_chats_need_a_template(strided_argv, tmp_path, monkeypatch):
    from swift.models import load_chat as load

    def without(args, **more):
        template = load(args, **more)
        template.tokenizer.chat_template = None
        return template

    monkeypatch.setattr("swift.models.load_chat", without)
    data = tmp_path / "chats.jsonl"
    data.write_text(json.dumps({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}))
    with pytest.raises(ConfigError, match="--template: missing"):
        strided(strided_argv(f"--dataset {data}"))


def test_names_of_the_seed_and_a_block_of_yaml_choose_the_mode(strided_argv, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(
        "rlhf_type: ebft\nebft:\n  mode: strided\n  stride: 2\n  context_length: 4\n  n_samples_per_prompt: 2\n"
    )
    argv = strided_argv()
    del argv[:4]  # the method and the mode
    argv[argv.index("--ebft_generate_max_len")] = "--generate_max_len"
    resolved = parse("rlhf", [*argv, "--config", str(config)], {})
    args = resolved.args
    assert resolved.mode == "ebft_strided"
    assert (args.ebft_stride, args.ebft_context_length, args.ebft_n_samples_per_prompt) == (2, 4, 2)
    assert args.ebft_generate_max_len == 4


@pytest.mark.long
@pytest.mark.parametrize("documents", [1, 3])
def test_two_processes_train_the_model_that_one_does(strided_argv, tmp_path, texts, documents):
    """And evaluate the same documents, of which one of them has fewer."""
    whitened = f"--ebft_whitening pooled --val_dataset {texts}#{documents} --eval_steps 2"
    alone = strided(strided_argv(whitened, f"--per_device_eval_batch_size 4 --output_dir {tmp_path / 'one'}"))
    batches = "--per_device_train_batch_size 2 --per_device_eval_batch_size 2"
    together = in_two(parse("rlhf", strided_argv(whitened, batches, f"--output_dir {tmp_path / 'two'}"), {}))
    lines = [untimed(alone), untimed(together)]
    for ours, theirs in zip(*lines, strict=True):
        for line in (ours, theirs):
            for name in ("ebft/advantages_std", "eval_ebft/advantages_std"):  # of a micro-batch
                line.pop(name, None)
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    ours, theirs = (weights(path / "checkpoint-4") for path in (alone, together))
    assert all(torch.allclose(ours[name], theirs[name], atol=5e-4) for name in ours)


@pytest.mark.long
@pytest.mark.parametrize("tuner", ["full", "lora"])
@pytest.mark.parametrize("sharding", ["--fsdp full_shard", "--deepspeed zero3"], ids=["fsdp2", "zero3"])
def test_sharded_processes_train_the_model_that_one_does(strided_argv, tmp_path, tuner, sharding):
    alone = strided(strided_argv(f"--output_dir {tmp_path / 'one'}", tuner=tuner))
    flags = (sharding, f"--per_device_train_batch_size 2 --output_dir {tmp_path / 'two'}")
    together = in_two(parse("rlhf", strided_argv(flags, tuner=tuner), {}))
    for ours, theirs in zip(untimed(alone), untimed(together), strict=True):
        assert ours["ebft/cfm_loss"] == pytest.approx(theirs["ebft/cfm_loss"], rel=2e-2, abs=1e-3)
        assert ours["ebft/ce_loss"] == pytest.approx(theirs["ebft/ce_loss"], rel=1e-3)
