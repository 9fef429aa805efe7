"""How far each kernel of packed attention is from float64, in values and gradients: `python kernels.py`, JSON."""

import json
from importlib.util import find_spec

import torch

from swift.models.attention.layout import KERNELS, SegmentLayout, kernel_for
from swift.models.attention.spans import GroupSpans, Span, Variant

HEADS = (8, 2, 64, 64)
PLAIN, WINDOW = Variant(), Variant(window=100)


def layout(device):
    """Two prompts, shared by completions of many lengths, one of them empty."""
    groups, end = [], 0
    for lengths in ((500, 900, 700, 3, 0), (33, 64, 1000), (200, 300)):
        spans = []
        for length in lengths:
            spans.append(Span(end, length))
            end += length
        groups.append(GroupSpans(spans[0], tuple(spans[1:])))
    return SegmentLayout(groups, device), end


def outcome(segments, states, kernel, variant):
    """Output and gradients."""
    given = [one.clone().requires_grad_() for one in states]
    output = segments.attend(*given, None, variant, kernel)
    return [output, *torch.autograd.grad(output.double().square().sum(), given)]


def gap(one, other):
    """Length of the difference, relative."""
    one, other = one.detach(), other.detach()
    return float((one - other).norm() / other.norm())


def main():
    """See the module."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    segments, num_tokens = layout(device)
    torch.manual_seed(0)
    num_heads, num_kv, width, _ = HEADS
    narrow = [
        torch.randn(1, heads, num_tokens, width).to(device, torch.bfloat16) for heads in (num_heads, num_kv, num_kv)
    ]
    found = {"default": kernel_for(device, torch.bfloat16, HEADS)}
    for name, variant in (("plain", PLAIN), ("window", WINDOW)):
        exact = outcome(segments, [one.double() for one in narrow], "rows", variant)
        for kernel in ("rows", "flex", "flash"):
            if kernel == "flash" and find_spec("flash_attn") is None:
                found[f"{kernel} {name}"] = "left out: flash-attn is not installed"
            elif kernel != "rows" and device.type == "cpu":
                found[f"{kernel} {name}"] = "left out: it needs a GPU"
            elif not KERNELS[kernel].computes(variant, images=False):
                found[f"{kernel} {name}"] = "left out: rows compute it"
            else:
                pairs = zip(outcome(segments, narrow, kernel, variant), exact, strict=True)
                found[f"{kernel} {name}"] = max(gap(one, other) for one, other in pairs)
    gaps = [one for one in found.values() if isinstance(one, float)]
    print(json.dumps({**found, "ok": all(one < 0.02 for one in gaps)}))


if __name__ == "__main__":
    main()
