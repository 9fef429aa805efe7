"""Every tuner: what it starts as, what is sent to engines, saved, resumed, merged and loaded is what it trained."""

import copy
import json
from pathlib import Path

import pytest
import torch
from policies import IDS, lora, moved

from swift.arguments import parse
from swift.errors import ConfigError
from swift.models.adapter_merge import merged_tensors
from swift.models.arguments import ModelArguments
from swift.models.checkpoint_tensors import checkpoint_units, read_adapter, read_unit
from swift.models.export import merge_adapter
from swift.models.policy import check_policy, load_for_inference, load_policy
from swift.models.reference import load_reference
from swift.models.tuners import expert_lines, load_relative, make_relative

TUNERS = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "gaussian": {"init_weights": "gaussian"},
    "orthogonal": {"init_weights": "orthogonal"},
    "pissa": {"init_weights": "pissa"},
    "pissa_niter": {"init_weights": "pissa_niter_4", "use_rslora": True},
    "olora": {"init_weights": "olora"},
    "patterns": {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 3}},
    "regex": {"target_regex": r".*self_attn\.[qv]_proj"},
    "whole modules": {"modules_to_save": ["norm"]},
    "vera": {"tuner_type": "vera", "vera_rank": 8},
    "ia3": {"tuner_type": "ia3"},
    "boft": {"tuner_type": "boft"},
    "miss": {"tuner_type": "miss"},
}


