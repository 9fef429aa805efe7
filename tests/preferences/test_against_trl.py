"""The first step of each method is that of TRL's own trainer on the same rows."""

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from oracle import first_step
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl_runs import sums, trainer_of

from swift.trainers.session import SAME_IN_TRANSFORMERS
from swift.trainers.trl.method import method_of

TRL = {
    "dpo": (DPOTrainer, DPOConfig, {}),
    "mpo": (DPOTrainer, DPOConfig, {"loss_type": ["sigmoid", "aot", "sft"], "loss_weights": [0.8, 0.2, 0.5]}),
    "ld": (DPOTrainer, DPOConfig, {"ld_alpha": 0.3, "f_divergence_type": "js_divergence"}),
    "ipo": (DPOTrainer, DPOConfig, {"loss_type": ["ipo"]}),
    "kto": (KTOTrainer, KTOConfig, {"desirable_weight": 1.5}),
    "orpo": (ORPOTrainer, ORPOConfig, {}),
    "cpo": (CPOTrainer, CPOConfig, {"label_smoothing": 0.1}),
    "simpo": (CPOTrainer, CPOConfig, {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 1.0}),
    "rm": (RewardTrainer, RewardConfig, {"center_rewards_coefficient": 0.01}),
    "margin": (RewardTrainer, RewardConfig, {}),
}
NAMES = {"mpo": "dpo", "ld": "dpo", "margin": "rm"}
FLAGS = {
    "mpo": "--loss_type sigmoid aot --loss_weights 0.8 0.2 --rpo_alpha 0.5",
    "ld": "--ld_alpha 0.3 --f_divergence_type js_divergence",
    "kto": "--desirable_weight 1.5",
    "cpo": "--label_smoothing 0.1",
    "rm": "--center_rewards_coefficient 0.01",
}


def bare(case, resolved, folder):
    """TRL's trainer as its users make it, given the rows of the file."""
    trainer, config, options = TRL[case]
    args = resolved.args
    kind = AutoModelForSequenceClassification if resolved.mode == "rm" else AutoModelForCausalLM
    torch.manual_seed(args.seed)
    model = kind.from_pretrained(
        args.model, dtype=torch.float32, **({"num_labels": 1} if resolved.mode == "rm" else {})
    )
    with Path(args.dataset[0]).open() as lines:
        rows = Dataset.from_list([json.loads(line) for line in lines])
    options = {"train_sampling_strategy": "sequential", "max_length": 512, **options}
    shared = {"output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": "none", "seed": args.seed}
    options |= {"per_device_train_batch_size": 4, "gradient_checkpointing": False, **shared}
    options |= {name: getattr(args, name) for name in SAME_IN_TRANSFORMERS if name not in options}
    options |= {"optim": "adamw_torch", "warmup_steps": args.warmup_steps or args.warmup_ratio, "save_strategy": "no"}
    options |= {name: getattr(args, name) for name in ("max_steps", "gradient_accumulation_steps")}
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    return trainer(model=model, args=config(**options), train_dataset=rows, processing_class=tokenizer)


def pair_of(settings, case, folder, *flags):
    """Our trainer and TRL's."""
    rows = [{**pair, "margin": n % 3} for n, pair in enumerate(sums(32))] if case == "margin" else None
    given = (FLAGS.get(case, ()), "--dataset_shuffle false", flags)
    resolved = settings(NAMES.get(case, case), given, rows=rows)
    return trainer_of(resolved, folder / "swift"), bare(case, resolved, folder / "trl")


@pytest.mark.parametrize("case", TRL)
def test_loss_and_gradient_of_the_first_step_are_trls(settings, case, tmp_path):
    mine, bare = pair_of(settings, case, tmp_path)
    expected, theirs = first_step(bare)
    found, grads = first_step(mine)
    assert found == pytest.approx(expected, abs=1e-6)
    assert grads.keys() == theirs.keys()
    assert all(torch.allclose(grads[name], theirs[name], atol=1e-6) for name in grads)
    assert any(grad.abs().max() > 1e-4 for grad in grads.values())


@pytest.mark.long
@pytest.mark.parametrize("case", TRL)
def test_steps_of_several_micro_batches_are_trls(settings, case, tmp_path):
    # softmax takes no notice of the keys' biases: their gradients are rounding, of which Adam would make whole steps
    flags = "--gradient_accumulation_steps 2 --save_strategy no --adam_epsilon 1e-3"
    mine, bare = pair_of(settings, case, tmp_path, flags)
    for trainer in (mine, bare):
        trainer.train()
    weights, theirs = (dict(one.model.named_parameters()) for one in (mine, bare))
    assert all(torch.allclose(weights[name], theirs[name], atol=1e-6) for name in theirs)
    for name in ("loss", "grad_norm"):
        found, expected = ([row[name] for row in one.state.log_history if name in row] for one in (mine, bare))
        assert len(found) == 4 and found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("flags", ["--loss_type sigmoid sft --rpo_alpha 0.0", "--loss_type sigmoid --rpo_alpha 0.1"])
def test_the_loss_of_the_chosen_answer_is_added_where_it_has_a_weight(settings, flags):
    assert method_of("dpo").options(settings("dpo", flags).args)["loss_type"] == ["sigmoid", "sft"]
