"""Peak memory and processor seconds of one training pass over a large vocabulary, by the way log-probs are made.

    python benchmarks/head_memory.py [--vocabulary 152000] [--tokens 2048] [--rounds 3]

Ways: `chunked` (swift), `logits` (swift, for models that cannot score themselves), `trl` (TRL's own chunked head). The
model has 8 layers of width 512 and a tied output layer (24M parameters without the vocabulary), trained in full or,
with `--tuner lora`, under an adapter. A pass is forward and backward over one slice of completions of 256 tokens; each
way runs in fresh processes, twice in each. Memory is the highest of the process, seconds are those of the second pass
on one thread. Fails when `chunked` takes more than half of what `logits` takes above the model, or when gradients
differ.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from harness import record

ROOT = Path(__file__).parents[1]
WAYS = ("chunked", "logits", "trl")
LENGTH = 256
MOST = 0.5
"""Of the memory that whole logits take above the model."""


def main() -> int:
    """Run each way in turns, print a table; the exit code."""
    options = parse()
    if options.way:
        print(json.dumps(measure(options)))
        return 0
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way, rows in found.items():
            rows.append(child(way))
    table = {
        way: {name: statistics.median(row[name] for row in rows) for name in rows[0]} for way, rows in found.items()
    }
    work = f"vocabulary {options.vocabulary}, {options.tokens} tokens, {options.tuner} tuning"
    print(work)
    print("way      peak MiB   above the model   processor s   gradient norm")
    for way, row in table.items():
        print(f"{way:<8} {row['peak']:>8.0f} {row['added']:>17.0f} {row['seconds']:>13.2f} {row['norm']:>15.6f}")
    share = table["chunked"]["added"] / table["logits"]["added"]
    norms = [row["norm"] for row in table.values()]
    rows = [{"way": way, **row} for way, row in table.items()]
    print(f"recorded in {record.write('head_memory', rows, options.results, work=work)}")
    print(f"chunked takes {share:.2f} of what whole logits take above the model")
    return int(share > MOST or max(norms) - min(norms) > 1e-4 * max(norms))


def child(way: str) -> dict[str, float]:
    """One way in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Two passes of one way."""
    sys.path.insert(0, str(ROOT))
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build(options)
    prompt = list(range(16))
    rows = [torch.randint(options.vocabulary, (LENGTH,)).tolist() for _ in range(max(1, options.tokens // LENGTH))]
    weights = torch.randn(len(rows) * LENGTH)
    before = peak_mib()
    for _ in range(2):
        model.zero_grad()
        began = time.process_time()
        (logprobs(options.way, model, prompt, rows) * weights).mean().backward()
        seconds = time.process_time() - began
    gradients = [one.grad.norm() for one in model.parameters() if one.grad is not None]
    peak = peak_mib()
    return {"peak": peak, "added": peak - before, "seconds": seconds, "norm": float(torch.stack(gradients).norm())}


def build(options: argparse.Namespace):
    """The model, prepared as the trainer would."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from swift.models.cpu_training import use_fast_products
    from swift.models.forward import choose_attention
    from swift.models.scoring import prepare_scoring

    config = Qwen2Config(
        vocab_size=options.vocabulary,
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=1536,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    if options.way == "trl":
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model, temperature=0.9, outputs=("log_probs", "entropy"))
    if options.tuner == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
    if options.way != "trl":
        choose_attention(model)
    if options.way == "chunked":
        assert prepare_scoring(model) is None
    if options.way != "trl":
        use_fast_products(model)
    assert next(model.parameters()).dtype == torch.float32
    return model


def logprobs(way: str, model, prompt: list[int], rows: list[list[int]]):
    """Log-probs of all completion tokens, one after the other."""
    import torch

    if way == "trl":
        ids = torch.tensor([prompt + row for row in rows])
        labels = ids.clone()
        labels[:, : len(prompt)] = -100
        output = model(
            input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, labels=labels, fused_lm_head=True
        )
        return output.log_probs[:, -LENGTH:].flatten()
    from swift.models.forward import TokenSequence, pack
    from swift.models.scoring import score_tokens

    tokens = pack([TokenSequence(prompt, row) for row in rows])
    return score_tokens(model, tokens, temperature=0.9)[0]


def peak_mib() -> float:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tuner", choices=["full", "lora"], default="full")
    parser.add_argument("--results", type=Path, help="folder of the JSON file")
    parser.add_argument("--way", choices=WAYS, help="measure one way in this process")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