def trained(args: ModelArguments, steps: int = 0) -> torch.nn.Module:
    """A policy after `steps` steps of AdamW on fixed tokens; moved at random without any."""
    torch.manual_seed(0)
    policy = load_policy(args).eval()
    if not steps:
        return moved(policy)
    optimizer = torch.optim.AdamW([one for one in policy.parameters() if one.requires_grad], 1e-2)
    for _ in range(steps):
        policy(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return policy


def checkpoint(policy: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a weight sync sends."""
    return {
        name: tensor
        for unit in checkpoint_units(policy)
        for name, tensor in read_unit(policy, unit, torch.Tensor.detach).items()
    }


def saved(policy: torch.nn.Module, folder: Path) -> str:
    policy.save_pretrained(folder)
    make_relative(policy, folder)
    return str(folder)


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of log-probs."""
    return float((one.log_softmax(-1) - other.log_softmax(-1)).abs().max())


@pytest.mark.parametrize("tuner", TUNERS)
def test_a_tuner_from_start_to_merged_model(tuner, qwen2, tmp_path, logits):
    args = ModelArguments(model=qwen2, **TUNERS[tuner])
    base = load_for_inference(ModelArguments(model=qwen2))
    before = logits(base)
    torch.manual_seed(0)
    assert gap(logits(load_policy(args).eval()), before) < 1e-5, "the start is the base model"
    policy = trained(args, steps=3)
    wanted = logits(policy)
    assert gap(wanted, before) > 1e-3, "it learns"

    live = copy.deepcopy(base)
    live.load_state_dict(checkpoint(policy), strict=False)
    assert gap(logits(live), wanted) < 1e-5, "engines get it"

    adapter = saved(policy, tmp_path / "adapter")
    loaded = load_for_inference(ModelArguments(adapters=[adapter]))
    assert gap(logits(loaded), wanted) < 1e-5, "swift infer loads it"
    assert not loaded.training and not any(one.requires_grad for one in loaded.parameters())
    merged = merge_adapter(ModelArguments(adapters=[adapter]), tmp_path / "merged")
    assert gap(logits(load_for_inference(ModelArguments(model=str(merged)))), wanted) < 1e-5, "the merged model"
    with load_reference(args, load_policy(args)).active() as module:
        assert gap(logits(module), before) < 1e-5, "the reference is the base model"


@pytest.mark.parametrize("tuner", [name for name, more in TUNERS.items() if "tuner_type" not in more])
def test_lora_is_sent_alone(tuner, qwen2, logits):
    policy = trained(ModelArguments(model=qwen2, **TUNERS[tuner]))
    config, tensors = read_adapter(policy)
    engine = load_for_inference(ModelArguments(model=qwen2))
    weights = dict(engine.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for one in merged_tensors(engine, config, tensors):
            weights[one.name].copy_(one.read(lambda tensor: tensor))
    assert gap(logits(engine), logits(policy)) < 1e-5


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_a_start_in_the_base_is_saved_as_a_difference_and_read_bit_for_bit(start, qwen2, tmp_path, logits):
    args = ModelArguments(model=qwen2, init_weights=start, lora_rank=4)
    policy = trained(args)
    adapter = saved(policy, tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 8
    torch.manual_seed(0)
    again = load_policy(args).eval()
    load_relative(again, Path(adapter))
    assert torch.equal(logits(again), logits(policy))
    with load_reference(args, again).active() as module:
        assert torch.equal(logits(module), logits(again)), "a reference is taken before a checkpoint is read"
    again.adapter_start = {name: one + 1 for name, one in again.adapter_start.items()}
    with pytest.raises(ConfigError, match="--init_weights gives other matrices here"):
        load_relative(again, Path(adapter))


def test_a_fresh_pissa_policy_is_its_own_reference(qwen2, logits):
    policy = load_policy(ModelArguments(model=qwen2, init_weights="pissa"))
    reference = load_reference(ModelArguments(model=qwen2, init_weights="pissa"), policy)
    start = logits(policy.eval())
    for one in policy.parameters():
        one.data.add_(0.01 if one.requires_grad else 0.0)
    with reference.active() as module:
        assert torch.equal(logits(module), start)


# --- full tuning ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "trained_names"),
    [
        ({"freeze_parameters": ["model.embed_tokens", "model.layers"]}, {"model.norm.weight"}),
        ({"freeze_parameters_regex": "embed|layers"}, {"model.norm.weight"}),
        ({"freeze_parameters_ratio": 1.0, "trainable_parameters": ["model.norm"]}, {"model.norm.weight"}),
        ({"freeze_parameters_ratio": 1.0, "trainable_parameters_regex": r"norm\.weight$", "freeze_parameters": [
            "model.layers"
        ]}, None),
    ],
)  # fmt: skip
def test_frozen_parameters_get_no_gradient(flags, trained_names, qwen2):
    policy = load_policy(ModelArguments(model=qwen2, tuner_type="full", **flags))
    found = {name for name, one in policy.named_parameters() if one.requires_grad}
    assert found == (trained_names or {name for name, _ in policy.named_parameters() if name.endswith("norm.weight")})


def test_a_ratio_freezes_from_the_first_parameter_on(qwen2):
    policy = load_policy(ModelArguments(model=qwen2, tuner_type="full", freeze_parameters_ratio=0.5))
    gradients = [one.requires_grad for one in policy.parameters()]
    assert gradients == sorted(gradients), "the frozen ones come first"
    sizes = [one.numel() for one in policy.parameters() if not one.requires_grad]
    total = sum(one.numel() for one in policy.parameters())
    largest_left = next(one.numel() for one in policy.parameters() if one.requires_grad)
    assert sum(sizes) <= total / 2 < sum(sizes) + largest_left


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tuner_type": "full", "freeze_parameters": ["layers"]}, "--freeze_parameters: layers: fits no parameter"),
        ({"tuner_type": "full", "trainable_parameters_regex": "q_porj"}, "--trainable_parameters_regex: q_porj: fits"),
        ({"tuner_type": "full", "freeze_parameters_ratio": 1.0}, "--freeze_parameters: every parameter is frozen"),
        ({"target_regex": "q_porj"}, "--target_regex: q_porj: .*valid: all-linear, down_proj"),
        ({"tuner_type": "vera", "target_modules": ["q_porj"]}, "--target_modules: q_porj"),
        (
            {"target_modules": ["q_proj", "v_porj"]},
            "--target_modules: v_porj: fits no module.*valid: all-linear, down_proj",
        ),
        ({"modules_to_save": ["nrom"]}, "--modules_to_save: nrom: fits no module"),
        ({"rank_pattern": {"q_porj": 4}}, "--rank_pattern: q_porj: fits no module"),
        ({"alpha_pattern": {r"layers.9\..*": 4}}, "--alpha_pattern: .*: fits no module"),
    ],
)
def test_a_name_that_the_model_does_not_have_is_refused_before_weights_are_read(flags, message, qwen2):
    for refuses in (load_policy, check_policy):
        with pytest.raises(ConfigError, match=message):
            refuses(ModelArguments(model=qwen2, **flags))


def test_other_modules_may_stand_beside_all_linear(qwen2):
    policy = load_policy(ModelArguments(model=qwen2, target_modules=["all-linear", "embed_tokens"], lora_dropout=0.0))
    linear = load_policy(ModelArguments(model=qwen2, lora_dropout=0.0))
    names, plain = ({name for name, one in each.named_parameters() if one.requires_grad} for each in (policy, linear))
    assert plain < names and all("embed_tokens" in name for name in names - plain)


def test_an_adapter_is_trained_further_by_its_own_tuner(qwen2, tmp_path):
    adapter = saved(trained(ModelArguments(model=qwen2, tuner_type="ia3")), tmp_path / "adapter")
    load_policy(ModelArguments(model=qwen2, tuner_type="ia3", adapters=[adapter]))
    with pytest.raises(ConfigError, match="an adapter of type ia3, not lora; use --tuner_type ia3"):
        load_policy(ModelArguments(model=qwen2, adapters=[adapter]))


@pytest.mark.parametrize(
    "targets", [{"target_modules": ["q_proj", "mlp.down_proj"]}, {"target_regex": r".*\.(q|down)_proj"}]
)
def test_ia3_scales_the_input_of_feedforward_layers_however_they_are_named(targets, qwen2):
    policy = load_policy(ModelArguments(model=qwen2, tuner_type="ia3", **targets))
    found = {name: one.is_feedforward for name, one in policy.named_modules() if hasattr(one, "is_feedforward")}
    assert found and all(feedforward == ("down_proj" in name) for name, feedforward in found.items())


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_a_start_in_the_base_has_no_more_directions_than_a_weight(start, qwen2):
    with pytest.raises(
        ConfigError, match=f"--lora_rank: 64: --init_weights {start} finds 32 directions in model.layers"
    ):
        load_policy(ModelArguments(model=qwen2, init_weights=start, lora_rank=64))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"lora_rank": 16}, "--lora_rank: 16: --adapters .* was made with another value"),
        ({"target_parameters": ["x.weight"]}, "--target_parameters: x.weight: --adapters .* was made with another"),
        ({"use_rslora": True}, "--use_rslora: True: "),
        ({"target_modules": ["q_proj"]}, "--target_modules: q_proj: "),
        ({"modules_to_save": ["norm"]}, "--modules_to_save: norm: "),
        ({"init_weights": "gaussian"}, "--init_weights: gaussian: "),
        ({"lora_rank": 4, "target_modules": ["k_proj", "q_proj"], "lora_alpha": 32.0}, None),
    ],
)
def test_settings_that_the_adapter_to_start_from_does_not_have_are_refused(flags, message, qwen2, tmp_path):
    policy = load_policy(ModelArguments(model=qwen2, lora_rank=4, target_modules=["q_proj", "k_proj"]))
    args = ModelArguments(model=qwen2, adapters=[saved(policy, tmp_path / "adapter")], **flags)
    if message is None:
        load_policy(args)
        return
    with pytest.raises(ConfigError, match=message):
        load_policy(args)


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_an_adapter_on_one_of_two_tied_weights_is_merged_into_that_one(target, qwen2, tmp_path, logits):
    policy = trained(ModelArguments(model=qwen2, target_modules=[target]))
    adapter = saved(policy, tmp_path / "adapter")
    assert gap(logits(load_for_inference(ModelArguments(adapters=[adapter]))), logits(policy)) < 1e-5
    merged = merge_adapter(ModelArguments(adapters=[adapter]), tmp_path / "merged")
    assert gap(logits(load_for_inference(ModelArguments(model=str(merged)))), logits(policy)) < 1e-5
    with pytest.raises(ConfigError, match="the model ties it to"):
        checkpoint_units(policy)


