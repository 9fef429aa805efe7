"""Wrong inputs of the preference methods, end to end through `main`: see test_wrong_inputs.py."""

import pytest
from desk import refused_without_a_trace
from trl_runs import sums, verdicts

PAIRS = list(sums(6))
LABELS = list(verdicts(6))


def method(name, words="", rows=PAIRS):
    """A command of a method on these rows, right but for the words."""

    def command(desk):
        data = desk.rows(rows, "pairs.jsonl")
        shared = ["--model", desk.model, "--dataset", data, "--output_dir", desk.output, "--max_steps", 1]
        given = words.split()
        return ["rlhf", "--rlhf_type", name, *(w for w in shared if "--dataset" not in given or w != data), *given]

    return command


def with_answers(**columns):
    return [{**PAIRS[0], **columns}]


TABLE = {
    "flag of another method": (
        method("dpo", "--simpo_gamma 0.5"),
        "--simpo_gamma: 0.5: not a flag of swift rlhf --rlhf_type dpo; a flag of: rlhf --rlhf_type cpo",
    ),
    "flag of grpo": (
        method("dpo", "--num_generations 4"),
        "--num_generations: 4: not a flag of swift rlhf --rlhf_type",
    ),
    "a treatment of long rows": (
        method("dpo", "--truncation_strategy left"),
        "--truncation_strategy: left: not a flag of swift rlhf --rlhf_type dpo; a flag of: rlhf,",
    ),
    "reference without one": (method("simpo", "--ref_model x"), "--ref_model: x: not a flag of | a flag of: rlhf,"),
    "unknown flag": (method("dpo", "--bata 0.1"), "--bata: 0.1: unknown flag; nearest: beta"),
    "beta of zero": (method("ipo", "--beta 0"), "--beta: 0: | above 0"),
    "unknown loss": (method("dpo", "--loss_type sigmod"), "--loss_type: sigmod: | sigmoid"),
    "loss of another method": (method("kto", "--loss_type sigmoid"), "--loss_type: sigmoid: | kto, apo_zero_unpaired"),
    "weights that do not fit": (
        method("dpo", "--loss_type sigmoid sft --loss_weights 1"),
        "--loss_weights: 1: 1 for --loss_type sigmoid sft; give one each",
    ),
    "smoothing without a loss for it": (
        method("dpo", "--label_smoothing 0.1"),
        "--label_smoothing: 0.1: --loss_type sigmoid has none; use --loss_type robust",
    ),
    "exo_pair without smoothing": (
        method("dpo", "--loss_type exo_pair"),
        "--loss_type: exo_pair: needs --label_smooth",
    ),
    "divergence of a loss without": (
        method("dpo", "--loss_type apo_zero --f_divergence_type forward_kl"),
        "--f_divergence_type: forward_kl: not defined for --loss_type apo_zero",
    ),
    "sft twice": (method("dpo", "--loss_type sigmoid sft --rpo_alpha 1"), "--rpo_alpha: adds the loss sft"),
    "weighting of sorted pairs": (method("dpo", "--loss_type aot --use_weighting"), "--use_weighting: true: | aot"),
    "reference that moves without weights": (method("dpo", "--sync_ref_model"), "--sync_ref_model: true: | full"),
    "moving and precomputed": (
        method("dpo", "--tuner_type full --sync_ref_model --precompute_ref_log_probs"),
        "--precompute_ref_log_probs: true: | --sync_ref_model",
    ),
    "one row for the KL": (
        method("kto", "--per_device_train_batch_size 1 --gradient_accumulation_steps 1", LABELS),
        "--per_device_train_batch_size: 1: the KL term of kto pairs rows, and there is one in a step",
    ),
    "smoothing of hinge": (method("cpo", "--loss_type hinge --label_smoothing 0.1"), "--label_smoothing: 0.1: | hinge"),
    "pairs for kto without rejected": (
        method("kto", rows=[{"prompt": "q", "completion": "a"}]),
        "none is a rejected answer",
    ),
    "labels for dpo": (method("dpo", rows=LABELS), "--dataset: | none is a rejected answer"),
    "label that is text": (
        method("kto", rows=[{**LABELS[0], "label": "good"}]),
        "pairs.jsonl:1: label must be true or false",
    ),
    "equal answers": (
        method("rm", rows=with_answers(rejected=PAIRS[0]["chosen"])),
        "pairs.jsonl:1: rejected 1 is the chosen answer",
    ),
    "margin that is text": (method("rm", rows=with_answers(margin="big")), "margin must be a number, not 'big'"),
    "every row too long": (
        method("orpo", "--max_length 4"),
        "--dataset: no usable row | 6 of them: longer than max_length (--max_length 4); the first: | pairs.jsonl:1",
    ),
    "stream to precompute": (
        method("dpo", "--streaming --max_steps 2 --precompute_ref_log_probs"),
        "--precompute_ref_log_probs: true: a stream",
    ),
    "stream without end": (method("rm", "--streaming --max_steps -1"), "--max_steps: -1: a stream has no known end"),
    "tools that nobody sees": (
        method("simpo", "--strict", with_answers(tools=[{"type": "function", "function": {"name": "f"}}])),
        "pairs.jsonl:1: | the chat template shows no tool",
    ),
    "no such reference": (method("dpo", "--ref_model ./nothing"), "--ref_model: ./nothing: no such folder"),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_wrong_input_is_told_in_lines_and_leaves_nothing(name, desk, capfd):
    refused_without_a_trace(desk, TABLE[name], capfd)
