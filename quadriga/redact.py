# SPDX-License-Identifier: Apache-2.0
"""Keys, tokens and passwords are hidden in whatever is printed, written or logged: by name, and by how they look.

`api_key`, `AWS_SECRET_ACCESS_KEY` and `Authorization` name one; `pad_token`, `max_tokens`, `prompt_key` and
`api_key_env` do not. Numbers and booleans are never hidden. A value of any name that looks like a key is hidden too.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

HIDDEN = "<hidden>"
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ANYWHERE = re.compile(r"password|passwd|passphrase|apikey", re.IGNORECASE)
_ALONE = {"pwd", "secret", "credential", "authorization", "cookie"}
# These name a secret as the last word: `db_pass` does, `pass_rate` and `auth_mode` do not.
_LAST = {"auth", "bearer", "pass", "pat", "jwt"}
# Words that are written together with another: `dbpass`, `mysecret`.
_ENDS = re.compile(
    r"(?<!^com)(?<!^by)(?<!^sur)(?<!^tres)(?<!^over)(?<!^under)(?<!^encom)pass$|secrets?$"
)
_BEFORE_KEY = {
    "api",
    "access",
    "secret",
    "private",
    "auth",
    "encryption",
    "signing",
    "master",
    "account",
    "service",
}
# Judges, servers and vendors, whose key is one to them.
_OWNERS_OF_KEYS = re.compile(
    r"judge|server|sandbox|search|client|admin|webhook|ssh|llm|storage|openai|anthropic|azure|google|gemini|aws|gcp|hf"
    r"|huggingface|wandb|mlflow|swanlab|mistral|cohere|groq|together|fireworks|deepseek|dashscope|qwen|openrouter"
    r"|nvidia|ngc|replicate|xai|grok|perplexity|cerebras|modal|runpod|serper|serpapi|tavily|bing|slack|github|gitlab|npm"
    r"|langsmith|langfuse|comet|neptune|clearml|zhipu|moonshot|minimax|stripe|twilio|sendgrid|telegram|datadog|sentry"
)
_BEFORE_TOKEN = {
    "pad", "eos", "bos", "unk", "mask", "cls", "sep", "image", "img", "video", "audio", "vision", "stop", "special",
    "start", "end", "begin", "per", "think", "boi", "eoi", "extra", "first", "last", "next",
}  # fmt: skip
# What such a name says about the key without being it.
_ABOUT = {
    "env",
    "file",
    "path",
    "name",
    "url",
    "uri",
    "id",
    "ids",
    "type",
    "len",
    "length",
    "count",
    "level",
    "budget",
}
# What the keys of vendors look like from their first character on.
_BY_VENDOR = {
    "OpenAI, Anthropic": r"sk-(?=[\w-]*\d)[\w-]{16,}",
    "Hugging Face": r"hf_[A-Za-z0-9]{16,}",
    "GitHub": r"gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}",
    "GitLab": r"glpat-[\w-]{16,}",
    "Slack": r"xox[abeprs]-[\w-]{10,}",
    "Amazon": r"(?:AKIA|ASIA)[A-Z0-9]{12,}",
    "Google": r"AIza[\w-]{30,}",
    "Weights & Biases": r"wandb_v\d_\w{16,}",
    "NVIDIA": r"nvapi-[\w-]{16,}",
    "Groq": r"gsk_[A-Za-z0-9]{16,}",
    "npm": r"npm_[A-Za-z0-9]{16,}",
    "Replicate": r"r8_[A-Za-z0-9]{16,}",
    "JSON Web Token": r"eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*",
}
# What follows this text in an address, or stands between these.
_IN_ADDRESSES = {
    "user and password": r"(?<=://)[^\s/:@]{0,200}:[^\s/@]{1,200}(?=@)",
    "hook of Slack": r"(?<=hooks\.slack\.com/)[\w/-]{10,}",
    "signature of Azure": r"(?<=[?&]sig=)[\w%+/=-]{10,}",
}
_PRIVATE_KEY = r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[^-]*(?:-----END [A-Z ]{0,30}-----)?"
_LOOKS = re.compile(
    "|".join(
        [rf"(?<![\w-])(?:{'|'.join(_BY_VENDOR.values())})", *_IN_ADDRESSES.values(), _PRIVATE_KEY]
    )
)
_SCHEME = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{8,}", re.IGNORECASE)
# Possessive: a name is tried once, however long it is.
_NAMED = re.compile(
    r"(?<![\w-])([\w-]{3,}+)(?:\\?[\"'])?\s{0,3}[:=]\s{0,3}(?:\\?[\"'])?"
    r"(?!(?i:Bearer|Basic)\s|<hidden>)(?=[^\s\"'\\,;&)}\]]{6})"
)
_VALUE = re.compile(r"[^\s\"'\\,;&)}\]]+")


def is_secret(name: str) -> bool:
    """Whether a text under this name, or dotted name, is a key, a token or a password."""
    name = name.rpartition(".")[2]
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] in _ABOUT:
        return False
    before, last = words[-2] if len(words) > 1 else "", words[-1]
    if last == "token":
        return before not in _BEFORE_TOKEN
    if (
        _ANYWHERE.search(name)
        or last in _LAST
        or any(one.removesuffix("s") in _ALONE for one in words)
    ):
        return True
    if _ENDS.search(last):
        return True
    owners = [owner for owner, word in pairwise(words) if word in ("key", "keys")]
    if any(owner in _BEFORE_KEY or _OWNERS_OF_KEYS.fullmatch(owner) for owner in owners):
        return True
    # A variable of the environment.
    return name.isupper() and len(words) > 1 and last == "key"


def redacted(value: Any, name: str = "") -> Any:
    """A tree of plain values, such as a configuration, with `HIDDEN` for each key; `name` is its own."""
    if isinstance(value, Mapping):
        named = is_secret(name)
        return {key: redacted(one, name if named else str(key)) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(one, name) for one in value]
    if not isinstance(value, str) or not value:
        return value
    is_marker = value[0] + value[-1] in ("<>", "[]", "$}")
    return HIDDEN if is_secret(name) and not is_marker else redacted_text(value)


def redacted_text(text: str) -> str:
    """A text with `HIDDEN` for each key in it, in time that is linear in its length."""
    text = _SCHEME.sub(rf"\1 {HIDDEN}", _LOOKS.sub(HIDDEN, text))
    parts, end = [], 0
    for found in _NAMED.finditer(text):
        if found.start() >= end and is_secret(found[1]):
            parts += [text[end : found.end()], HIDDEN]
            end = _VALUE.match(text, found.end()).end()
    return "".join([*parts, text[end:]])


def hidden_names(value: Any, name: str) -> Iterator[str]:
    """Dotted names of what was hidden in a tree, which `name` names."""
    if isinstance(value, Mapping | list | tuple):
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, one in entries:
            yield from hidden_names(one, f"{name}.{key}")
    elif isinstance(value, str) and HIDDEN in value:
        yield name
