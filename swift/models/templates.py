"""Chat templates for `--template NAME`: for base models without one, or with one that cannot be trained on.

Each is a Jinja text in the dialect of transformers. TRL's collection is offered under the names of its files: those of
the models, thinking and tools included, and their training templates (`qwen3_training`). In the built-in ones
assistant turns, end token included, stand between `{% generation %}` and `{% endgeneration %}`, so the loss mask is
exact.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import cast

from swift.errors import ConfigError, suggest
from swift.models.instruct_templates import INSTRUCT


def _turns(head: str, between: str, end: str, after: str = "", *, start: str = "") -> str:
    """Turns of any role: head, role, between, content, end, of which the model learns content and end, and after."""
    return (
        f"{start}{{%- for message in messages -%}}{{{{- '{head}' + message.role + '{between}' -}}}}"
        "{%- if message.role == 'assistant' -%}"
        f"{{%- generation -%}}{{{{- message.content + '{end}' -}}}}{{%- endgeneration -%}}"
        f"{{%- else -%}}{{{{- message.content + '{end}' -}}}}{{%- endif -%}}{{{{- '{after}' -}}}}{{%- endfor -%}}"
        f"{{%- if add_generation_prompt -%}}{{{{- '{head}assistant{between}' -}}}}{{%- endif -%}}"
    )


_BOS = "{{- bos_token -}}"
_CHATML = _turns("<|im_start|>", "\\n", "<|im_end|>", "\\n")
_PHI = _turns("<|", "|>\\n", "<|end|>", "\\n")

_QWEN = (
    "{%- if messages[0].role != 'system' -%}"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}{%- endif -%}" + _CHATML
)

_DEEPSEEK2 = (
    _BOS + "{%- for message in messages -%}{%- if message.role == 'assistant' -%}{{- '<｜Assistant｜>' -}}"
    "{%- generation -%}{{- message.content + eos_token -}}{%- endgeneration -%}"
    "{%- elif message.role == 'system' -%}{{- message.content + '\\n\\n' -}}"
    "{%- else -%}{{- '<｜User｜>' + message.content -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<｜Assistant｜>' -}}{%- endif -%}"
)

_MISTRAL1 = (
    _BOS + "{%- set ns = namespace(system='') -%}{%- for message in messages -%}{%- if message.role == 'assistant' -%}"
    "{%- generation -%}{{- ' ' + message.content + eos_token -}}{%- endgeneration -%}"
    "{%- elif message.role == 'system' -%}{%- set ns.system = message.content + '\\n\\n' -%}"
    "{%- else -%}{{- ' [INST] ' + ns.system + message.content + ' [/INST]' -}}{%- set ns.system = '' -%}"
    "{%- endif -%}{%- endfor -%}"
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
    "llama3": _turns("<|start_header_id|>", "<|end_header_id|>\\n\\n", "<|eot_id|>", start=_BOS),
    "llama4": _turns("<|header_start|>", "<|header_end|>\\n\\n", "<|eot|>", start=_BOS),
    "phi_3": _BOS + _PHI,
    "phi_35": _PHI,
    "falcon_h1": _BOS + _CHATML,
    "deepseek_v2": _DEEPSEEK2,
    "mistral_v1": _MISTRAL1,
    "gemma": _GEMMA,
    "gemma3_text": _GEMMA3,
    "plain": _PLAIN,
    **INSTRUCT,
}
"""Built-in templates, by names of ms-swift or Axolotl. `qwen` is ChatML with a default system prompt. `gemma` has a
system turn, `gemma3_text` puts the system prompt before the question. `plain`, which is swift's own, has no roles."""

_MARKER = re.compile(r"<[|\uff5c][^<>\s]*>|<[^<>\s]*[|\uff5c]>|<(?:start|end)_of_turn>")


def names() -> list[str]:
    """Names that `--template` accepts: the built-in ones, and those of TRL's files."""
    folder = _folder_of_trl()
    return [*TEMPLATES, *sorted({file.stem for file in folder.glob("*.jinja")} - TEMPLATES.keys() if folder else ())]


def read_template(value: str) -> str:
    """The Jinja text of `--template`: a built-in name, a file, or such a text itself.

    Raises:
        ConfigError: neither a known name nor a readable file.
    """
    if value in TEMPLATES:
        return TEMPLATES[value]
    if value in names():
        return (cast(Path, _folder_of_trl()) / f"{value}.jinja").read_text(encoding="utf-8")
    if "{{" in value or "{%" in value:
        return value
    path = Path(value).expanduser()
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"--template: {value}: not a UTF-8 text; save it as UTF-8") from error
    raise ConfigError(f"--template: {value}: neither a built-in name nor a Jinja file; {suggest(value, names())}")


def shown(value: str) -> str:
    """A value of `--template` in messages."""
    return "(a text in Jinja)" if "{{" in value or "{%" in value else value


def markers(rendered: str) -> list[str]:
    """The special tokens in a rendered chat, such as `<|im_end|>`."""
    return list(dict.fromkeys(_MARKER.findall(rendered)))


def _folder_of_trl() -> Path | None:
    spec = importlib.util.find_spec("trl")  # read, not imported: that takes seconds
    folder = next(iter(spec.submodule_search_locations or ()), None) if spec else None
    return Path(folder) / "chat_templates" if folder else None
