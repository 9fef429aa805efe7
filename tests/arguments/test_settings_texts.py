"""Help, schema and page say what the fields say, and importing them stays cheap."""

import subprocess
import sys

import pytest

from swift.arguments import absent, docs, parse
from swift.arguments.common import GROUPS
from swift.arguments.derived import RULES
from swift.arguments.help import render, render_flag
from swift.arguments.known import is_known
from swift.arguments.modes import MODES
from swift.arguments.plugins import settings_class
from swift.errors import ConfigError
from swift.flags import flags_of, spellings_of


@pytest.mark.parametrize("mode", MODES)
def test_every_setting_is_described_and_belongs_to_a_group(mode):
    for flag in flags_of(settings_class(mode)).values():
        assert flag.help.endswith((".", "?")), flag.name
        assert flag.group in GROUPS


@pytest.mark.parametrize("mode", MODES)
def test_no_spelling_means_two_settings(mode):
    cls = settings_class(mode)
    assert not {alias for flag in flags_of(cls).values() for alias in flag.details.aliases} & set(flags_of(cls))
    assert len(spellings_of(cls)) == sum(len(flag.spellings) for flag in flags_of(cls).values())


def test_settings_are_not_listed_as_known_elsewhere():
    names = {spelling for cls in map(settings_class, MODES) for spelling in spellings_of(cls)}
    known = {
        "padding_free",
        "task_type",
        "use_chat_template",
        "truncation_strategy",
        "load_from_cache_file",
        "packing_strategy",
    }  # of one mode; in others a value changes nothing
    assert {name for name in names if is_known(name)} == known


def test_every_rule_is_about_a_setting_that_can_be_unset():
    flags = {name: flag for cls in map(settings_class, MODES) for name, flag in flags_of(cls).items()}
    assert all(flags[rule.name].optional and flags[rule.name].default is None for rule in RULES)


def test_the_page_is_current():
    assert docs.PAGE.read_text(encoding="utf-8") == docs.markdown(), "run: python -m swift.arguments.docs --write"
    assert docs.NOT_SUPPORTED.read_text(encoding="utf-8") == absent.page(), "the same command"


@pytest.mark.parametrize(
    ("command", "flag", "value"),
    [
        ("sft", "to_cached_dataset", "true"),
        ("sft", "eval_use_evalscope", "true"),
        ("sft", "tools_prompt", "react"),
        ("sft", "eval_delay", "3"),
        ("sft", "device_map", "auto"),
        ("rlhf --rlhf_type gkd --teacher_model m", "offload_teacher_model", "true"),
        ("sft", "hub_strategy", "checkpoint"),
        ("sft", "init_weights", "lora-ga"),
        ("rlhf --rlhf_type kto", "packing", "true"),
    ],
)
def test_what_is_refused_is_on_the_page_of_what_is_not_supported(command, flag, value):
    mode, *words = command.split()
    with pytest.raises(ConfigError, match=f"^--{flag}: {value}: "):
        parse(mode, [*words, "--model", "m", "--dataset", "d", f"--{flag}", value], {})
    assert any(shown in absent.page() for shown in (f"--{flag}`", f"--{flag} {value}`"))


def test_a_feature_that_is_here_is_on_no_list_of_what_is_not():
    classes = [settings_class(mode) for mode in MODES]
    assert not {spelling for cls in classes for spelling in spellings_of(cls)} & set(absent.flags())
    for feature in absent.FEATURES:
        assert feature.flags or feature.instead or feature.families or feature.values or feature.modes
        for name, values in feature.values.items():
            of_modes = [flags_of(cls)[name].choices for cls in classes if name in flags_of(cls)]
            assert of_modes and not set(values.split()) & {str(one) for choices in of_modes for one in choices}


def test_everyday_help_is_the_short_one_and_names_usable_flags_only():
    short, long = render("rlhf"), render("rlhf", everyday=False)
    assert "--num_generations INT" in short
    assert "--adam_beta2" not in short
    assert "--use_vllm" in short
    assert "--adam_beta2" in long
    assert [line for line in short.splitlines() if line in GROUPS] == [
        group
        for group in GROUPS
        if group not in ("Environments", "Asynchronous and data", "Energy-based fine-tuning", "Plugins")
    ]
    assert all(len(line) <= 110 for line in long.splitlines())


@pytest.mark.parametrize("spelling", ["tuner_type", "--train-type", "train_type"])
def test_help_of_a_flag_knows_every_spelling(spelling):
    text = render_flag("rlhf", spelling)
    assert text.startswith("--tuner_type TEXT\n")
    assert "aliases:    --train_type" in text


def test_help_of_a_flag_tells_range_default_and_what_it_needs():
    text = render_flag("rlhf", "vllm_gpu_memory_utilization")
    assert "default:    0.45 in colocate, else 0.9" in text
    assert "valid:      above 0 and at most 1" in text
    assert "acts with:  --use_vllm" in text
    assert "default:    = epsilon" in render_flag("rlhf", "epsilon_high")


def test_help_of_a_flag_that_does_not_exist():
    with pytest.raises(ConfigError, match="nearest: num_generations"):
        render_flag("rlhf", "num_generation")
    with pytest.raises(ConfigError) as caught:
        render_flag("rlhf", "foo")
    assert len(str(caught.value)) < 100
    assert "known in ms-swift, not supported here" in render_flag("rlhf", "vllm_quantization")


def test_choices_hold_every_schedule_of_transformers():
    from transformers.trainer_utils import SchedulerType

    assert {item.value for item in SchedulerType} <= set(flags_of(settings_class("rlhf"))["lr_scheduler_type"].choices)


def test_reading_settings_loads_no_heavy_package():
    code = (
        "import sys; from swift.arguments import parse; from swift.arguments.help import render; "
        "parse('infer', ['--model', 'm'], {}); render('rlhf'); "
        "print([name for name in ('torch', 'transformers', 'datasets', 'numpy', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
