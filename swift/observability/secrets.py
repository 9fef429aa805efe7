"""Masks for what must never reach a file or a terminal: tokens, keys, secrets, passwords."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.flags import SECRET

if TYPE_CHECKING:
    import yaml

MASK = "***"
_SECRET_NAME = re.compile(
    r"(?:(?:api_?key|token|secret|passw(?:or)?d|passphrase|credentials?|authorization)"
    r"|(?:^|_)(?:key|auth|pass|pat|pwd|cookie))$"
)
_OF_TOKENIZERS = re.compile(
    r"(?:^|_)(?:bos|eos|eot|pad|unk|sep|cls|mask|image|video|audio|vision|start|end|stop)_token$"
)
_HARMLESS = re.compile(
    r"NPROC_PER_NODE|NNODES|NODE_RANK|RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|PORT|HF_HOME|USE_HF|PYTHON\w+"
    r"|(?:CUDA|NVIDIA|NCCL|GLOO|OMP|MKL|OPENBLAS|TORCH|PYTORCH|TORCHINDUCTOR|TRITON|XLA|VLLM|RAY|DS|SWIFT|HF_HUB"
    r"|TRANSFORMERS|TOKENIZERS)_\w+|(?:WANDB|SWANLAB)_(?:PROJECT|MODE|NAME|DIR|ENTITY)"
)
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_USER = re.compile(r"(?P<scheme>[a-zA-Z][\w+.-]*://)(?P<user>[^/\s:@?#]*)(?P<password>:[^/\s]*)?@")
_ADDRESS = r"(?:host|url|address|proxy|endpoint|server)s?"
_LOGIN = r"(?P<user>[^\s/:@]+):[^\s/@]+@"
_BARE = re.compile(rf"(?P<start>--?(?:[\w-]+[_-])?{_ADDRESS}[:=]?\s*){_LOGIN}")
_VALUE = r"(?P<value>\"[^\"]*\"|'[^']*'|[^&;\s#\"',}\])]+)"
_PAIR = re.compile(rf"(?P<start>(?<![\w.-])(?P<name>[\w.-]+)=){_VALUE}")
_OPTION = re.compile(rf"(?P<start>(?<!\S)(?P<name>--?[a-zA-Z][\w-]*)\s+)(?!-){_VALUE}")
_MEMBER = re.compile(r"(?P<start>(?P<quote>[\"'])(?P<name>[\w. -]+)(?P=quote)\s*:\s*)(?P<value>\"(?:[^\"\\]|\\.)*\")")


def is_secret(name: str) -> bool:
    """Whether a setting, an alias of a flag, a variable or a key of this name holds a secret.

    Flags declare it (`swift.flags.Details.secret`); for other names a pattern decides.

    >>> [is_secret(name) for name in ("--hub-token", "HF_TOKEN", "apiKey", "PGPASSWORD", "max_tokens", "pad_token")]
    [True, True, True, True, False, False]
    """
    plain = re.sub(r"[-. ]", "_", name.lstrip("-+"))
    if plain in SECRET:
        return SECRET[plain] is True
    words = _HUMP.sub("_", plain).lower()
    return bool(_SECRET_NAME.search(words)) and not _OF_TOKENIZERS.search(words)


def mask_variable(name: str, value: Any) -> Any:
    """The value of a variable of the environment, which is a secret unless it is known to be none.

    >>> mask_variable("DB", "hunter2"), mask_variable("NPROC_PER_NODE", 2)
    ('***', 2)
    """
    harmless = _HARMLESS.fullmatch(name) and not is_secret(name)
    return mask("", value) if harmless or value in (None, "") else MASK


def mask_text(text: str) -> str:
    """`text` without passwords and tokens of URLs, and without secrets of JSON and of commands.

    >>> mask_text("http://me:hunter2@host/x?api_key=hunter2&page=2")
    'http://me:***@host/x?api_key=***&page=2'
    >>> mask_text('{"name": "x", "token": "hunter2"}')
    '{"name": "x", "token": "***"}'
    >>> mask_text("ng_run +policy_api_key=hunter2 --password hunter2 --host me:hunter2@here --port 5")
    'ng_run +policy_api_key=*** --password *** --host me:***@here --port 5'
    """
    text = _USER.sub(lambda found: f"{found['scheme']}{found['user'] + ':' if found['password'] else ''}{MASK}@", text)
    text = _BARE.sub(rf"\g<start>\g<user>:{MASK}@", text)
    text = _PAIR.sub(lambda found: found["start"] + (MASK if is_secret(found["name"]) else found["value"]), text)
    text = _OPTION.sub(lambda found: found["start"] + (MASK if is_secret(found["name"]) else found["value"]), text)
    return _MEMBER.sub(
        lambda found: found["start"] + (f'"{MASK}"' if is_secret(found["name"]) else found["value"]), text
    )


def mask(name: str, value: Any) -> Any:
    """`value` with secrets replaced by `***`: all of it under a secret's name, and what `mask_text` finds elsewhere."""
    if SECRET.get(re.sub("-", "_", name.lstrip("-"))) is False:
        return value
    if isinstance(value, dict):
        each = mask_variable if name == "ENV" else mask
        return {key: each(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [mask(name, item) for item in value]
    if is_secret(name) and value not in (None, "", True, False):
        return MASK
    if not isinstance(value, str):
        return value
    if re.search(rf"(?:^|_){_ADDRESS}$", name.lstrip("-").replace("-", "_")):  # without a scheme, too
        value = re.sub(rf"^{_LOGIN}", rf"\g<user>:{MASK}@", value)
    return mask_text(value)


def is_masked(name: str, value: Any) -> bool:
    """Whether `mask` has replaced a part of the value.

    >>> is_masked("api_key", "***"), is_masked("stop_words", "***"), is_masked("url", "http://me:***@host")
    (True, False, True)
    """
    if isinstance(value, dict):
        return any(is_masked(str(key), item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return any(is_masked(name, item) for item in value)
    return isinstance(value, str) and MASK in value and mask(name, value.replace(MASK, "x")) == value


def mask_argv(argv: Sequence[str]) -> list[str]:
    """A command line without its secrets.

    >>> mask_argv(["--api_key", "abc", "--hub-token=xyz", "--seed", "1"])
    ['--api_key', '***', '--hub-token=***', '--seed', '1']
    """
    masked, name = [], ""
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            masked.append(name + equals + mask(name, value))
        else:
            masked.append(mask(name, word))
    return masked


def mask_config(path: Path) -> str:
    """A config file without its secrets: as it is if it has none, else without its comments, which may hold more."""
    import yaml

    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        settings = json.loads(text)
        masked = mask("", settings)
        return text if masked == settings else json.dumps(masked, indent=1, ensure_ascii=False)
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    comments = " ".join(re.findall("#.*", text))
    if root is None or not (_hide("", root) or any(map(is_secret, re.findall(r"([\w-]+)[\"']?\s*[:=]", comments)))):
        return text
    return yaml.serialize(root, allow_unicode=True, width=math.inf)


def _hide(name: str, node: yaml.Node) -> bool:
    """Mask the secrets below a node; returns whether there were any."""
    if SECRET.get(name) is False:
        return False
    if not isinstance(node.value, str):
        pairs = [(part[0].value, part[1]) if isinstance(part, tuple) else (name, part) for part in node.value]
        if name == "ENV":
            return sum(_hide_value(value, mask_variable(str(key), value.value)) for key, value in pairs) > 0
        return sum(_hide(str(key), value) for key, value in pairs) > 0  # all of them
    return _hide_value(node, mask(name, node.value))


def _hide_value(node: yaml.Node, masked: Any) -> bool:
    if node.value == masked:
        return False
    node.value, node.tag = masked, "tag:yaml.org,2002:str"
    return True
