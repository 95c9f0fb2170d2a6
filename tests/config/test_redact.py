"""Every format of a token, every kind of name and every form of a variable is redacted, and ordinary text stays."""

import json
import random
import re
import string
import time
from re import _constants as kind  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import pytest

from tasks.secrets import redact
from tasks.secrets.patterns import FORMATS, is_secret_name
from tests.support.workspaces import demo_params

LETTERS = string.ascii_letters + string.digits
CLASSES = {kind.CATEGORY_DIGIT: string.digits, kind.CATEGORY_WORD: LETTERS + "_"}


def sample(parsed: Any, choose: random.Random) -> str:
    """A text that matches a parsed pattern."""
    text = ""
    for what, value in parsed:
        if what is kind.LITERAL:
            text += chr(value)
        elif what is kind.IN:
            text += choose.choice([char for part in value for char in members(*part)])
        elif what is kind.MAX_REPEAT:
            least, _, inner = value
            text += "".join(sample(inner, choose) for _ in range(least))
        elif what is kind.SUBPATTERN:
            text += sample(value[-1], choose)
        elif what is kind.BRANCH:
            text += sample(choose.choice(value[1]), choose)
        else:
            assert what in (kind.ASSERT_NOT, kind.ASSERT), what
    return text


def members(what: Any, value: Any) -> str:
    if what is kind.RANGE:
        return "".join(map(chr, range(value[0], value[1] + 1)))
    return CLASSES[value] if what is kind.CATEGORY else chr(value)


@pytest.mark.parametrize("service", FORMATS)
def test_a_token_of_a_known_service_is_taken_out_wherever_it_stands(service):
    for seed in range(20):
        token = sample(parser.parse(FORMATS[service]), random.Random(seed))
        token = token[:-1] + "A" if token[-1] in ".-_" else token
        for text in (
            "{}",
            "x {} y",
            "push failed: '{}'",
            "https://host/path?a=b&t={}",
            '{{"a": "{}"}}',
            "a={},b",
            "a/{}",
        ):
            assert re.search(FORMATS[service], token)
            hidden = redact.redact(text.format(token))
            assert token not in hidden, hidden
            assert hidden.startswith(text.split("{}")[0].replace("{{", "{")), hidden
        assert redact.is_secret(f"see {token}")


LEAKED = {  # formats of the issue, as their services print them
    "glpat-" + "aB3-_" * 4: "GitLab",
    "AIza" + "aB3-_" * 7: "Google",
    "sk_live_" + "aB3" * 8: "Stripe",
    "npm_" + "aB3" * 12: "npm",
    "pypi-AgEIcHlwaS5vcmc" + "aB3-_" * 12: "PyPI",
}


@pytest.mark.parametrize("token", LEAKED)
def test_formats_that_leaked(token):
    assert redact.redact(f"login with {token} failed") == "login with *** failed"


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("GET https://a.blob.core.windows.net/c/f?sv=2024&sig=aB3%2Fxyz123%3D", "...?sv=2024&sig=***"),
        ("https://hooks.slack.com/services/T01/B02/x9y8z7", "https://hooks.slack.com/services/***"),
        ("https://discord.com/api/webhooks/123/aB3aB3", "https://discord.com/api/webhooks/***"),
        ("DPO_SERVE_TOKENS=team:aB3aB3aB3aB3aB3a", "DPO_SERVE_TOKENS=***"),
        ("client_secret: aB3aB3aB3", "client_secret: ***"),
        ('{"accessToken":"aB3aB3aB3"}', '{"accessToken":"***"}'),
        ("AZURE_SAS=aB3aB3aB3 DB_PASS='aB3aB3aB3'", "AZURE_SAS=*** DB_PASS='***'"),
        ("Cookie: session=aB3aB3aB3aB3", "Cookie: ***"),
        ("AccountName=x;AccountKey=aB3aB3aB3==;Suffix=y", "AccountName=x;AccountKey=***;Suffix=y"),
    ],
)
def test_addresses_assignments_and_headers(text, hidden):
    assert redact.redact(text).endswith(hidden.removeprefix("..."))


