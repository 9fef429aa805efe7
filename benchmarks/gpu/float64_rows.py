"""The gradient of a first GRPO step, row by row in float64: `python float64_rows.py MODEL RECORDED OUT`.

Nothing of swift is used. At the first update the ratio is 1, so the gradient is that of the mean over completions of
the mean over tokens of advantage times log-prob. OUT gets the weights after one step of gradient descent of rate 1.
"""

import json
import statistics
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main():
    """See the module."""
    folder, recorded, out = map(Path, sys.argv[1:])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").to(device)
    groups = json.loads(recorded.read_text())
    count = sum(map(len, groups.values()))
    for question, completions in groups.items():
        chat = [{"role": "user", "content": question}]
        prompt = list(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in completions]
        rewards = [sum(ord(c) % 2 == 0 for c in text) / max(1, len(text)) for text in texts]
        mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
        for ids, reward in zip(completions, rewards, strict=True):
            row = torch.tensor([prompt + ids], device=device)
            logprobs = model(row).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            chosen = logprobs.gather(1, row[0, len(prompt) :, None])
            (-(reward - mean) / (deviation + 1e-4) * chosen.mean() / count).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= parameter.grad
    model.save_pretrained(out)


if __name__ == "__main__":
    main()
