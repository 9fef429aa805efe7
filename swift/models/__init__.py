"""The policy and its parts: tokenizer, chat template, adapters, reference model.

A model is a local folder or a hub id. Weights come from safetensors files only, code from a repository
runs only with `--trust_remote_code true`. The models are plain `torch.nn.Module`s; the package has no training loops
and no engines.
"""

from swift.models.export import merge_adapter
from swift.models.policy import context_length, load_for_inference, load_policy
from swift.models.reference import ReferenceModel, load_reference, load_teacher
from swift.models.template import Template, load_template
from swift.models.tokenizer import load_chat, load_tokenizer

__all__ = [
    "ReferenceModel",
    "Template",
    "context_length",
    "load_chat",
    "load_for_inference",
    "load_policy",
    "load_reference",
    "load_teacher",
    "load_template",
    "load_tokenizer",
    "merge_adapter",
]
