"""Rows with images, and what transformers alone makes of them: one row at a time, with its processor's tensors."""

import base64
import io

import torch
import vlms
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer

from swift.models.vision import TOKEN_KINDS, load_processor, placeholder_ids


def data_url(seed):
    """An image of one of two sizes."""
    content = vlms.image(seed, 64, 64 if seed % 2 else 96)
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def turn(role, text):
    return {"role": role, "content": text}


class Plain:
    """A model of a folder as transformers has it."""

    def __init__(self, folder):
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).train()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor = load_processor(folder, self.model.config, self.tokenizer)

    def text(self, messages, **more):
        """A rendered chat; `<image>` in texts is an image."""
        shown = []
        for one in messages:
            first, *others = one["content"].split("<image>")
            parts = [{"type": "text", "text": first}] if first else []
            for text in others:
                parts += [{"type": "image"}, {"type": "text", "text": text}]
            shown.append({"role": one["role"], "content": parts})
        return self.tokenizer.apply_chat_template(shown, tokenize=False, **more)

    def processed(self, text, urls):
        """What the processor makes of a rendered chat."""
        contents = [base64.b64decode(url.partition(",")[2]) for url in urls]
        images = [Image.open(io.BytesIO(content)).convert("RGB") for content in contents]
        return self.processor(text=[text], images=images or None, return_tensors="pt", add_special_tokens=False)

    def logprobs(self, text, urls):
        """The ids of a rendered chat, and the log-prob of each of them but the first."""
        made = self.processed(text, urls)
        logprobs = self.model(**made).logits[0, :-1].log_softmax(-1)
        ids = made["input_ids"][0]
        return ids.tolist(), logprobs.gather(-1, ids[1:, None])[:, 0]

    def likeliest(self, text, urls, count):
        """The text of the likeliest continuation, each token by a forward pass of all before."""
        made, banned = self.processed(text, urls), placeholder_ids(self.model.config)
        size = made["input_ids"].shape[1]
        for _ in range(count):
            with torch.no_grad():
                logits = self.model(**made).logits[0, -1].index_fill(0, torch.tensor(banned), -torch.inf)
            token = logits.argmax()
            for name, added in (("input_ids", token), ("attention_mask", 1), *((name, 0) for name in TOKEN_KINDS)):
                if name in made:
                    made[name] = torch.cat([made[name], torch.full((1, 1), int(added))], 1)
            if token in self.model.generation_config.eos_token_id:
                break
        return self.tokenizer.decode(made["input_ids"][0, size:], skip_special_tokens=True)

    def ids(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def assert_same_gradients(model, plain, most):
    """Each parameter has a gradient in both or in none; their difference, as a share of the norm."""
    gap = norm = 0.0
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        ours, theirs = parameter.grad, expected[name].grad
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            gap += float((ours - theirs).square().sum())
            norm += float(theirs.square().sum())
    assert gap**0.5 < most * norm**0.5