NAMES = """
DPO_SERVE_TOKENS API_TOKENS SOME_SECRETS DB_PASSWORDS DB_PASS DB_PW DB_PWD STORAGE_SAS SLACK_WEBHOOK DPO_WEBHOOK_URL
WEBHOOKS OPENAI_APIKEY APIKEY SESSION_COOKIE COOKIES GITHUB_PAT SENTRY_DSN PGPASSWORD GITHUB_TOKEN GITHUB_TOKEN_PROD
GITHUB_NEW_TOKEN OPENAI_API_KEY_2 OPENAI_API_KEY_OF_CI AWS_ACCESS_KEY_ID
AWS_SECRET_ACCESS_KEY MLFLOW_TRACKING_PASSWORD RAY_AUTH_TOKEN
PREFECT_SERVER_API_AUTH_STRING GOOGLE_CREDENTIALS_JSON SECRET_KEY_BASE AZURE_STORAGE_CONNECTION_STRING DPO_SIGNING_KEY
LDAP_BINDPW SMTPPASS SMTPPASS2 MYPASSWORD1 DBPWD MYSQL_PWD
JUDGE_KEY MY_PASSPHRASE REDIS_AUTH SLURM_JWT STORAGE_ACCOUNTKEY DATABASE_URL KAGGLE_KEY
"""
HARMLESS = """
TOKENIZERS_PARALLELISM MAX_TOKENS NUM_TOKENS TOKENS_PER_SECOND PAD_TOKEN EOS_TOKEN_ID PWD OLDPWD KEYBOARD MONKEY PATH
SSH_AUTH_SOCK TOKEN_BUDGET DPO_TRUSTED_KEYS PUBLIC_KEY XDG_SESSION_TYPE DESKTOP_SESSION BYPASS COMPASS RAY_AUTH_MODE
MAX_NEW_TOKENS KEY_VARIABLE HOSTNAME CUDA_VISIBLE_DEVICES
"""


@pytest.mark.parametrize("name", NAMES.split())
def test_the_value_of_a_variable_with_such_a_name_is_taken_out(name, monkeypatch):
    assert is_secret_name(name)
    monkeypatch.setenv(name, "plain-words-only")
    assert redact.redact("it was plain-words-only, twice") == "it was ***, twice"


@pytest.mark.parametrize("name", HARMLESS.split())
def test_a_variable_with_another_name_stays(name, monkeypatch):
    monkeypatch.setenv(name, "plain-words-only")
    assert redact.redact("it was plain-words-only, twice") == "it was plain-words-only, twice"


@pytest.mark.parametrize(
    ("value", "secrets", "open_"),
    [
        ("ada:first-word,bob:second-word", ["first-word", "second-word"], ["ada", "bob"]),
        ("ada=first-word\nbob=second-word\n", ["first-word", "second-word"], ["ada", "bob"]),
        ("first-word, second-word", ["first-word", "second-word"], []),
        ('{"ada": "first-word", "bob": {"x": "second-word"}}', ["first-word", "second-word"], ["ada", "bob"]),
        ('["first-word", "second-word"]', ["first-word", "second-word"], []),
        (json.dumps({"type": "account", "private_key": "first-word"}), ["first-word"], ["type", "account"]),
        ("Endpoint=https;AccountKey=first-word==;Suffix=windows", ["first-word=="], ["https", "windows"]),
        ("ada:hunter2", ["hunter2"], ["ada"]),
        (
            "https://a.b/first-word,https://c.d/second-word",
            ["/first-word", "https://c.d/second-word"],
            ["https", "a.b"],
        ),
        ("postgresql://ada:hunter2@db/prefect", ["hunter2"], ["prefect", "db"]),
    ],
)
def test_each_part_of_a_variable_with_several_is_taken_out(value, secrets, open_, monkeypatch):
    monkeypatch.setenv("SOME_TOKENS", value)
    for secret in secrets:
        assert redact.redact(f"got {secret} here") == "got *** here"
    for word in open_:
        assert redact.redact(f"got {word} here") == f"got {word} here"


