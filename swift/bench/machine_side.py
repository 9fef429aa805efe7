"""What the machine itself can do: the rate of matrix products, measured in the same turns as the contenders.

In fp32 on a CPU; on a GPU in the type of the work.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from swift.bench.contest import Gate, processor_seconds
from swift.bench.work import Work

SIZE = 1536
"""Edge of the square matrices: large enough for the full rate, small enough to take a fraction of a second."""
SIZE_ON_GPU = 8192
TAKE_S = 0.6
"""Length of a turn."""


def gemm(work: Work, gate: Gate) -> None:
    """Multiply matrices for a while; operations per second by the clock (the best product) and by the processor.

    The lengths of the prompts come along, since they need a tokenizer, which the parent does not load.
    """
    import torch

    prompt_tokens = _prompt_lengths(work)
    on_gpu = work.device == "cuda"
    product, size = (_product_on_gpu(work.dtype), SIZE_ON_GPU) if on_gpu else (_fastest_product(), SIZE)

    def turn() -> dict[str, Any]:
        computed, best, count, began = processor_seconds(os.getpid()), float("inf"), 0, time.perf_counter()
        while time.perf_counter() - began < TAKE_S or count < 2:
            started = time.perf_counter()
            product()
            best = min(best, time.perf_counter() - started)
            count += 1
        flops = 2 * size**3
        computed = processor_seconds(os.getpid()) - computed
        per_processor_s = {} if on_gpu else {"flops_per_processor_s": flops * count / max(computed, 0.01)}
        return {
            "flops_per_s": flops / best,
            **per_processor_s,
            "threads": torch.get_num_threads(),
            "prompt_tokens": prompt_tokens,
        }

    turn()
    gate.serve(turn)


def _fastest_product() -> Callable[[], Any]:
    """A product of two matrices by PyTorch's choice of library or by oneDNN, whichever takes less here."""
    import torch

    from swift.models import cpu_linear

    a, b = torch.randn(2, SIZE, SIZE).unbind(0)
    out = torch.empty(SIZE, SIZE)
    products: list[Callable[[], Any]] = [partial(torch.mm, a, b, out=out)]
    if cpu_linear.available():
        products.append(partial(cpu_linear.linear, a, cpu_linear.pack(b)))

    def seconds(product: Callable[[], Any]) -> float:
        taken = []
        for _ in range(4):
            started = time.perf_counter()
            product()
            taken.append(time.perf_counter() - started)
        return min(taken)

    return min(products, key=seconds)


def _product_on_gpu(dtype: str) -> Callable[[], Any]:
    """A product of two matrices, waited for."""
    import torch

    a, b = torch.randn(2, SIZE_ON_GPU, SIZE_ON_GPU, device="cuda", dtype=getattr(torch, dtype)).unbind(0)
    out = torch.empty_like(a)

    def product() -> None:
        torch.mm(a, b, out=out)
        torch.cuda.synchronize()

    return product


def _prompt_lengths(work: Work) -> list[int]:
    """Tokens of the prompts of a step as the chat template makes them."""
    from transformers import AutoTokenizer

    from swift.bench.work import prompts

    tokenizer = AutoTokenizer.from_pretrained(work.model)
    chats = [[{"role": "user", "content": text}] for text in prompts(work)[: work.num_prompts]]
    return [len(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]) for chat in chats]
