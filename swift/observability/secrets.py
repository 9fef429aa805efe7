"""Masks for what must never reach a file or a terminal: tokens, keys, secrets, passwords."""

from __future__ import annotations

import re
from collections.abc import Sequence

MASK = "***"
_SECRET_NAME = re.compile(r"(?:^|_)(?:token|key|secret|password)$")
_URL_PASSWORD = re.compile(r"(?P<scheme>[a-zA-Z][\w+.-]*://[^/\s:@]*):[^/\s@]+@")


def is_secret(name: str) -> bool:
    """Whether a setting of this name (or alias of a flag) holds a secret."""
    return bool(_SECRET_NAME.search(name.lstrip("-").replace("-", "_").lower()))


def mask_text(text: str) -> str:
    """`text` without the passwords of URLs.

    >>> mask_text("http://me:hunter2@host/x")
    'http://me:***@host/x'
    """
    return _URL_PASSWORD.sub(rf"\g<scheme>:{MASK}@", text)


def mask_argv(argv: Sequence[str]) -> list[str]:
    """A command line without its secrets.

    >>> mask_argv(["--api_key", "abc", "--hub-token=xyz", "--seed", "1"])
    ['--api_key', '***', '--hub-token=***', '--seed', '1']
    """
    masked: list[str] = []
    secret = False
    for word in argv:
        if word.startswith("--"):
            name, equals, _ = word.partition("=")
            secret = is_secret(name) and not equals
            masked.append(f"{name}={MASK}" if equals and is_secret(name) else mask_text(word))
            continue
        masked.append(MASK if secret else mask_text(word))
    return masked
