"""Presets: the values of papers, under everything the user writes."""

import json

import pytest
from command_lines import refused, rlhf

from swift.arguments import parse
from swift.arguments.help import render_flag
from swift.arguments.plugins import settings_class
from swift.cli.dry_run import show
from swift.flags import flags_of
from swift.plugin import presets


@pytest.mark.parametrize("name", presets)
def test_every_value_is_valid_has_a_source_and_belongs_to_the_objective(name):
    resolved, flags = rlhf("--preset", name), flags_of(settings_class("rlhf"))
    for setting, item in presets[name].values.items():
        flag = flags[setting]
        assert flag.group == "Objective"
        assert not flag.choices or item.value in flag.choices
        assert resolved.provenance[setting] == {
            "source": "preset",
            "given_as": f"preset {name}",
            "rule": f"{presets[name].title}, {presets[name].paper}, {item.where}",
        }
        value = getattr(resolved.args, setting)
        assert (value, type(value)) == (item.value, type(item.value))


def test_every_value_can_be_overridden_by_every_layer_wherever_the_preset_stands(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("preset: gspo\nepsilon: 0.001\nloss_type: grpo\n")
    resolved = rlhf(str(path), "--loss_type", "luspo")
    assert (resolved.args.epsilon, resolved.args.loss_type, resolved.args.epsilon_high) == (0.001, "luspo", 4e-4)
    sources = [resolved.provenance[name]["source"] for name in ("epsilon", "loss_type", "epsilon_high")]
    assert sources == ["file", "command line", "preset"]
    assert rlhf(str(path), "--preset", "dapo").args.epsilon_high == 0.28


def test_what_follows_from_other_settings_follows_from_those_of_the_preset():
    resolved = rlhf("--preset", "dr_grpo")
    assert resolved.args.epsilon_high == 0.2
    assert resolved.provenance["epsilon_high"]["rule"] == "= epsilon"
    assert rlhf("--preset", "gspo", "--epsilon_high", "none").args.epsilon_high == 3e-4


def test_two_names_of_one_choice_do_not_contradict_each_other():
    args = rlhf("--preset", "grpo", "--multi_objective_aggregation", "normalize_then_sum").args
    assert args.scale_rewards == "gdpo"
    assert rlhf("--preset", "gdpo", "--scale_rewards", "batch").args.multi_objective_aggregation == "sum_then_normalize"


def test_a_loss_brings_its_ratio_and_reward_functions_stay_as_given():
    args = rlhf("--preset", "dapo").args
    assert (args.importance_sampling_level, args.reward_funcs) == ("token", ["accuracy"])
    assert rlhf("--preset", "dapo", "--loss_type", "gspo").args.importance_sampling_level == "sequence"


def test_ranges_and_levels_of_a_loss_do_not_go_to_a_loss_of_another_kind():
    assert rlhf("--preset", "dapo", "--loss_type", "dr_grpo").args.epsilon_high == 0.28
    args = rlhf("--preset", "cispo", "--loss_type", "dapo").args
    assert (args.epsilon_high, args.dynamic_sample) == (0.2, True)
    args = rlhf("--preset", "gspo", "--loss_type", "dapo").args
    assert (args.epsilon, args.importance_sampling_level) == (0.2, "token")
    assert rlhf("--preset", "gspo", "--loss_type", "gspo").args.epsilon == 0.0003


def test_without_a_preset_nothing_changes():
    resolved = rlhf()
    assert resolved.preset_lines == rlhf("--preset", "none").preset_lines == []
    assert "preset" not in {origin["source"] for origin in resolved.provenance.values()}
    assert parse("sft", ["--model", "m", "--dataset", "d"], {}).preset_lines == []


def test_a_problem_with_a_value_of_the_preset_says_so():
    (line,) = refused("--preset", "gdpo", "--advantage_estimator", "rloo")
    assert line.startswith("--scale_rewards: gdpo: normalises each") and line.endswith(
        "(the value is that of preset gdpo)"
    )


def test_the_plan_has_a_line_with_values_sources_and_marks():
    line, beside = rlhf("--preset", "dapo", "--epsilon_high", "0.3", "--beta", "0").preset_lines
    assert line.startswith(
        "preset dapo (DAPO, arXiv:2503.14476): loss_type dapo (section 3.3), epsilon 0.2 (section 4.1)"
    )
    assert "epsilon_high 0.28 (section 4.1; OVERRIDDEN: 0.3 by --epsilon_high)" in line
    assert line.count("OVERRIDDEN") == 1, "the same value again is no other value"
    assert "dynamic_sample true (section 3.2)" in line
    assert beside.startswith("beside preset dapo: The final run has the reward soft_overlong too")


def test_the_dry_run_shows_where_a_value_comes_from(capsys):
    resolved = rlhf("--preset", "gspo")
    show(resolved, resolved.preset_lines)
    out = capsys.readouterr().out
    assert "(preset: GSPO, arXiv:2507.18071, section 5.1)" in out
    assert "preset gspo (GSPO, arXiv:2507.18071): loss_type gspo (equation 5)" in out


def test_args_json_holds_the_preset_and_repeats_the_run(tmp_path):
    first = rlhf("--preset", "cispo", "--epsilon_high", "4")
    path = tmp_path / "args.json"
    path.write_text(json.dumps(first.to_json()))
    assert first.to_json()["_provenance"]["dynamic_sample"]["source"] == "preset"
    assert parse("rlhf", [str(path)], {"CUDA_VISIBLE_DEVICES": ""}).args == first.args


def test_the_help_of_the_flag_lists_them():
    text = render_flag("rlhf", "preset")
    assert "gspo: GSPO, arXiv:2507.18071\n    --loss_type gspo" in text
    assert all(f"\n{name}: " in text for name in presets)
