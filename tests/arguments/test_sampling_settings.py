"""Guided decoding, further sampling settings, curricula and mixtures on the command line: what is refused and noted."""

from __future__ import annotations

import pytest
from command_lines import RLHF, refused, rlhf

from swift.arguments import parse
from swift.rollout.arguments import EXTRA_FIELDS, regex_problem

# --- generation_kwargs --------------------------------------------------------------------------------------


def test_entries_with_a_flag_become_its_value_wherever_it_is_read():
    resolved = rlhf("--generation_kwargs", '{"temperature": 0.7, "max_tokens": 99, "stop": ["X", "Y"], "top_k": 5}')
    args = resolved.args
    assert (args.temperature, args.max_completion_length, args.stop_words, args.top_k) == (0.7, 99, ["X", "Y"], 5)
    sampling = args.sampling_params()
    assert (sampling.temperature, sampling.max_new_tokens, sampling.stop, sampling.extra) == (0.7, 99, ("X", "Y"), {})
    assert resolved.provenance["temperature"]["rule"] == "from --generation_kwargs"


def test_an_entry_beats_its_flag_and_says_so():
    resolved = rlhf("--temperature", "1.2", "--generation_kwargs", '{"temperature": 0.7}')
    assert resolved.args.temperature == 0.7
    assert "--generation_kwargs: temperature: 0.7: beats --temperature" in resolved.notes


def test_entries_without_a_flag_reach_the_request():
    words = '{"presence_penalty": 0.5, "frequency_penalty": -1, "min_new_tokens": 4, "stop_token_ids": [3, 4]}'
    sampling = rlhf("--generation_kwargs", words).args.sampling_params()
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.min_tokens) == (0.5, -1, 4)
    assert sampling.stop_token_ids == (3, 4)
    assert sampling.truncates and sampling.penalises


def test_fields_of_an_engine_are_taken_for_that_engine_only():
    words = ["--generation_kwargs", '{"bad_words": ["x"]}']
    assert rlhf("--use_vllm", "true", *words).args.sampling_params().extra == {"bad_words": ["x"]}
    assert rlhf("--vllm_server_host", "h", *words).args.sampling_params().extra == {"bad_words": ["x"]}
    assert refused(*words)[0].startswith("--generation_kwargs: bad_words: the engine transformers has no such setting")


def test_two_names_of_one_setting_with_one_value_are_fine():
    assert rlhf("--generation_kwargs", '{"max_tokens": 5, "max_new_tokens": 5}').args.max_completion_length == 5


def test_what_vllm_takes_is_what_the_installed_one_has():
    from swift.errors import ResourceError
    from swift.rollout.engines.vllm import settings, versions

    try:
        vllm = versions.load_vllm()
    except ResourceError as error:
        pytest.skip(str(error))
    assert set(EXTRA_FIELDS["vllm"]) <= set(settings.sampling_fields(vllm))


# --- regular expressions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("regex", [r"\d+", "(a|b)*", r"[(?=]", r"\\b", r"\p{L}+", r"(?:ab)+", r"[\b]", r"\(\?=x"])
def test_expressions_that_an_automaton_can_walk_pass(regex):
    assert regex_problem(regex) == ""


def test_trls_spelling_is_the_same_setting():
    assert rlhf("--structured_outputs_regex", "a+").args.vllm_guided_decoding_regex == "a+"


@pytest.mark.parametrize(
    "words",
    [("--vllm_guided_decoding_regex", "a+"), ("--generation_kwargs", '{"min_tokens": 3}')],
)
def test_biased_sampling_is_noted_and_refused_for_sequence_ratios(words):
    assert any(note.startswith(words[0]) and "biases the gradient" in note for note in rlhf(*words).notes)
    (line,) = refused(*words, "--rollout_importance_sampling_mode", "sequence_mask")
    assert line.startswith("--rollout_importance_sampling_mode: sequence_mask")
    assert words[0] in line


COMPARED = [
    ("--off_policy_sequence_mask_delta", "0.5"),
    ("--old_logprobs", "sampler"),
    ("--replay_buffer_size", "4", "--replay_recompute_logps", "false"),
]


@pytest.mark.parametrize("words", COMPARED, ids=lambda words: words[0])
def test_truncated_sampling_is_compared_only_where_the_engine_knows_the_kept_mass(words):
    (line,) = refused("--use_vllm", "true", "--top_k", "20", *words)
    assert line.startswith(words[-2]) and "with --top_k 20" in line
    (line,) = refused("--repetition_penalty", "1.1", *words)
    assert line.startswith(words[-2]) and "with --repetition_penalty 1.1" in line
    assert rlhf("--top_k", "20", *words).args.changed_logprobs() == []


def test_truncated_sampling_is_noted_with_what_the_engine_knows():
    (note,) = [note for note in rlhf("--top_p", "0.9").notes if note.startswith("--top_p: 0.9")]
    assert "biases the gradient" in note and "it compares" in note
    (note,) = [note for note in rlhf("--top_p", "0.9", "--use_vllm", "true").notes if note.startswith("--top_p: 0.9")]
    assert "biases the gradient" in note and "it cannot compare" in note


def test_neutral_entries_are_not_called_biased():
    resolved = rlhf("--generation_kwargs", '{"presence_penalty": 0, "stop_token_ids": [3]}')
    assert not resolved.args.sampling_params().penalises
    assert not [note for note in resolved.notes if "biases" in note]


# --- the rest -----------------------------------------------------------------------------------------------


def test_settings_that_need_another_one_say_so():
    notes = rlhf("--stopping_strategy", "all_exhausted", "--curriculum_bins", "3", "--log_unique_prompts", "true").notes
    assert [note.partition(":")[0] for note in notes if "no effect without" in note] == [
        "--stopping_strategy", "--curriculum_bins", "--log_unique_prompts"
    ]  # fmt: skip


def test_a_rollout_function_goes_with_weights_that_every_rank_holds_whole():
    assert rlhf("--rollout_func", "f.py:g", "--deepspeed", "zero2").args.rollout_func == "f.py:g"


@pytest.mark.parametrize("words", ['--chat_template_kwargs {"enable_thinking":false}', "--enable_thinking false"])
@pytest.mark.parametrize("mode", ["sft", "infer", "rollout", "rlhf"])
def test_the_chat_templates_variables_are_a_setting_of_every_mode_that_renders(mode, words):
    words = ["--model", "m", *words.split()]
    words += {"sft": ["--dataset", "d"], "rlhf": RLHF[:2] + RLHF[4:]}.get(mode, [])
    assert parse(mode, words, {}).args.chat_template_kwargs == {"enable_thinking": False}
