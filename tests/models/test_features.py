"""Feature vectors: layers, norms, pooling, and the network that they come from."""

from types import SimpleNamespace

import pytest
import torch
from policies import moved
from torch import tensor
from torch.nn.functional import normalize

from swift.models.arguments import ModelArguments
from swift.models.attention.choice import choose_attention
from swift.models.attention.spans import Span
from swift.models.features import feature_layers, load_features, pool, token_features
from swift.models.forward import TokenSequence
from swift.models.policy import load_for_inference, load_policy
from swift.models.scoring import prepare_scoring

PROMPT = [70, 71, 72, 73]
COMPLETIONS = [[80, 81, 82, 83, 84], [85], [], [86, 87, 88]]
SEQUENCES = [TokenSequence(PROMPT, one) for one in COMPLETIONS] + [TokenSequence([90, 91], [92, 93])]


@pytest.mark.parametrize(
    ("num_layers", "layers"), [(32, [8, 16, 24]), (30, [7, 15, 22]), (28, [7, 14, 21]), (22, [5, 11, 16])]
)
def test_depths_are_layers(num_layers, layers):
    assert feature_layers([0.25, 0.5, 0.75], num_layers) == layers


@pytest.mark.parametrize(("depth", "num_layers", "layer"), [(0.58, 50, 29), (0.29, 100, 29), (0.579, 50, 28)])
def test_the_floor_of_a_depth_is_that_of_the_decimal_number(depth, num_layers, layer):
    assert feature_layers([depth], num_layers) == [layer], "0.58 * 50 is 28.999... in floats"


def test_depths_stay_within_the_model_and_those_of_one_layer_count_once():
    assert feature_layers([0.01, 1.0], 4) == [1, 4]
    assert feature_layers([0.25, 0.5, 0.75], 3) == [1, 2]


def test_a_token_has_unit_length_over_all_layers_or_over_each():
    states = [torch.zeros(1, 2), tensor([[3.0, 4.0]]), tensor([[0.0, 12.0]])]
    torch.testing.assert_close(token_features(states, [1, 2]), tensor([[3.0, 4.0, 0.0, 12.0]]) / 13)
    torch.testing.assert_close(token_features(states, [1, 2], "per_layer"), tensor([[0.6, 0.8, 0.0, 1.0]]))
    assert token_features([one.bfloat16() for one in states], [1]).dtype == torch.float32


def test_pooling_by_true_lengths():
    stream = torch.arange(12.0)[:, None]
    spans = [Span(0, 4), Span(4, 8), Span(2, 1)]
    assert pool(stream, spans, "last_token").tolist() == [[3.0], [11.0], [2.0]]
    assert pool(stream, spans, "completion_mean").tolist() == [[1.5], [7.5], [2.0]]
    assert pool(stream, spans, "mean_pooling").tolist() == [[1.5], [7.5], [2.0]]
    assert pool(stream, spans, "concat").tolist() == [[1, 2, 3], [6, 8, 10], [2, 2, 2]]


def settings(model, tuner="full", **more):
    args = ModelArguments(model=model, tuner_type=tuner, lora_dropout=0.0)
    more = {"ebft_feature_layers": [0.5, 1.0], "ebft_feature_norm": "concat", "ebft_embed_method": "last_token", **more}
    return SimpleNamespace(**vars(args), changes_base=False, sharded_by="", sync_ref_model=False, SEES=False, **more)


def alone(module, sequence, method, layers=(1, 2)):
    """The same from an ordinary forward pass of one sequence."""
    ids = [*sequence.prompt_ids, *sequence.completion_ids]
    with torch.no_grad():
        hidden = module(input_ids=tensor([ids]), output_hidden_states=True).hidden_states
    states = normalize(torch.cat([hidden[layer][0] for layer in layers], dim=-1), dim=-1)
    own = states[len(sequence.prompt_ids) :] if sequence.completion_ids else states[-1:]
    size = len(own)
    match method:
        case "last_token":
            return states[-1]
        case "mean_pooling":
            return states.mean(dim=0)
        case "completion_mean":
            return own.mean(dim=0)
    return torch.cat([own[size // 4], own[size // 2], own[3 * size // 4]])


@pytest.mark.parametrize("method", ["last_token", "mean_pooling", "completion_mean", "concat"])
@pytest.mark.parametrize("packed", [True, False])
def test_features_are_those_of_each_sequence_alone(qwen2, method, packed):
    args = settings(qwen2, ebft_embed_method=method)
    policy = load_policy(args)
    choose_attention(policy)
    network = load_features(args, policy)
    plain = load_for_inference(args).eval()
    if not packed:
        network.model.module = plain
    found = network.of_sequences(SEQUENCES)
    wanted = torch.stack([alone(plain, one, method) for one in SEQUENCES])
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize("tuner", ["lora", "full"])
def test_features_stay_while_the_policy_moves(qwen2, tuner):
    args = settings(qwen2, tuner)
    policy = load_policy(args)
    choose_attention(policy)
    prepare_scoring(policy)  # replaces its forward, as a run does before the copy is made
    network = load_features(args, policy)
    before = network.of_sequences(SEQUENCES)
    moved(policy, 0.1)
    assert torch.equal(network.of_sequences(SEQUENCES), before)
    assert not before.requires_grad


def test_depths_that_meet_count_once_and_say_so(qwen2, caplog):
    args = settings(qwen2, ebft_feature_layers=[0.25, 0.5, 1.0])
    assert load_features(args, load_policy(args)).layers == [1, 2]
    assert "--ebft_feature_layers: 0.25 0.5 1: are the layers 1 2 of this model" in caplog.text
