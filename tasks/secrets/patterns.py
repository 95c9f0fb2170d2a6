"""What a secret looks like: the names of variables that hold one, and the tokens of known services.

The formats are those that gitleaks, detect-secrets and GitHub's secret scanning look for. These tools take milliseconds
for a line of a log. Here only a long run of letters and digits is compared with the formats: microseconds.
"""

import re
from functools import lru_cache

# Ends of words that make a name that of a secret wherever the word stands: PGPASSWORD, GITHUB_TOKEN_OF_CI.
STRONG = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|WEBHOOK|(API|ACCESS|ACCOUNT|PRIVATE|SECRET|MASTER)KEY)S?\d*$"
)
# Words that do so at the end of a name, and pairs of words that do so everywhere.
LAST = re.compile(
    r"_(API|ACCESS|ACCOUNT|PRIVATE|SIGNING)_KEYS?_|_(KEYS?|KEY_ID|COOKIES?|PATS?|JWTS?|DSN|PASS|PASSCODE|PW|PWD|SAS|CREDS|AUTH|AUTH_STRING|CONNECTION_STRING"
    r"|CONNECTION_URL|DATABASE_URL|[A-Z0-9]+(?<!COM)(?<!BY)(?<!TRES)(?<!SUR)(?<!ER)PASS\d*|[A-Z0-9]+PWD?\d*)$"
)
# Words after them that tell several secrets apart, and those that describe a secret instead of holding it.
SEVERAL = re.compile(
    r"_(\d+|DEV|TEST|STAGING|PROD|PRODUCTION|LIVE|OLD|NEW|PRIMARY|SECONDARY|BACKUP|RO|RW|JSON|BASE64|B64)$"
)
DESCRIBED = re.compile(
    r"_(FILE|PATH|DIR|FOLDER|NAME|TYPE|LENGTH|LIMIT|TTL|TIMEOUT|COUNT|VARIABLE|EXPIRY|MODE|SOCK|BUDGET)$"
)
# A tokenizer's tokens, and keys that everybody may know.
HARMLESS = re.compile(
    r"^(OLD)?PWD$|(^|_)(PUBLIC|TRUSTED|AUTHORIZED|HOST)_?KEYS?$|(^|_)TOKENS?_(PER|IDS?|S)(_|$)"
    r"|(^|_)(PAD|EOS|BOS|UNK|CLS|SEP|MASK|STOP|END|START|SPECIAL|IMAGE)_TOKENS?$"
    r"|(^|_)(MAX|MIN|NUM|NEW|TOTAL|PROMPT|RESPONSE|CHOSEN|REJECTED|ROW|TILE)_TOKENS$"
)


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether a variable or key of this name holds a secret."""
    words = "_".join(re.findall(r"[A-Z0-9]+", name[-128:].upper()))
    while SEVERAL.search(words):
        words = SEVERAL.sub("", words)
    if DESCRIBED.search(words) or HARMLESS.search(words):
        return False
    return any(map(STRONG.search, words.split("_"))) or bool(LAST.search(f"_{words}"))


# Each begins at a run's start or after a character that is neither a letter nor a digit.
FORMATS = {
    "1Password": r"ops_eyJ[\w-]{40,}",
    "Age": r"AGE-SECRET-KEY-1[0-9A-Z]{58}",
    "Airtable": r"pat[A-Za-z0-9]{14}\.[0-9a-f]{64}",
    "Anthropic": r"sk-ant-[\w-]{20,}",
    "Atlassian": r"AT[AC]TT3[\w-]{20,}",
    "AWS": r"(?:A3T[A-Z0-9]|AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}(?![A-Za-z0-9])",
    "AWS Bedrock": r"ABSK[A-Za-z0-9]{60,}",
    "Brevo": r"xkeysib-[0-9a-f]{64}",
    "Clojars": r"CLOJARS_[A-Za-z0-9]{60}",
    "Databricks": r"dapi[0-9a-f]{32}",
    "DigitalOcean": r"do[opr]_v1_[0-9a-f]{64}",
    "Docker": r"dckr_[po]at_[\w-]{20,}",
    "Doppler": r"dp\.(?:pt|st|ct|sa|scim|audit)\.[\w.-]{20,}",
    "Dropbox": r"sl\.[\w-]{60,}",
    "Dynatrace": r"dt0[a-z]\d\d\.[A-Z0-9]{24}\.[A-Z0-9]{64}",
    "Fly.io": r"fo1_[\w-]{40,}",
    "Figma": r"fig[dou]r?_[\w-]{36,}",
    "GitHub": r"gh[pousr]_[A-Za-z0-9]{20,}",
    "GitHub, fine-grained": r"github_pat_\w{20,}",
    "GitLab": r"gl(?:pat|dt|rt|rtr|cbt|ptt|ft|imt|agent|soat|oas|ffct|wt)-[\w.-]{20,}",
    "GitLab, runner": r"GR1348941[\w-]{20}",
    "Google": r"AIza[\w-]{35}",
    "Google OAuth": r"(?:GOCSPX-[\w-]{28}|ya29\.[\w-]{20,})",
    "Grafana": r"gl(?:c|sa)_[\w-]{32,}",
    "Groq": r"gsk_[A-Za-z0-9]{40,}",
    "Heroku": r"HRKU-[\w-]{30,}",
    "Hugging Face": r"(?:hf_|api_org_)[A-Za-z0-9]{16,}",
    "JWT": r"eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,}",
    "LangSmith": r"lsv2_[ps][tk]_[0-9a-f]{32}_[0-9a-f]{10}",
    "Linear": r"lin_(?:api|oauth)_[A-Za-z0-9]{32,}",
    "Mailchimp": r"[0-9a-f]{32}-us\d{1,2}(?![A-Za-z0-9])",
    "Mailgun": r"(?<![-_])(?:key|pubkey)-[0-9a-f]{32}",
    "Netlify": r"nfp_[A-Za-z0-9]{36}",
    "New Relic": r"NR(?:AK|JS|II|RA)-[\w-]{19,}",
    "Notion": r"(?:ntn_[A-Za-z0-9]{40,}|secret_[A-Za-z0-9]{43})",
    "npm": r"npm_[A-Za-z0-9]{36}",
    "Nvidia": r"nvapi-[\w-]{40,}",
    "OpenAI and others": r"sk-[\w-]{20,}",
    "Perplexity": r"pplx-[A-Za-z0-9]{40,}",
    "Pinecone": r"pcsk_\w{40,}",
    "PlanetScale": r"pscale_(?:tkn|pw|oauth)_[\w.-]{32,}",
    "Postman": r"PMAK-[0-9a-f]{24}-[0-9a-f]{34}",
    "Prefect": r"pn[ub]_[A-Za-z0-9]{36}",
    "Pulumi": r"pul-[0-9a-f]{40}",
    "PyPI": r"pypi-AgE[\w-]{50,}",
    "Replicate": r"r8_[A-Za-z0-9]{37}",
    "RubyGems": r"rubygems_[0-9a-f]{48}",
    "Scalingo": r"tk-us-[\w-]{48}",
    "SendGrid": r"SG\.[\w-]{16,32}\.[\w-]{16,64}",
    "Sentry": r"(?:sntrys_eyJ[\w.-]{40,}|sntryu_[0-9a-f]{64})",
    "Shopify": r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}",
    "Slack": r"xox[a-z]-[A-Za-z0-9-]{10,}",
    "Slack, app": r"(?:xapp-\d-[A-Za-z0-9-]{20,}|xoxe\.xox[bp]-\d-[A-Za-z0-9-]{20,})",
    "Square": r"(?:sq0[a-z]{3}-[\w-]{22,}|EAAA[\w-]{60})",
    "Stripe": r"(?:sk|rk|pk)_(?:live|test|prod)_[A-Za-z0-9]{10,}",
    "Stripe, webhooks": r"whsec_[A-Za-z0-9]{24,}",
    "Supabase": r"(?:sbp_[0-9a-f]{40}|sb_secret_[\w-]{20,})",
    "Tailscale": r"tskey-[a-z]+-[\w-]{20,}",
    "Tavily": r"tvly-[\w-]{20,}",
    "Telegram": r"\d{8,10}:AA[\w-]{33}",
    "Terraform": r"[A-Za-z0-9]{14}\.atlasv1\.[\w-]{60,}",
    "Together": r"tgp_v1_[\w-]{40,}",
    "Twilio": r"SK[0-9a-f]{32}",
    "Vault": r"hv[bsr]\.[\w-]{24,}",
    "W&B": r"wandb_v1_\w{40,}",
    "xAI": r"xai-[A-Za-z0-9]{60,}",
}
RUN = re.compile(r"[\w.:-]{15,}")  # the shortest format has 15 characters
TOKEN = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(FORMATS.values())})")
# Formats that are no single run.
PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----[\s\S]*?(?:-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|\Z)"
)
WEBHOOK = re.compile(
    r"(?P<host>https://(?:hooks\.slack\.com/(?:services|workflows|triggers)|discord(?:app)?\.com/api/webhooks"
    r"|chat\.googleapis\.com/v1/spaces|[\w.-]+\.webhook\.office\.com/webhookb2|[\w.-]+\.logic\.azure\.com)/)[^\s\"'<>]{8,}"
)
