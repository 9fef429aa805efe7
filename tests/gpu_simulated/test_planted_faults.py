"""Faults planted in the loss of a whole run on the simulated GPU are noticed there."""

from gpu_runs import BUDGET, GRPO, PLUGIN, STEPS, beyond

PLANT = """
import torch
import swift.trainers.grpo.step as step

usual = step.policy_loss

def planted(logprobs, **settings):
    {}
    return usual(logprobs, **settings)

step.policy_loss = planted
"""
FAULTS = """
    logprobs.detach()[torch.arange(2)]
    logprobs.mean().item()
    torch.zeros(3).to(logprobs.device)
    query, key = logprobs.new_ones(1, 4, 3, 2), logprobs.new_ones(1, 2, 3, 2)
    mask = query[0, 0] @ key[0, 0].T > 0
    torch.nn.functional.scaled_dot_product_attention(query, key, key, attn_mask=mask, enable_gqa=True)
"""
FULL = f"{GRPO} --tuner_type full --torch_dtype float32"


def test_planted_faults_are_caught(on_gpu):
    code, err, found = on_gpu(FULL, plugin=PLUGIN + PLANT.format(FAULTS))
    assert code == 0, err[-3000:]
    caught, times = beyond(found, BUDGET), 2 * STEPS  # in each micro-batch
    assert sorted((what, count) for what, _, count in caught["copies"]) == [
        ("index on the host", times),
        ("pageable", times),
    ]
    assert [(what, count) for what, _, count in caught["attention"]] == [("mask and grouped keys", times)]
    ((place, waits),) = caught["waits"].items()
    assert place.startswith("step.py ") and [(count, what) for count, what, _ in waits] == [(times, "item")]


def test_a_planted_mix_of_devices_ends_the_run(on_gpu):
    code, err, _ = on_gpu(FULL, plugin=PLUGIN + PLANT.format("logprobs + torch.ones(len(logprobs))"))
    assert code == 1
    assert "found at least two devices, cuda:0 and cpu" in err
