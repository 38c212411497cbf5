# SPDX-License-Identifier: Apache-2.0
"""What is hidden as a key, a token or a password, what is not, and that it takes linear time."""

import time

import pytest

from quadriga.errors import RewardError
from quadriga.redact import HIDDEN, hidden_names, is_secret, redact, redact_text

SECRET = """password db_password PGPASSWORD passwords passphrase api_key apiKey APIKEY x-api-key api_keys OPENAI_API_KEY
    AWS_SECRET_ACCESS_KEY client_secret credentials token hf_token HF_TOKEN authToken refresh_token X-Auth-Token
    Authorization auth Cookie DB_PASS MYSQL_PWD GITHUB_PAT DASHSCOPE_KEY private_key _redis_password
    env_vars.WANDB_API_KEY judge_key openai_key wandb_key azure_key groqKey anthropic_key pass smtp_pass dbpass passwd
    mysecret mysecrets secret jwt id_jwt github_pat pat auth basic_auth"""
OPEN = """max_tokens
    max_new_tokens pad_token_id pad_token eos_token bos_token image_token stop_tokens token_level tokenizer
    tokens_per_s ppo_max_token_len_per_gpu stop_token_ids prompt_key image_key reward_fn_key messages_key api_key_env
    password_file token_url key monkey keyboard pass_k num_passes compass author KEY secret.temperature
    bypass_mode bypass overpass pass_rate passage authority secretary auth_mode response_key video_key chosen_key
    tools_key sort_key pattern path jwt_algorithm pat_count"""
KEYS = [
    "sk-proj-Ab3dEf6hIj9kLmNo", "sk-ant-api03-abcdefghijklmnop", "hf_AbCdEfGhIjKlMnOpQr", "ghp_0123456789abcdefABCD",
    "github_pat_11ABCDEFG0123456789", "glpat-abcdefghij0123456789", "AKIAIOSFODNN7EXAMPLE", "xoxb-123456789012-abc",
    "wandb_v1_AbCdEfGhIjKlMnOpQr", "nvapi-AbCdEfGhIjKlMnOp_Qr", "gsk_AbCdEfGhIjKlMnOpQr", "npm_AbCdEfGhIjKlMnOpQr",
    "r8_AbCdEfGhIjKlMnOpQr",
    "AIza" + "SyA1234567890abcdefghijklmnopqrstuv", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc-_123",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc=\n-----END RSA PRIVATE KEY-----",
]  # fmt: skip


def test_names() -> None:
    assert [name for name in SECRET.split() if not is_secret(name)] == []
    assert [name for name in OPEN.split() if is_secret(name)] == []


@pytest.mark.parametrize("key", KEYS)
def test_values_that_look_like_keys(key: str) -> None:
    """Under any name, and in the middle of a text."""
    assert redact({"note": key}) == {"note": HIDDEN}
    assert redact_text(f"it said: {key}, twice") == f"it said: {HIDDEN}, twice"


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("Authorization: Bearer abc.def-123", "Authorization: Bearer <hidden>"),
        (
            "GET http://me:pass@host:80/v1?api_key=12345678&n=1",
            "GET http://<hidden>@host:80/v1?api_key=<hidden>&n=1",
        ),
        (
            "{'x-api-key': 'opensesame', 'n': 'opensesame'}",
            "{'x-api-key': '<hidden>', 'n': 'opensesame'}",
        ),
        (
            "POST https://hooks.slack.com/services/T0/B0/abc123 200",
            "POST https://hooks.slack.com/<hidden> 200",
        ),
        ("az://c/f?sv=1&sig=abc%2Fdef123%3D&se=2 gone", "az://c/f?sv=1&sig=<hidden>&se=2 gone"),
        ("a.env_vars.MY_KEY=opensesame b", "a.env_vars.MY_KEY=<hidden> b"),
        ('{\\"token\\": \\"opensesame\\"}', '{\\"token\\": \\"<hidden>\\"}'),
    ],
)
def test_texts(text: str, hidden: str) -> None:
    assert redact_text(text) == hidden == redact_text(hidden)


@pytest.mark.parametrize(
    "text",
    [
        "task-sk-learn-something-long-1", "data.tokenizer=HuggingFaceTB/SmolLM2", "max_tokens: 4096000", "http://h:80/a",
        'Set "pad_token" in its tokenizer_config.json.', "token: got 5, expected text", "hf_overrides_of_the_model",
        "12:30:45", "mailto:me@host", "Bearer of news",
    ],
)  # fmt: skip
def test_texts_that_stay(text: str) -> None:
    assert redact_text(text) == text


def test_trees() -> None:
    """Numbers stay, and so do markers of a tokenizer; under a name that is secret, all texts are hidden."""
    tree = {
        "env_vars": {"HF_TOKEN": "a", "MODE": "b", "N_TOKEN": 3},
        "credentials": {"user": "me", "other": [{"x": "y"}]},
        "headers": [{"Authorization": "Basic abcdefgh"}],
        "mark_token": "<|x|>", "sep_token": "|", "password": "", "url": "https://me:it@host/x",
    }  # fmt: skip
    hidden = redact(tree)
    assert hidden == {
        "env_vars": {"HF_TOKEN": HIDDEN, "MODE": "b", "N_TOKEN": 3},
        "credentials": {"user": HIDDEN, "other": [{"x": HIDDEN}]},
        "headers": [{"Authorization": HIDDEN}],
        "mark_token": "<|x|>", "sep_token": "|", "password": "", "url": f"https://{HIDDEN}@host/x",
    }  # fmt: skip
    names = [
        "t.env_vars.HF_TOKEN",
        "t.credentials.user",
        "t.credentials.other.0.x",
        "t.headers.0.Authorization",
        "t.url",
    ]
    assert list(hidden_names(hidden, "t")) == names


def test_errors_hide_keys() -> None:
    error = RewardError("judge, https://me:opensesame@host", got="401 for 'Bearer opensesame'")
    assert "opensesame" not in str(error) and "judge, https://<hidden>@host" in str(error)


NASTY = [
    "a",
    "a-",
    "sk-",
    "://a:",
    "Bearer ",
    "password=",
    "a=",
    ": ",
    "-----BEGIN ",
    "eyJabcdefgh.",
    "x_",
    '\\"',
    "A",
]


@pytest.mark.parametrize("piece", NASTY)
def test_time_is_linear(piece: str) -> None:
    """Ten times the text may take fifty times as long: a hundred is what quadratic would be."""

    def seconds(length: int) -> float:
        text, times = (piece * length)[:length], []
        for _ in range(3):
            begun = time.process_time()
            redact_text(text)
            times.append(time.process_time() - begun)
        return min(times)

    assert seconds(200_000) < 50 * max(seconds(20_000), 1e-3)
