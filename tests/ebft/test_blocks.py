"""Blocks are what ordinary passes over `document[:anchor] + block` would sample, score and see, at a counted cost."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from swift.models.arguments import ModelArguments
from swift.models.attention.choice import choose_attention
from swift.models.features import load_features
from swift.models.forward import TokenSequence
from swift.models.policy import load_policy
from swift.models.scoring import ScoreRequest, prepare_scoring, score_requests
from swift.rl.linear_logprobs import LogitMap
from swift.trainers.ebft.blocks import (
    Blocks,
    Document,
    block_features,
    block_stream,
    block_uniforms,
    joined_ids,
    reference_features,
    sample_blocks,
)

TEMPERATURE, LENGTH, SAMPLES = 0.6, 4, 3


def document(num_tokens, *anchors, seed=0):
    ids = torch.randint(40, 120, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Document(ids, ids, list(anchors), f"document {seed}")


DOCUMENTS = [document(12, 3, 7, seed=1), document(9, 1, seed=2), document(21, 4, 9, 12, 17, seed=3)]


def load(folder, tuner="full"):
    args = ModelArguments(model=str(folder), tuner_type=tuner, lora_dropout=0.0)
    args.ebft_feature_layers, args.ebft_feature_norm, args.ebft_embed_method = [0.5, 1.0], "concat", "last_token"
    policy = load_policy(args)
    plain = copy.deepcopy(policy).eval()
    assert choose_attention(policy) is None
    return policy.eval(), plain, args


@pytest.fixture
def policy(nano_folders):
    return load(nano_folders["qwen2"])


def sampled(model, documents=DOCUMENTS, samples=SAMPLES, length=LENGTH, step=0):
    stream, ids = block_stream(documents, num_samples=samples, length=length), joined_ids(documents, "cpu")
    uniforms = block_uniforms(documents, samples, length, 42, step)
    return Blocks(stream, ids, sample_blocks(model, ids, stream, uniforms, temperature=TEMPERATURE)), uniforms


def prefixes(blocks, documents=DOCUMENTS):
    """The document before each column."""
    return [documents[index].input_ids[:anchor] for index, anchor in blocks.stream.columns]


@pytest.mark.parametrize("arch", ["qwen2", "llama", "qwen3"])
def test_a_token_is_drawn_from_the_distribution_of_an_ordinary_pass(nano_folders, arch):
    packed, plain, _ = load(nano_folders[arch])
    blocks, uniforms = sampled(packed)
    for column, prefix in enumerate(prefixes(blocks)):
        tokens = list(prefix)
        for step in range(LENGTH):
            with torch.no_grad():
                logits = plain(input_ids=torch.tensor([tokens])).logits[0, -1] / TEMPERATURE
            chosen = int(np.searchsorted(logits.double().softmax(-1).cumsum(-1).numpy(), uniforms[column, step]))
            assert int(blocks.tokens[step, column]) == chosen
            tokens.append(chosen)


@pytest.mark.parametrize("whole_logits", [False, True])
@pytest.mark.parametrize("arch", ["qwen2", "llama", "qwen3"])
def test_the_logprobs_of_a_block_are_those_of_an_ordinary_pass(nano_folders, arch, whole_logits):
    packed, plain, _ = load(nano_folders[arch])
    blocks, _ = sampled(packed)
    if not whole_logits:
        assert prepare_scoring(packed) is None
    predictors = blocks.stream.predecessors().flatten()
    targets = torch.arange(1, 12)  # the first document's own tokens, at temperature 1
    requests = (
        ScoreRequest(predictors, blocks.tokens.flatten(), LogitMap(temperature=TEMPERATURE), "none"),
        ScoreRequest(targets - 1, blocks.ids[targets], LogitMap(), "none"),
    )
    found, own = score_requests(packed, blocks.inputs(), requests)
    for column, prefix in enumerate(prefixes(blocks)):
        block = blocks.tokens[:, column]
        logits = plain(input_ids=torch.tensor([[*prefix, *block.tolist()]])).logits[0, len(prefix) - 1 : -1]
        expected = (logits / TEMPERATURE).log_softmax(-1).gather(1, block[:, None])[:, 0]
        torch.testing.assert_close(found.view(LENGTH, -1)[:, column], expected, rtol=0, atol=1e-5)
    first = torch.tensor([DOCUMENTS[0].input_ids])
    expected = plain(input_ids=first).logits[0, :-1].log_softmax(-1).gather(1, first[0, 1:, None])[:, 0]
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-5)


def test_the_cost_is_that_of_the_formulas(policy):
    packed, _, _ = policy
    assert prepare_scoring(packed) is None
    counted = []
    packed.get_input_embeddings().register_forward_hook(lambda module, given, output: counted.append(given[0].numel()))
    one = document(1024, *range(8, 1017, 8))
    blocks, _ = sampled(packed, [one], samples=4, length=8)
    assert len(one.anchors) == 127
    assert (len(counted), sum(counted)) == (8, 1024 + 4 * 127 * 7), "4,580 tokens in 8 passes, not 46,992"
    counted.clear()
    request = ScoreRequest(blocks.stream.predecessors().flatten(), blocks.tokens.flatten(), LogitMap(), "none")
    score_requests(packed, blocks.inputs(), (request,))
    assert counted == [5088]


def test_samples_do_not_depend_on_the_batch_but_on_step_and_document(policy):
    packed, _, _ = policy
    together, _ = sampled(packed)
    alone = torch.cat([sampled(packed, [one])[0].tokens for one in DOCUMENTS], 1)
    assert torch.equal(together.tokens, alone)
    assert not torch.equal(sampled(packed, step=1)[0].tokens, alone)


def test_a_block_feels_its_prefix_alone(policy):
    packed, _, _ = policy
    blocks, _ = sampled(packed, [DOCUMENTS[2]])
    predictors = blocks.stream.predecessors().flatten()

    def logprobs(ids, tokens):
        request = ScoreRequest(predictors, tokens.flatten(), LogitMap(), "none")
        changed = Blocks(blocks.stream, ids, tokens)
        return score_requests(packed, changed.inputs(), (request,))[0].detach().view(LENGTH, -1)

    before = logprobs(blocks.ids, blocks.tokens)
    for place in (2, 8, 9, 16, 20):
        ids = blocks.ids.clone()
        ids[place] += 1
        moved = (logprobs(ids, blocks.tokens) - before).abs().amax(0) > 1e-6
        assert moved.tolist() == [place < anchor for anchor in blocks.stream.anchors.tolist()]
    tokens = blocks.tokens.clone()
    tokens[1, 5] += 1
    moved = (logprobs(blocks.ids, tokens) - before).abs() > 1e-6
    assert moved[1:, 5].all() and int(moved.sum()) == LENGTH - 1


@pytest.mark.parametrize("method", ["last_token", "completion_mean", "mean_pooling", "concat"])
def test_features_are_those_of_sequences(policy, method):
    packed, _, args = policy
    args.ebft_embed_method = method
    network = load_features(args, packed)
    blocks, _ = sampled(packed)
    samples, own = block_features(network, blocks, SAMPLES)
    network.method = "completion_mean" if method == "mean_pooling" else method  # here it is the mean of the block
    columns = zip(blocks.stream.columns, prefixes(blocks), blocks.tokens.T.tolist(), strict=True)
    pairs = [(prefix, block, DOCUMENTS[index].input_ids[at : at + LENGTH]) for (index, at), prefix, block in columns]
    expected = network.of_sequences([TokenSequence(prefix, block) for prefix, block, _ in pairs])
    torch.testing.assert_close(samples.flatten(0, 1), expected, rtol=0, atol=1e-5)
    references = network.of_sequences([TokenSequence(prefix, true) for prefix, _, true in pairs])
    torch.testing.assert_close(own.repeat_interleave(SAMPLES, 0), references, rtol=0, atol=1e-5)
    network.method = method
    torch.testing.assert_close(own, reference_features(network, DOCUMENTS, LENGTH, "cpu"), rtol=0, atol=1e-5)


def test_lora_features_are_those_of_the_policy_without_its_adapter(nano_folders):
    packed, _, args = load(nano_folders["qwen2"], "lora")
    network = load_features(args, packed)
    blocks, _ = sampled(packed)
    before, _ = block_features(network, blocks, SAMPLES)
    for name, parameter in packed.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    after, _ = block_features(network, blocks, SAMPLES)
    assert torch.equal(before, after)
    assert not torch.equal(sampled(packed)[0].tokens, blocks.tokens)


def test_targets_leave_out_the_first_token_and_unlabelled_ones():
    one = Document([5, 6, 7, 0], [5, -100, 7, 0], [1], "")
    assert one.targets == [2, 3], "an id of 0 is an id"
