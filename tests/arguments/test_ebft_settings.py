"""The settings of `swift rlhf --rlhf_type ebft`: names, blocks, and what is refused."""

import pytest
from command_lines import CPU, problems

from swift.arguments import parse

GOOD = "--rlhf_type ebft --model m --dataset d.jsonl"


def settings(words=""):
    return parse("rlhf", f"{GOOD} {words}".split(), CPU)


def test_no_reward_function_is_needed_and_no_kl():
    args = settings().args
    assert (args.ebft_mode, args.beta, args.loss_type, args.truncation_strategy) == (
        "structured",
        0.0,
        "dapo",
        "delete",
    )
    assert settings().mode == "ebft"
    assert settings().command == "rlhf"


@pytest.mark.parametrize(
    ("alias", "value"),
    [
        ("feature_layers", [0.5]),
        ("embed_method", "concat"),
        ("alignment_coef", 0.5),
        ("diversity_coef", 0.5),
        ("rl_coef", 0.5),
        ("ce_coef", 0.1),
        ("gt_length_multiplier", 2.0),
        ("adaptive_max_tokens", False),
    ],
)
def test_the_names_of_the_papers_code_are_aliases(alias, value):
    text = str(value[0] if isinstance(value, list) else value).lower()
    assert getattr(settings(f"--{alias} {text}").args, f"ebft_{alias}") == value


@pytest.mark.parametrize(("text", "value"), [("true", "pooled"), ("false", "none"), ("group", "group")])
def test_the_switch_of_whitening(text, value):
    assert settings(f"--use_whitening {text}").args.ebft_whitening == value
    assert settings(f"--ebft_use_whitening {text}").args.ebft_whitening == value


def test_a_block_of_a_config_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "rlhf_type: ebft\nmodel: m\ndataset: d.jsonl\n"
        "ebft:\n  mode: structured\n  feature_layers: [0.5, 1.0]\n  ebft_ce_coef: 0.03\n"
    )
    found = parse("rlhf", [str(file)], CPU)
    assert found.args.ebft_feature_layers == [0.5, 1.0]
    assert found.args.ebft_ce_coef == 0.03
    assert f"{file}:6" in found.provenance["ebft_feature_layers"]["given_as"]
    file.write_text("rlhf_type: ebft\nmodel: m\ndataset: d.jsonl\nebft:\n  ce_cof: 0.03\n")
    (line,) = problems("rlhf", str(file))
    assert "run.yaml:5: ebft_ce_cof: 0.03: unknown flag; nearest: ebft_ce_coef" in line


WRONG = [
    ("--ebft_feature_layers 0", "--ebft_feature_layers: 0: out of range"),
    ("--ebft_feature_layers 1.5", "--ebft_feature_layers: 1.5: out of range"),
    ("--ebft_embed_method mean", "--ebft_embed_method: mean: not a choice"),
    ("--ebft_whitening zca", "--ebft_whitening: zca: not a choice"),
    ("--ebft_whitening_shrinkage 0.2", "--ebft_whitening_shrinkage: 0.2: no effect without --ebft_whitening pooled"),
    ("--whitening pooled", "--whitening: pooled: unknown flag"),
    ("--ebft_alignment_coef -1", "--ebft_alignment_coef: -1: out of range"),
    ("--alignment_coef 0 --diversity_coef 0", "--ebft_alignment_coef: 0: with --ebft_diversity_coef 0 no sample"),
    ("--rl_coef 0", "--ebft_rl_coef: 0: with --ebft_ce_coef 0 there is no loss"),
    ("--stride 4", "--stride: 4: no effect without --ebft_mode strided"),
    ("--n_samples_per_prompt 4", "--n_samples_per_prompt: 4: no effect without --ebft_mode strided"),
    ("--ebft_temperature 0.6", "--ebft_temperature: 0.6: no effect without --ebft_mode strided"),
    ("--advantage_estimator rloo", "--advantage_estimator: rloo: not an option of swift rlhf --rlhf_type ebft"),
    ("--loss_type gspo", "--loss_type: gspo: not a choice"),
    ("--epsilon 0.1", "--epsilon: 0.1: not an option"),
    ("--epsilon_high 0.28", "--epsilon_high: 0.28: not an option"),
    ("--delta 4", "--delta: 4: not an option"),
    ("--importance_sampling_level sequence", "--importance_sampling_level: sequence: not an option"),
    ("--scale_rewards none", "--scale_rewards: none: not an option"),
    ("--beta 0.1 --kl_in_reward true", "--kl_in_reward: true: not an option"),
    ("--num_generations 1", "--num_generations: 1: the rewards of a prompt's completions are compared"),
    ("--teacher_model t", "--teacher_model: t: not an option"),
    ("--adaptive_max_tokens false --gt_length_multiplier 2", "--ebft_gt_length_multiplier: 2: no effect with"),
    ("--num_iterations 2", "--num_iterations: 2: not an option"),
    ("--dynamic_sample true", "--dynamic_sample: true: not an option"),
    ("--streaming_partial_batch true", "--streaming_partial_batch: true: not an option"),
    ("--truncation_strategy left", "--truncation_strategy: left: EBFT cuts no row"),
    ("--ebft_advantage_estimator grpo", "--ebft_advantage_estimator: grpo: not a choice"),
]


@pytest.mark.parametrize(("words", "said"), WRONG, ids=[words.split()[0] for words, _ in WRONG])
def test_wrong_settings(words, said):
    found = problems("rlhf", *f"{GOOD} {words}".split())
    assert any(said in one for one in found), found


def test_group_whitening_beside_a_weight_of_diversity_is_noted():
    assert any("--ebft_whitening: group" in note for note in settings("--ebft_whitening group").notes)
    assert not any("ebft_" in note for note in settings("--ebft_whitening group --diversity_coef 0").notes)