def test_the_password_of_an_address_in_any_variable_is_taken_out_alone_too(monkeypatch):
    monkeypatch.setenv("DPO_MLFLOW_USERS", "postgresql://dpo:hunter2hunter2@h/x")
    monkeypatch.setenv("BROKERS", "redis://:p%40ss-one@a:1/0,redis://postgres:postgres@b:1/0")
    said = redact.redact("hunter2hunter2, p%40ss-one and p@ss-one of dpo in postgres")
    assert said == "***, *** and *** of dpo in postgres"
    monkeypatch.setenv("DPO_MLFLOW_USERS", "another")
    assert redact.redact("hunter2hunter2") == "hunter2hunter2"


ORDINARY = [
    "2026-11-19 20:01:02 train: step 120/4000 loss=0.5123 rewards/accuracies 0.71 tokens/s: 18233",
    "max_tokens: 512, token_budget=8192, tokens_per_second=12345.678, prompt_tokens: 81920000",
    "pad_token: <|endoftext|>, eos_token=<|reserved_special_token_12|>, pad_token_id: 128001234",
    "tokens: 19400000, tokens/s: 1.23e+05tok, num_tokens=123456789ab",
    "cache_key: 8a0ca03388c9c74285f30d57 sha256=8a0ca03388c9c74285f30d578a0ca03388c9c74285f30d57",
    "data/reference/8a0ca03388c9c74285f30d57/shard-00001.arrow of run nightly-2026-11-19-qwen2.5-0.5b-full",
    "hub:HuggingFaceTB/SmolLM2-135M-Instruct@93efa2f097d58c2a74874c7e644dbc9b0cee75a2",
    "https://huggingface.co/datasets/Anthropic/hh-rlhf/resolve/main/harmless-base/train.jsonl.gz?download=true",
    "https://host/download?key=data/pairs-2026.jsonl&code=python3.11",
    "http://127.0.0.1:5000/#/experiments/1/runs/0123456789abcdef0123456789abcdef?key=loss",
    "models:/dpo-demo@champion, version 12, gs://bucket/folder/pairs-2026.jsonl",
    "forward_pass: 12.5ms/step1 backward_pass=31.25ms/step1 monkey: banana12345678",
    "the risk-averse-and-task-oriented-assistant explains sk-learn and its_secret_garden",
    "uuid 123e4567-e89b-12d3-a456-426614174000, image sha256:0123456789abcdef0123456789abcdef0123456789abcdef",
    "ed25519 0f3b9c77aa0f3b9c77aa0f3b9c77aa0f3b9c77aa0f3b9c77aa0f3b9c77aa0f3b is this project's key",
    "a token: required; password: is missing. Basic English; bearer of bad news",
    "transformer.h.0.attn.c_attn.lora_A.default.weight torch.Size([16, 4096])",
    "key: value, keys: [chosen, rejected], author: anna1234567, authority=host12345678",
]


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_stays(text):
    assert redact.redact(text) == text


def test_a_field_with_the_name_of_a_secret_is_taken_out():
    content = {"ray": {"env": {"HF_TOKEN": "plain-words-only", "NCCL_DEBUG": "INFO"}}, "api_key": "aB3aB3aB3", "n": 1}
    hidden = {"ray": {"env": {"HF_TOKEN": "***", "NCCL_DEBUG": "INFO"}}, "api_key": "***", "n": 1}
    assert redact.redacted(content) == hidden
    kept = {
        "pad_token": "<|endoftext|>",
        "eos_token": "<|reserved_special_token_12|>",
        "key_variable": "JUDGE_KEY_1234",
    }
    assert redact.redacted(kept) == kept


def test_our_own_parameters_stay():
    params = demo_params()
    assert redact.redacted(params) == params


@pytest.mark.parametrize(
    "piece", ["A1", "a.b-", "x=:", "-", "key=", "'a' : ", "eyJ", "SG.", "https://a.b", "-----BEGIN A"]
)
def test_a_long_text_takes_time_in_proportion_to_its_length(piece):
    def seconds(length: int) -> float:
        text = piece * (length // len(piece))
        began = time.thread_time()
        redact.redact(text)
        return time.thread_time() - began

    assert seconds(1_000_000) < 5 + 100 * seconds(20_000)
