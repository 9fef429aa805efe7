from itertools import pairwise
from pathlib import Path

import pytest
import torch
from policies import IDS, lora, moved

from swift.models.policy import load_policy
from swift.models.tiny import ARCHS


@pytest.fixture(scope="session")
def tiny_folders(nano_folders) -> dict[str, Path]:
    return nano_folders


@pytest.fixture(params=ARCHS)
def any_model(request, tiny_folders) -> str:
    return str(tiny_folders[request.param])


@pytest.fixture(scope="session")
def qwen2(tiny_folders) -> str:
    return str(tiny_folders["qwen2"])


@pytest.fixture
def make_adapter(tmp_path):
    """Builds an adapter with random weights, so that it changes what the model says."""

    def make(model: str, name: str = "adapter", seed: int = 0) -> str:
        moved(load_policy(lora(model)), 0.1, seed).save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return make


@pytest.fixture
def logits():
    """Logits of a module on fixed token ids, without gradients."""

    def compute(module: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return module(input_ids=IDS).logits

    return compute


@pytest.fixture
def fake_flash(monkeypatch):
    """flash-attn as transformers finds it, computed by SDPA sequence by sequence; the list of its calls."""
    from transformers import PreTrainedModel
    from transformers import modeling_flash_attention_utils as flash

    calls = []

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, dropout_p=0.0,
    ):  # fmt: skip
        assert causal and dropout_p == 0.0 and q.shape[-1] == k.shape[-1] == v.shape[-1]
        starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert (starts_q[0], starts_q[-1], starts_k[0], starts_k[-1]) == (0, len(q), 0, len(k))
        lengths = cu_seqlens_q.diff(), cu_seqlens_k.diff()
        assert (int(lengths[0].max()), int(lengths[1].max())) == (max_seqlen_q, max_seqlen_k)
        calls.append((lengths[0].tolist(), lengths[1].tolist(), window_size, softcap))
        parts = []
        for queries, keys in zip(pairwise(starts_q), pairwise(starts_k), strict=True):
            query, key, value = (x[slice(*at)].transpose(0, 1) for x, at in ((q, queries), (k, keys), (v, keys)))
            key, value = (x.repeat_interleave(q.shape[1] // k.shape[1], 0) for x in (key, value))
            scores = query @ key.mT * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            distance = (
                torch.arange(query.shape[1])[:, None] + key.shape[1] - query.shape[1] - torch.arange(key.shape[1])
            )
            seen = (distance >= 0) & ((distance <= window_size[0]) if window_size[0] >= 0 else True)
            parts.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value).transpose(0, 1))
        return torch.cat(parts)

    def flash_attn_func(q, k, v, **options):
        ends = torch.tensor([0, q.shape[1]], dtype=torch.int32)
        return flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, q.shape[1], q.shape[1], **options)[None]

    functions = (flash_attn_func, flash_attn_varlen_func, None, flash._pad_input, flash._unpad_input)
    monkeypatch.setattr(flash, "_lazy_imports", lambda *_, **__: functions)
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True)
    yield calls
    flash._loaded_implementation = None  # what was loaded now must not stay
