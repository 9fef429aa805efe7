"""gpt-oss, whose published files are packed in MXFP4 (OCP Microscaling, FP4 of E2M1): unpacked, it can be trained."""

import json

import torch
from safetensors.torch import load_file, save_file

from swift.models.arguments import ModelArguments
from swift.models.policy import check_policy, load_policy
from swift.models.tiny import build_tiny

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Of E2M1 without its sign, which is the highest of four bits; a byte has the earlier value in its lower half."""


def packed(numbers, scales):
    """Bytes of 32-value blocks; numbers: indexes of signed values, [..., blocks, 32]."""
    low, high = numbers[..., 0::2], numbers[..., 1::2]
    return {"blocks": (low | high << 4).to(torch.uint8), "scales": (scales + 127).to(torch.uint8)}


def test_experts_of_packed_files_are_unpacked_trained_and_saved(tmp_path):
    folder = build_tiny(tmp_path / "gpt-oss", arch="gpt_oss", size="nano")
    tensors, expected = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        numbers = torch.randint(16, (experts, outputs, inputs // 32, 32))
        scales = torch.randint(-9, -5, (experts, outputs, inputs // 32))
        signed = VALUES[numbers % 8] * torch.where(numbers < 8, 1.0, -1.0) * 2.0 ** scales[..., None]
        expected[name] = signed.flatten(-2).transpose(-1, -2)
        tensors |= {f"{name}_{part}": tensor for part, tensor in packed(numbers, scales).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))

    args = ModelArguments(model=str(folder), tuner_type="full", torch_dtype="bfloat16")
    shapes = {name: weight.shape for name, weight in check_policy(args).named_parameters()}
    policy = load_policy(args)
    weights = dict(policy.named_parameters())
    assert expected and {name: weight.shape for name, weight in weights.items()} == shapes
    for name, values in expected.items():
        assert weights[name].requires_grad and weights[name].dtype == torch.bfloat16
        assert torch.equal(weights[name].float(), values)
    policy(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    assert all(weights[name].grad.abs().sum() > 0 for name in expected)
    policy.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert all(torch.equal(saved[name].float(), values) for name, values in expected.items())
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
