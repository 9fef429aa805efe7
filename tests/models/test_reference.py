import shutil

import pytest
import torch
from policies import full, lora, moved

from swift.errors import ConfigError
from swift.models.arguments import ModelArguments
from swift.models.policy import load_for_inference, load_policy
from swift.models.reference import FrozenReference, load_reference, load_teacher


@pytest.mark.parametrize("tuner", ["lora", "full"])
def test_the_reference_stays_at_the_start_while_the_policy_moves(any_model, tuner, logits):
    args = ModelArguments(model=any_model, tuner_type=tuner)
    policy = load_policy(args)
    reference = load_reference(args, policy)
    start = logits(load_for_inference(args))
    moved(policy, 0.1)
    with reference.active() as module:
        assert torch.equal(logits(module), start)
    assert (logits(policy) - start).abs().max() > 1e-2


def test_a_lora_run_from_an_adapter_is_compared_with_that_adapter(any_model, make_adapter, logits):
    args = lora(any_model, adapters=[make_adapter(any_model)])
    policy = load_policy(args)
    start = logits(policy.eval())
    reference = load_reference(args, policy)
    moved(policy, 0.1)
    after = logits(policy)
    with reference.active() as module:
        assert torch.equal(logits(module), start)
    assert torch.equal(logits(policy), after)
    assert (after - start).abs().max() > 1e-2


TEACHERS = {
    "lora": ({}, False),
    "pissa": ({"init_weights": "pissa"}, True),
    "full": ({"tuner_type": "full"}, True),
    "from an adapter": ({"adapters": [None]}, False),
}


@pytest.mark.parametrize("name", TEACHERS)
def test_a_policy_is_taught_by_its_base_without_a_copy_where_an_adapter_can_be_off(qwen2, make_adapter, name, logits):
    settings, is_apart = TEACHERS[name]
    settings = settings | ({"adapters": [make_adapter(qwen2)]} if "adapters" in settings else {})
    args = ModelArguments(model=qwen2, teacher_model=qwen2, **settings)
    policy = load_policy(args)
    teacher = load_teacher(args, policy)
    moved(policy, 0.1)
    assert isinstance(teacher, FrozenReference) == is_apart
    with teacher.active() as module:
        assert torch.equal(logits(module), logits(load_for_inference(ModelArguments(model=qwen2))))


@pytest.mark.parametrize("from_adapter", [False, True])
def test_a_graph_recorded_before_the_reference_pass_is_not_disturbed(qwen2, make_adapter, from_adapter):
    args = lora(qwen2, adapters=[make_adapter(qwen2)] if from_adapter else [])
    ids = torch.arange(16)[None]

    def gradients(with_reference: bool):
        torch.manual_seed(0)
        policy = load_policy(args)
        reference = load_reference(args, policy)
        moved(policy, 0.1)
        loss = policy(input_ids=ids).logits.square().mean()
        if with_reference:
            with reference.active() as module:
                module(input_ids=ids)
        loss.backward()
        return [parameter.grad for parameter in policy.parameters() if parameter.requires_grad]

    assert all(torch.equal(a, b) for a, b in zip(gradients(False), gradients(True), strict=True))


def test_the_reference_pass_records_no_gradient_and_restores_training_mode(qwen2):
    args = lora(qwen2)
    policy = load_policy(args)
    trainable = [name for name, p in policy.named_parameters() if p.requires_grad]
    with load_reference(args, policy).active() as module:
        assert not module.training
        assert not module(input_ids=torch.arange(4)[None]).logits.requires_grad
    assert policy.training
    assert [name for name, p in policy.named_parameters() if p.requires_grad] == trainable


def test_the_start_adapter_returns_after_an_error_inside_the_block(qwen2, make_adapter, logits):
    args = lora(qwen2, adapters=[make_adapter(qwen2)])
    policy = load_policy(args).eval()
    reference = load_reference(args, policy)
    moved(policy, 0.1)
    after = logits(policy)
    with pytest.raises(ZeroDivisionError), reference.active():
        raise ZeroDivisionError
    assert torch.equal(logits(policy), after)


@pytest.mark.parametrize("tuner", ["lora", "full"])
def test_ref_model_loads_another_model(tiny_folders, tuner, logits):
    other = str(tiny_folders["llama"])
    args = ModelArguments(model=str(tiny_folders["qwen2"]), tuner_type=tuner, ref_model=other)
    reference = load_reference(args, load_policy(args))
    with reference.active() as module:
        assert torch.equal(logits(module), logits(load_for_inference(full(other))))
        assert not any(parameter.requires_grad for parameter in module.parameters())


def test_ref_model_may_be_a_lora_checkpoint(qwen2, make_adapter, logits):
    adapter = make_adapter(qwen2)
    args = full(qwen2, ref_model=adapter)
    with load_reference(args, load_policy(args)).active() as module:
        assert torch.equal(logits(module), logits(load_for_inference(ModelArguments(adapters=[adapter]))))


def test_a_missing_ref_model_names_its_own_flag(qwen2, tmp_path):
    args = full(qwen2, ref_model=str(tmp_path))
    with pytest.raises(ConfigError, match="--ref_model: "):
        load_reference(args, load_policy(args))


def test_a_ref_model_whose_weights_are_broken_is_told_by_its_own_flag(qwen2, tmp_path):
    args = full(qwen2, ref_model=str(shutil.copytree(qwen2, tmp_path / "broken")))
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match=r"^--ref_model: .*broken: its weights cannot be loaded"):
        load_reference(args, load_policy(full(qwen2)))


def test_blending_moves_a_full_reference_towards_the_policy(qwen2):
    args = full(qwen2)
    policy = load_policy(args)
    reference = load_reference(args, policy)
    before = reference.module.model.norm.weight.clone()
    policy.model.norm.weight.data.add_(1.0)
    reference.blend(policy, 0.6)
    assert torch.allclose(reference.module.model.norm.weight, before + 0.6)


def moving_16_bit_pair():
    """A reference of ones in bfloat16, which moves in steps of 1/128, and a policy of twos."""
    policy = torch.nn.Linear(3, 2).to(torch.bfloat16)
    reference = FrozenReference(torch.nn.Linear(3, 2).to(torch.bfloat16))
    for module, value in ((policy, 2.0), (reference.module, 1.0)):
        for parameter in module.parameters():
            torch.nn.init.constant_(parameter, value)
    return policy, reference


def test_moves_below_the_resolution_of_16_bits_add_up():
    policy, reference = moving_16_bit_pair()
    for _ in range(500):
        reference.blend(policy, 0.001)
    expected = torch.tensor(2 - 0.999**500).to(torch.bfloat16)
    assert reference.module.weight.dtype == torch.bfloat16
    assert (reference.module.weight == expected).all() and (reference.module.bias == expected).all()


def test_what_was_added_up_survives_a_checkpoint_to_the_last_bit(tmp_path):
    policy, straight = moving_16_bit_pair()
    for _ in range(20):
        straight.blend(policy, 0.001)
    torch.save(straight.state(), tmp_path / "reference.pt")
    _, resumed = moving_16_bit_pair()
    resumed.load_state(torch.load(tmp_path / "reference.pt", weights_only=True))
    assert torch.equal(resumed.module.weight, straight.module.weight)
    for _ in range(20):
        straight.blend(policy, 0.001)
        resumed.blend(policy, 0.001)
    assert all(torch.equal(resumed.state()[name], tensor) for name, tensor in straight.state().items())
    assert {tensor.dtype for tensor in straight.state().values()} == {torch.float32}
