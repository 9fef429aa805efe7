"""Asserts what holds for quantised bases, in a process that finds bitsandbytes. Words: model folder, scratch folder."""

import sys
from pathlib import Path

import torch

from swift.models.arguments import ModelArguments, QuantArguments
from swift.models.checkpoint_tensors import checkpoint_units, read_unit
from swift.models.export import merge_adapter
from swift.models.policy import load_for_inference, load_policy
from swift.models.quantisation import is_quantised
from swift.models.reference import load_reference

MODEL, SCRATCH = sys.argv[1], Path(sys.argv[2])
IDS = torch.arange(40).reshape(2, 20) + 60
CASES = {
    "nf4": {"quant_bits": 4},
    "fp4": {
        "quant_bits": 4, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False,
        "bnb_4bit_quant_storage": "float32",
    },
    "dora": {"quant_bits": 4, "use_dora": True},
    "int8": {"quant_bits": 8},
}  # fmt: skip


def logprobs(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.float().log_softmax(-1)


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def check(name: str, more: dict) -> None:
    args = ModelArguments(model=MODEL, tuner_type="lora", lora_dropout=0.0, quant_method="bnb", **more)
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
    sent = {
        key: tensor
        for unit in checkpoint_units(policy)
        for key, tensor in read_unit(policy, unit, torch.Tensor.detach).items()
    }
    engine.load_state_dict(sent, strict=False)
    limit = 0.3 if name == "int8" else 1e-5  # int8 rounds activations, too
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


for case, settings in CASES.items():
    check(case, settings)
    print("checked", case)
