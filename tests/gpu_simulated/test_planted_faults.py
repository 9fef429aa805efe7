"""A fault planted in the loss of a whole run on the simulated GPU is noticed there."""

import pytest
from gpu_runs import BUDGET, GRPO, PLUGIN, beyond

PLANT = """
import torch
import swift.trainers.grpo.step as step

usual = step.policy_loss

def planted(logprobs, **settings):
    {}
    return usual(logprobs, **settings)

step.policy_loss = planted
"""
FULL = f"{GRPO} --tuner_type full --torch_dtype float32"


@pytest.mark.parametrize(
    ("fault", "caught"),
    [
        pytest.param("logprobs.detach()[torch.arange(2)]", "copies", id="index-of-the-host"),
        pytest.param("logprobs.mean().item()", "waits", id="item"),
        pytest.param("torch.zeros(3).to(logprobs.device)", "copies", id="pageable"),
        pytest.param(
            "q, k = logprobs.new_ones(1, 4, 3, 2), logprobs.new_ones(1, 2, 3, 2); m = q[0, 0] @ k[0, 0].T > 0; "
            "torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=m, enable_gqa=True)",
            "attention",
            id="grouped-keys",
        ),
    ],
)
def test_a_planted_fault_is_caught(on_gpu, fault, caught):
    code, err, found = on_gpu(FULL, plugin=PLUGIN + PLANT.format(fault))
    assert code == 0, err[-3000:]
    assert list(beyond(found, BUDGET)) == [caught]


def test_a_planted_mix_of_devices_ends_the_run(on_gpu):
    code, err, _ = on_gpu(FULL, plugin=PLUGIN + PLANT.format("logprobs + torch.ones(len(logprobs))"))
    assert code == 1
    assert "found at least two devices, cuda:0 and cpu" in err