def test_the_page_names_every_setting_that_is_tried_here():
    page = (Path(__file__).parents[2] / "docs" / "tuners.md").read_text()
    table = "".join(line for line in page.splitlines(keepends=True) if line.startswith("|"))
    for more in TUNERS.values():
        for name, value in more.items():
            if name in ("tuner_type", "use_dora", "use_rslora", "init_weights") and "niter" not in str(value):
                assert str(value).lower() in table and (f"--{name}" in table), (name, value)


def test_dropout_is_usual_where_adapters_have_one_and_refused_on_experts(small_model, tmp_path, qwen2):
    folder = tmp_path / "experts"
    small_model("qwen3_moe").save_pretrained(folder)
    for model, rate in ((qwen2, 0.05), (str(folder), 0.0)):
        args = parse("sft", ["--model", model, "--dataset", "d"], {}).args
        policy = load_policy(args)
        assert policy.peft_config["default"].lora_dropout == rate
        assert all(
            line.endswith("; no dropout, which PEFT has on modules alone") for line in expert_lines(policy, args)
        )
    assert expert_lines(policy, args)
    with pytest.raises(ConfigError, match=r"--lora_dropout: 0.05: .*experts.*give --lora_dropout 0"):
        load_policy(lora(str(folder), target_modules=["all-linear"], lora_dropout=0.05))
