"""Chat templates for `--template NAME`: for base models without one, or with one that cannot be trained on.

Each is a Jinja text in the dialect of transformers. What an assistant says, end token included, stands
between `{% generation %}` and `{% endgeneration %}`, so the loss mask needs no guessing.
"""

from __future__ import annotations

from pathlib import Path

from swift.errors import ConfigError, suggest

_CHATML = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' -}}"
    "{%- if message.role == 'assistant' -%}"
    "{%- generation -%}{{- message.content + '<|im_end|>' -}}{%- endgeneration -%}{{- '\\n' -}}"
    "{%- else -%}{{- message.content + '<|im_end|>\\n' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
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

_GEMMA = (
    "{{- bos_token -}}{%- set ns = namespace(system='') -%}{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}{%- set ns.system = message.content + '\\n\\n' -%}"
    "{%- elif message.role == 'assistant' -%}{{- '<start_of_turn>model\\n' -}}"
    "{%- generation -%}{{- message.content + '<end_of_turn>' -}}{%- endgeneration -%}{{- '\\n' -}}"
    "{%- else -%}{{- '<start_of_turn>user\\n' + ns.system + message.content + '<end_of_turn>\\n' -}}"
    "{%- set ns.system = '' -%}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"
)

_PLAIN = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}"
    "{%- generation -%}{{- message.content + eos_token -}}{%- endgeneration -%}"
    "{%- else -%}{{- message.content + '\\n' -}}{%- endif -%}{%- endfor -%}"
)

TEMPLATES: dict[str, str] = {
    "chatml": _CHATML,
    "qwen": _CHATML,
    "qwen2_5": _CHATML,
    "qwen3": _CHATML,
    "llama3": _LLAMA3,
    "gemma": _GEMMA,
    "plain": _PLAIN,
}
"""Built-in templates; `qwen*` are ChatML without a default system prompt, `plain` has no roles at all."""

_NEEDED_TOKENS = {
    _CHATML: ("<|im_start|>", "<|im_end|>"),
    _LLAMA3: ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    _GEMMA: ("<start_of_turn>", "<end_of_turn>"),
}


def read_template(value: str) -> str:
    """The Jinja text of `--template`: a built-in name or a file.

    Raises:
        ConfigError: neither a known name nor a readable file.
    """
    if value in TEMPLATES:
        return TEMPLATES[value]
    path = Path(value).expanduser()
    if path.is_file():
        return path.read_text(encoding="utf-8")
    raise ConfigError(
        f"--template: {value}: neither a built-in name nor a Jinja file; {suggest(value, list(TEMPLATES))}"
    )


def missing_tokens(template: str, vocabulary: dict[str, int]) -> list[str]:
    """The marker tokens a built-in template needs and a vocabulary lacks; [] for templates from files."""
    return [token for token in _NEEDED_TOKENS.get(template, ()) if token not in vocabulary]
