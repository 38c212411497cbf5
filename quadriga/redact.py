# SPDX-License-Identifier: Apache-2.0
"""Hides API keys, tokens and passwords in everything that is printed, logged or written.

A value is hidden if its name says that it is a secret, or if it looks like one regardless of its name. `api_key`,
`AWS_SECRET_ACCESS_KEY` and `Authorization` are names of secrets; `pad_token`, `max_tokens`, `prompt_key` and
`api_key_env` are not. Numbers and booleans are never hidden.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

HIDDEN = "<hidden>"

# The words of a name: `dbPassword_2` consists of db, Password and 2.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_PART = re.compile(r"password|passwd|passphrase|apikey", re.IGNORECASE)
_SECRET_WORD = re.compile(r"(?:pwd|secret|credential|authorization|cookie)s?")
# Words of secrets only at the end of a name: `db_pass` is a password, `pass_rate` and `auth_mode` are not.
_SECRET_LAST_WORD = re.compile(r"auth|bearer|pass|pat|jwt")
# Ends of words that are written together: `dbpass`, `mysecret`, but not `compass` or `bypass`.
_SECRET_ENDING = re.compile(
    r"(?<!^com)(?<!^by)(?<!^sur)(?<!^tres)(?<!^over)(?<!^under)(?<!^encom)pass$|secrets?$"
)
# The word before `key` in the name of a secret: its purpose, or the service that it opens.
_BEFORE_KEY = re.compile(
    r"api|access|secret|private|auth|encryption|signing|master|account|service"
    r"|judge|server|sandbox|search|client|admin|webhook|ssh|llm|storage"
    r"|openai|anthropic|azure|google|gemini|aws|gcp|hf|huggingface|wandb|mlflow|swanlab|mistral|cohere"
    r"|groq|together|fireworks|deepseek|dashscope|qwen|openrouter|nvidia|ngc|replicate|xai|grok"
    r"|perplexity|cerebras|modal|runpod|serper|serpapi|tavily|bing|slack|github|gitlab|npm"
    r"|langsmith|langfuse|comet|neptune|clearml|zhipu|moonshot|minimax|stripe|twilio|sendgrid"
    r"|telegram|datadog|sentry"
)
# The word before `token` in the name of a token of a vocabulary.
_BEFORE_VOCABULARY_TOKEN = re.compile(
    r"pad|eos|bos|unk|mask|cls|sep|image|img|video|audio|vision|stop|special|start|end|begin|per"
    r"|think|boi|eoi|extra|first|last|next"
)
# The last word of a name that is not a secret itself but, say, the file that holds one.
_ABOUT_SECRET = re.compile(r"env|file|path|name|url|uri|ids?|type|len|length|count|level|budget")
# Keys that can be recognized by their beginning.
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
# Secrets inside the address of a server.
_IN_ADDRESSES = {
    "user and password": r"(?<=://)[^\s/:@]{0,200}:[^\s/@]{1,200}(?=@)",
    "hook of Slack": r"(?<=hooks\.slack\.com/)[\w/-]{10,}",
    "signature of Azure": r"(?<=[?&]sig=)[\w%+/=-]{10,}",
}
_PRIVATE_KEY = r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[^-]*(?:-----END [A-Z ]{0,30}-----)?"
_LOOKS_SECRET = re.compile(
    "|".join(
        [rf"(?<![\w-])(?:{'|'.join(_BY_VENDOR.values())})", *_IN_ADDRESSES.values(), _PRIVATE_KEY]
    )
)
_AUTHORIZATION = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{8,}", re.IGNORECASE)
# A name before a value, as in `name: value` and `"name"="value"`. The possessive `++` tries each name once, so that
# the search takes time linear in the text.
_NAME_OF_VALUE = re.compile(
    r"(?<![\w-])([\w-]{3,}+)(?:\\?[\"'])?\s{0,3}[:=]\s{0,3}(?:\\?[\"'])?"
    r"(?!(?i:Bearer|Basic)\s|<hidden>)(?=[^\s\"'\\,;&)}\]]{6})"
)
_VALUE = re.compile(r"[^\s\"'\\,;&)}\]]+")


def is_secret(name: str) -> bool:
    """Whether the name of a value, which may be dotted, says that the value is a secret."""
    name = name.rpartition(".")[2]
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or _ABOUT_SECRET.fullmatch(words[-1]):
        return False
    last_word = words[-1]
    # Tokens of a vocabulary are not secrets: `eos_token` is not, but `hub_token` is.
    if last_word == "token":
        return len(words) == 1 or not _BEFORE_VOCABULARY_TOKEN.fullmatch(words[-2])
    if _SECRET_PART.search(name) or _SECRET_LAST_WORD.fullmatch(last_word):
        return True
    if any(_SECRET_WORD.fullmatch(word) for word in words) or _SECRET_ENDING.search(last_word):
        return True
    for before, word in pairwise(words):
        if word in ("key", "keys") and _BEFORE_KEY.fullmatch(before):
            return True
    is_environment_variable = name.isupper() and len(words) > 1
    return is_environment_variable and last_word == "key"


def redact(value: Any, name: str = "") -> Any:
    """Copy a tree of plain values, such as a configuration, and replace each secret by `HIDDEN`.

    Args:
        value: mappings, lists and tuples of strings and other values.
        name: name of the tree. If it is that of a secret, all strings in the tree are secrets.

    Returns:
        The copy. Tuples become lists.
    """
    if isinstance(value, Mapping):
        # Below the name of a secret, that name counts rather than the keys.
        is_named_secret = is_secret(name)
        return {
            key: redact(entry, name if is_named_secret else str(key))
            for key, entry in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact(entry, name) for entry in value]
    if not isinstance(value, str) or not value:
        return value
    # Placeholders such as <token>, [MASK] and ${TOKEN} are not secrets.
    is_placeholder = value[0] + value[-1] in ("<>", "[]", "$}")
    if is_secret(name) and not is_placeholder:
        return HIDDEN
    return redact_text(value)


def redact_text(text: str) -> str:
    """Replace each secret in a text by `HIDDEN`, in time linear in the length of the text."""
    text = _LOOKS_SECRET.sub(HIDDEN, text)
    text = _AUTHORIZATION.sub(rf"\1 {HIDDEN}", text)
    # Now values that follow the name of a secret, whatever they look like.
    parts = []
    end = 0  # end of the last value that was replaced
    for match in _NAME_OF_VALUE.finditer(text):
        # A name inside a replaced value does not count.
        if match.start() >= end and is_secret(match[1]):
            parts += [text[end : match.end()], HIDDEN]
            # There is a match: the pattern of the name demands that a value follows.
            end = _VALUE.match(text, match.end()).end()
    return "".join([*parts, text[end:]])


def hidden_names(value: Any, name: str) -> Iterator[str]:
    """Yield the dotted names of the values that `redact` has hidden.

    Args:
        value: a tree of plain values.
        name: name of the tree, with which the dotted names begin.
    """
    if isinstance(value, Mapping | list | tuple):
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, entry in entries:
            yield from hidden_names(entry, f"{name}.{key}")
    elif isinstance(value, str) and HIDDEN in value:
        yield name


def remove_hidden(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a tree without the entries in which `redact` has hidden a value."""
    remaining = {}
    for key, entry in tree.items():
        if isinstance(entry, Mapping):
            remaining[key] = remove_hidden(entry)
        elif not any(hidden_names(entry, key)):
            remaining[key] = entry
    return remaining
