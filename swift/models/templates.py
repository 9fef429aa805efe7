"""Chat templates for `--template NAME`: for base models without one, or with one that cannot be trained on.

Each is a Jinja text in the dialect of transformers. `qwen2_5` and `qwen3` are those of the models, thinking and tools
included, out of TRL's collection. In the others what an assistant says, end token included, stands between
`{% generation %}` and `{% endgeneration %}`, so the loss mask needs no guessing.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from swift.errors import ConfigError, suggest

_CHATML = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' -}}"
    "{%- if message.role == 'assistant' -%}"
    "{%- generation -%}{{- message.content + '<|im_end|>' -}}{%- endgeneration -%}{{- '\\n' -}}"
    "{%- else -%}{{- message.content + '<|im_end|>\\n' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

_QWEN = (
    "{%- if messages[0].role != 'system' -%}"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}{%- endif -%}" + _CHATML
)

_LLAMA3 = (
    "{{- bos_token -}}{%- for message in messages -%}"
    "{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' -}}"
    "{%- if message.role == 'assistant' -%}"
    "{%- generation -%}{{- message.content + '<|eot_id|>' -}}{%- endgeneration -%}"
    "{%- else -%}{{- message.content + '<|eot_id|>' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}"
    "{%- endif -%}"
)

_GEMMA_TURN = (
    "{%- if message.role == 'assistant' -%}{{- '<start_of_turn>model\\n' -}}"
    "{%- generation -%}{{- message.content + '<end_of_turn>' -}}{%- endgeneration -%}{{- '\\n' -}}"
)
_GEMMA_END = "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"

_GEMMA = (
    "{{- bos_token -}}{%- for message in messages -%}" + _GEMMA_TURN + "{%- else -%}"
    "{{- '<start_of_turn>' + message.role + '\\n' + message.content + '<end_of_turn>\\n' -}}" + _GEMMA_END
)

_GEMMA3 = (
    "{{- bos_token -}}{%- set ns = namespace(system='') -%}{%- for message in messages -%}" + _GEMMA_TURN + "{%- elif "
    "message.role == 'system' -%}{%- set ns.system = message.content + '\\n\\n' -%}"
    "{%- else -%}{{- '<start_of_turn>user\\n' + ns.system + message.content + '<end_of_turn>\\n' -}}"
    "{%- set ns.system = '' -%}" + _GEMMA_END
)

_PLAIN = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}"
    "{%- generation -%}{{- message.content + eos_token -}}{%- endgeneration -%}"
    "{%- else -%}{{- message.content + '\\n' -}}{%- endif -%}{%- endfor -%}"
)

TEMPLATES: dict[str, str] = {
    "chatml": _CHATML,
    "qwen": _QWEN,
    "llama3": _LLAMA3,
    "gemma": _GEMMA,
    "gemma3_text": _GEMMA3,
    "plain": _PLAIN,
}
"""Built-in templates, under the names of ms-swift. `qwen` is ChatML with a default system prompt. `gemma` has a system
turn, `gemma3_text` puts the system prompt before the question. `plain`, which is swift's own, has no roles at all."""

OF_MODELS = ("qwen2_5", "qwen3", "qwen3_training")
"""Names of templates that TRL ships as the models have them; qwen3_training keeps the thoughts of earlier turns."""

NAMES = (*TEMPLATES, *OF_MODELS)

_IM = ("<|im_start|>", "<|im_end|>")
_NEEDED_TOKENS = {
    **dict.fromkeys(("chatml", "qwen", *OF_MODELS), _IM),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    **dict.fromkeys(("gemma", "gemma3_text"), ("<start_of_turn>", "<end_of_turn>")),
}


def read_template(value: str) -> str:
    """The Jinja text of `--template`: a built-in name or a file.

    Raises:
        ConfigError: neither a known name nor a readable file.
    """
    if value in TEMPLATES:
        return TEMPLATES[value]
    if value in OF_MODELS:
        return _of_trl(value)
    path = Path(value).expanduser()
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"--template: {value}: not a UTF-8 text; save it as UTF-8") from error
    raise ConfigError(f"--template: {value}: neither a built-in name nor a Jinja file; {suggest(value, list(NAMES))}")


def missing_tokens(name: str, vocabulary: dict[str, int]) -> list[str]:
    """The marker tokens a built-in template needs and a vocabulary lacks; [] for templates from files."""
    return [token for token in _NEEDED_TOKENS.get(name, ()) if token not in vocabulary]


def _of_trl(name: str) -> str:
    spec = importlib.util.find_spec("trl")  # read, not imported: that takes seconds
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"--template: {name}: comes with TRL, which is not installed; pip install trl")
    folder = Path(next(iter(spec.submodule_search_locations)))
    return (folder / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
