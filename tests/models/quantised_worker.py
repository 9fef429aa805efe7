"""Asserts what holds for quantised bases, in a process that finds bitsandbytes. Words: model folder, scratch folder."""

import dataclasses
import sys
from pathlib import Path

import torch
from policies import IDS, moved

from swift.errors import ConfigError
from swift.models.arguments import ModelArguments, QuantArguments
from swift.models.checkpoint_tensors import checkpoint_units, read_unit
from swift.models.export import merge_adapter
from swift.models.policy import load_for_inference, load_policy
from swift.models.quantisation import is_quantised, rounds_activations
from swift.models.reference import load_other, load_reference

MODEL, SCRATCH = sys.argv[1], Path(sys.argv[2])
CASES = {
    "nf4": {"quant_bits": 4},
    "fp4": {
        "quant_bits": 4, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False,
        "bnb_4bit_quant_storage": "float32",
    },
    "dora": {"quant_bits": 4, "use_dora": True},
    "int8": {"quant_bits": 8},
    "dora int8": {"quant_bits": 8, "use_dora": True},
}  # fmt: skip


def logprobs(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.float().log_softmax(-1)


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def weights_for_engines(policy: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        key: tensor
        for unit in checkpoint_units(policy)
        for key, tensor in read_unit(policy, unit, torch.Tensor.detach).items()
    }


def check_experts() -> None:
    """Quantised while they are read: loss and gradients are those of a model that holds the dequantised numbers."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    from swift.models.policy import check_policy
    from swift.models.tiny import build_tiny

    folder = build_tiny(SCRATCH / "mixture", arch="qwen3_moe", size="nano")
    args = ModelArguments(
        model=str(folder), quant_method="bnb", quant_bits=4, quant_experts=True, target_modules=["q_proj", "v_proj"]
    )
    check_policy(args)
    packed, plain = (load_policy(one) for one in (args, dataclasses.replace(args, quant_experts=False)))
    trained = [[one for one in policy.parameters() if one.requires_grad] for policy in (packed, plain)]
    for one, other in zip(*trained, strict=True):
        other.data = one.data.clone()
    experts = [weight for name, weight in plain.named_parameters() if ".experts." in name]
    for weight in experts:
        weight.data = dequantize_4bit(*quantize_4bit(weight.data, compress_statistics=True, quant_type="nf4"))
    held = [weight for name, weight in packed.named_parameters() if ".experts." in name]
    assert len(held) == len(experts) == 4 and all(weight.dtype == torch.uint8 for weight in held)
    packed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    losses = [policy(input_ids=IDS, labels=IDS).loss for policy in (packed, plain)]
    for loss in losses:
        loss.backward()
    assert losses[0] == losses[1]
    assert all(gap(one.grad, other.grad) < 1e-6 for one, other in zip(*trained, strict=True))
    for wrong, said in (
        ({"model": MODEL}, "has no experts"),
        ({"target_modules": ["all-linear"]}, "has the projections of experts"),
    ):
        try:
            check_policy(dataclasses.replace(args, **wrong))
            raise AssertionError(wrong)
        except ConfigError as error:
            assert said in str(error), error
    print("checked experts")


def check(name: str, more: dict) -> None:
    args = ModelArguments(model=MODEL, quant_method="bnb", **more)
    plain = load_for_inference(ModelArguments(model=MODEL))
    torch.manual_seed(0)
    policy = load_policy(args)
    assert is_quantised(policy) and all(one.dtype.is_floating_point for one in policy.parameters() if one.requires_grad)
    start = logprobs(policy.eval())
    assert gap(start, logprobs(plain)) > 1e-2, "it is quantised"
    optimizer = torch.optim.AdamW([one for one in policy.parameters() if one.requires_grad], 1e-2)
    for _ in range(3):
        policy.train()(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = logprobs(policy.eval())
    assert gap(wanted, start) > 1e-2, "it learns"
    with load_reference(args, policy).active() as module:
        assert gap(logprobs(module), start) < 1e-6, "the reference is the base"

    engine = load_for_inference(ModelArguments(model=MODEL))
    engine.load_state_dict(weights_for_engines(policy), strict=False)
    limit = 0.3 if more["quant_bits"] == 8 else 1e-5  # int8 rounds activations, too
    assert rounds_activations(policy) == (more["quant_bits"] == 8)
    assert torch.equal(logprobs(policy), wanted), "reading leaves it as it was"
    assert gap(logprobs(engine), wanted) < limit, "engines sample from the policy"

    folder = SCRATCH / name
    policy.save_pretrained(folder)
    quantised = load_for_inference(QuantArguments(adapters=[str(folder)], quant_method="bnb", **{
        key: value for key, value in more.items() if key != "use_dora"
    }))  # fmt: skip
    assert gap(logprobs(quantised), wanted) < 1e-6, "swift infer loads it"
    unquantised = load_for_inference(ModelArguments(adapters=[str(folder)]))
    merged = load_for_inference(
        ModelArguments(model=str(merge_adapter(ModelArguments(adapters=[str(folder)]), SCRATCH / f"{name}-merged")))
    )
    assert gap(logprobs(merged), logprobs(unquantised)) < 1e-5, "merged into the unquantised base"


def check_quantised_files() -> None:
    """A folder whose weights are packed already."""
    folder = SCRATCH / "packed"
    plain = load_for_inference(QuantArguments(model=MODEL, quant_method="bnb", quant_bits=4))
    plain.save_pretrained(folder)
    policy = load_policy(ModelArguments(model=str(folder))).eval()
    moved(policy)
    engine = load_for_inference(ModelArguments(model=MODEL))
    engine.load_state_dict(weights_for_engines(policy), strict=False)
    assert gap(logprobs(engine), logprobs(policy)) < 1e-5, "engines sample from the policy"
    for device in ("meta", "cpu"):
        load_other(str(folder), ModelArguments(model=MODEL), device)
    whole = load_policy(ModelArguments(model=MODEL, tuner_type="full"))
    try:
        load_reference(ModelArguments(model=MODEL, ref_model=str(folder), tuner_type="full"), whole, moves=True)
    except ConfigError as error:
        assert "is quantised" in str(error), error
    else:
        raise AssertionError("a quantised reference is to move")
    for more, flag in (
        ({"tuner_type": "full"}, "--model"),
        ({"init_weights": "pissa"}, "--init_weights"),
        ({"modules_to_save": ["q_proj"]}, "--modules_to_save"),
        ({"quant_method": "bnb", "quant_bits": 4}, "--quant_method"),
    ):
        try:
            load_policy(ModelArguments(model=str(folder), **more))
        except ConfigError as error:
            assert str(error).startswith(flag), error
        else:
            raise AssertionError(more)


def check_rounded_products() -> None:
    """Products in another type than the model's differ from those with dequantised weights."""
    args = ModelArguments(model=MODEL, quant_method="bnb", quant_bits=4, bnb_4bit_compute_dtype="bfloat16")
    assert rounds_activations(load_policy(args))


check_experts()
for case, settings in CASES.items():
    check(case, settings)
    print("checked", case)
check_quantised_files()
check_rounded_products()
print("checked files, products")
