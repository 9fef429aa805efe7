"""Ranks that share a stream have the log-probs and gradients of one rank, whatever a layer's attention does."""

from __future__ import annotations

import re
import shutil
from types import SimpleNamespace

import pytest
import seeing_parallel_worker
import sequence_parallel_worker
import torch
import vlms
from preloaded import run_ranks
from transformers import AutoConfig, AutoModelForImageTextToText

from swift.errors import ConfigError
from swift.models.attention.sequence_parallel import SequenceGroup, head_shares
from swift.trainers.parallel.sequence import require_shareable


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.long)])
def found(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharing")
    run_ranks([sequence_parallel_worker.__file__, folder], folder, count=request.param)
    return torch.load(folder / "found")


@pytest.mark.slow
@pytest.mark.parametrize("name", sequence_parallel_worker.MODELS)
@pytest.mark.parametrize("kind", ["stream", "rows"])
def test_shared_streams_are_those_of_one_rank(found, kind, name):
    limit = 1e-6 if kind == "stream" else 2e-6  # rows are compared with the kernel of transformers
    assert max(found[kind, name].values()) < limit, found[kind, name]


SHORT = ("qwen3_vl", "idefics3")


@pytest.fixture(scope="module")
def seen(vlm_folders, tmp_path_factory):
    """What came out of these families on so many ranks."""
    made = {}

    def of(families, count):
        if (families, count) not in made:
            folder = tmp_path_factory.mktemp("seeing")
            for family in families:
                shutil.copytree(vlm_folders(family), folder / family)
            logs = tmp_path_factory.mktemp("logs")
            run_ranks([seeing_parallel_worker.__file__, folder], logs, count=count)
            made[families, count] = torch.load(folder / "found")
        return made[families, count]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("trained", seeing_parallel_worker.TRAINED)
@pytest.mark.parametrize("kind", ["stream", "rows"])
@pytest.mark.parametrize(
    ("families", "count"),
    [(SHORT, 2), *(pytest.param(vlms.SHARED, count, marks=pytest.mark.long) for count in (2, 3))],
)
def test_shared_images_are_those_of_one_rank(seen, families, count, kind, trained):
    found = seen(families, count)
    gaps = {family: found[kind, family, trained] for family in families}
    assert max(gaps.values()) < 2e-6, gaps


@pytest.mark.parametrize(("heads", "kv"), [(32, 8), (14, 2), (28, 4), (9, 3), (7, 7), (8, 1), (40, 8)])
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_each_head_is_on_one_rank_with_the_keys_that_it_sees(heads, kv, size):
    shares = head_shares(heads, kv, size)
    assert [head for share in shares for head in share.queries] == list(range(heads))
    assert max(len(share.queries) for share in shares) - min(len(share.queries) for share in shares) <= 1
    for share in shares:
        per_key, rest = divmod(len(share.queries), len(share.keys))
        assert rest == 0
        seen = [share.keys[number // per_key] for number in range(len(share.queries))]
        assert seen == [head * kv // heads for head in share.queries]


def test_a_language_model_that_takes_more_than_embeddings_of_each_token_is_not_shared():
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model("gemma4"))
    problem = "cannot be computed in parts (its language model takes per_layer_inputs beside embeddings)"
    with pytest.raises(ConfigError, match=re.escape(problem)):
        require_shareable(model, SimpleNamespace(sequence_parallel_size=2))


def test_one_rank_shares_with_nobody():
    assert SequenceGroup.of_this_rank(1) is None
