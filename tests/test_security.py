"""What comes from others does nothing here but be read, and what is secret does not leave."""

import ast
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tasks import redact
from tasks.dataset import cardpage, fetch
from tasks.doctor.findings import Findings
from tasks.errors import UserError
from tasks.params import Params, load_cluster, load_params, read_recipe, read_yaml
from tasks.reports import page
from tasks.source import _check as check
from tasks.source import origins
from tasks.tracking.journal import Run, open_run
from tests.browser import browser, chromium
from tests.workspaces import PROJECT, make_workspace
from training import checkpoint
from training.remote_code import needs_its_own_code

SOURCES = [path for folder in ("flows", "tasks", "training") for path in sorted((PROJECT / folder).rglob("*.py"))]
SCRIPT = "<script>window.owned=1;document.title='owned'</script><img src=x onerror=\"window.owned=1\">"
LINKS = (
    "[click](javascript:window.owned=1) ![x](http://evil.test/pixel.png) <a href='javascript:window.owned=1'>go</a> "
    "http://evil.test | `code` </pre><svg onload=window.owned=1>"
)
HF = "hf_" + "Ab1" * 8


# Secrets


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("s3://AKID:s3cr3t/pw@bucket".replace("/pw", ""), "s3cr3t"),
        ("could not reach https://anna:hunter22@host:5000/api", "hunter22"),
        ("postgresql+psycopg2://mlflow:pa55word@db:5432/mlflow", "pa55word"),
        (f"token {HF} is invalid", HF),
        ("AKIAABCDEFGHIJKLMNOP is unknown", "AKIAABCDEFGHIJKLMNOP"),
        ("GET /x?X-Amz-Signature=0f3b9c77aa&y=1", "0f3b9c77aa"),
        ("Authorization: Bearer abcdef0123456789", "abcdef0123456789"),
        ('{"password": "correct0horse"}', "correct0horse"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIabc\n-----END RSA PRIVATE KEY-----", "MIIabc"),
    ],
)
def test_a_secret_is_taken_out_by_its_shape(text, secret):
    assert secret in text
    assert secret not in redact.redact(text)
    assert redact.HIDDEN in redact.redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens: 512, token_budget=8192",
        "hub:owner/name@main and user@example.com",
        "http://127.0.0.1:5000/#/experiments/1",
        "a token: required",
        "sha256 8a0ca03388c9c74285f30d57",
    ],
)
def test_what_is_no_secret_stays(text):
    assert redact.redact(text) == text


def test_values_of_secret_variables_are_taken_out_wherever_they_stand(monkeypatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", "not-a-known-shape")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true-or-false")  # no secret, whatever it begins with
    monkeypatch.setenv("JUDGE", "only-configuration-knows")
    content = {"a": ["x not-a-known-shape y", {"b": "true-or-false"}], "n": 1, "j": "only-configuration-knows"}
    assert redact.redacted(content)["a"] == ["x *** y", {"b": "true-or-false"}]
    assert redact.redacted(content)["j"] == "only-configuration-knows"
    redact.protect("JUDGE")  # as endpoint.py does with evaluate.endpoint.key_variable
    assert redact.redacted(content)["j"] == "***"


def test_params_with_a_secret_are_refused_without_repeating_it():
    content = read_yaml(PROJECT / "params.yaml")
    content["source"]["data"] = "s3://key:s3cr3tvalue@bucket/pairs.jsonl"
    with pytest.raises(ValidationError) as caught:
        Params.model_validate(content)
    assert "`source.data` holds what looks like a password or a token" in str(caught.value.errors()[0]["msg"])
    content["source"]["data"] = [{"name": "a", "data": f"hub:x/y?token={HF}", "weight": 1.0, "share": 1.0}]
    with pytest.raises(ValidationError, match=r"`source\.data\.0\.data` holds"):
        Params.model_validate(content)


def test_a_stage_says_no_secret_in_errors_and_tracebacks(tmp_path):
    code = (
        "import sys\nfrom tasks import stage\nfrom tasks.errors import UserError\n"
        "def failing(run):\n"
        "    raise {kind}('https://anna:hunter22@host and token-of-this-test')\n"
        "stage._run = lambda stage: stage(None)\n"
        "stage.main(failing)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(PROJECT), "SOME_API_KEY": "token-of-this-test"}
    for kind, status in (("UserError", 2), ("RuntimeError", 1)):
        command = [sys.executable, "-c", code.format(kind=kind)]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == status
        assert "https://***@host and ***" in done.stderr
        assert "hunter22" not in done.stdout + done.stderr
        assert "token-of-this-test" not in done.stdout + done.stderr.replace("raise", "")


def test_journals_and_params_for_mlflow_hold_no_secret(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workspace(tmp_path / "workspace", Path("unused")))
    monkeypatch.setenv("DPO_RUN", "run")
    monkeypatch.setenv("SOME_SECRET", "value-of-the-secret")
    cluster = load_cluster().model_copy(update={"tracking_uri": "http://anna:hunter22@127.0.0.1:9"})
    folder = open_run(load_params(), cluster)
    run = Run(folder, "train")
    run.params({"url": "https://anna:hunter22@host"})
    run.tags({"note": "value-of-the-secret"})
    written = "".join(path.read_text() for path in folder.iterdir() if path.name != "settings.json")
    assert "hunter22" not in written
    assert "value-of-the-secret" not in written
    assert (folder / "settings.json").stat().st_mode & 0o077 == 0  # it needs the address, for its owner alone


def test_the_doctor_says_no_secret(capsys):
    Findings().wrong("the tracking server https://anna:hunter22@host does not answer")
    assert capsys.readouterr().out == "  WRONG  the tracking server https://***@host does not answer\n"


# Nothing that came with data or a model runs


class Planted:
    """A pickle that would write a file when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


def whole_checkpoint(folder: Path, step: int) -> Path:
    path = folder / f"step-{step:08d}"
    (path / "state").mkdir(parents=True)
    (path / "state" / "weights.pt").write_bytes(b"ours")
    digest = checkpoint.sha256(path / "state" / "weights.pt")
    (path / "manifest.json").write_text(json.dumps({"step": step, "files": {"state/weights.pt": digest}}))
    return path


def test_a_checkpoint_that_our_manifest_does_not_name_is_never_read(tmp_path, capsys):
    mark = tmp_path / "owned"
    evil = pickle.dumps(Planted(mark))
    ours = whole_checkpoint(tmp_path / "train", 1)
    for step, name in ((2, "state/weights.pt"), (3, "state/zero_pp_rank_7_optim_states.pt")):  # replaced, and added
        (whole_checkpoint(tmp_path / "train", step) / name).write_bytes(evil)
    (tmp_path / "train" / "step-00000004").mkdir()  # no manifest at all
    (tmp_path / "train" / "step-00000004" / "weights.pt").write_bytes(evil)
    assert list(checkpoint.whole_checkpoints(tmp_path / "train")) == [ours]
    said = capsys.readouterr().err
    assert "state/weights.pt has changed" in said
    assert "state/zero_pp_rank_7_optim_states.pt is not of this checkpoint" in said
    assert "its manifest is missing" in said
    assert not mark.exists()
    pickle.loads(evil)  # the trap is real
    assert mark.exists()


def calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    """Every call with the dotted name of what is called."""
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PROJECT).as_posix())
def test_no_code_of_ours_runs_what_it_reads(path):
    forbidden = re.compile(
        r"^(pickle\.loads?|cloudpickle\.\w+|joblib\.load|yaml\.(unsafe_|full_)?load(_all)?|eval|exec)$"
    )
    for name, call in calls(ast.parse(path.read_text())):
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        where = f"{path.name}:{call.lineno} {name}"
        assert not forbidden.match(name), where
        assert given.get("shell") != "True", where
        assert given.get("trust_remote_code", "False") == "False", where
        assert name != "torch.load" or given.get("weights_only") == "True", where
        if name.endswith((".from_pretrained", ".from_config")) and name.startswith(("Auto", "kind.")):
            assert given.get("trust_remote_code") == "False", f"{where}: say that code of the model is not run"


@pytest.mark.parametrize(("kind", "refused"), [("evil-net", True), ("llama", False)])
def test_a_models_own_code_is_never_run(kind, refused, tmp_path, tiny_base):
    """Of an architecture that transformers lacks it is refused; of one that it has, the code is passed over."""
    model, mark = shutil.copytree(tiny_base, tmp_path / "model"), tmp_path / "owned"
    config = json.loads((model / "config.json").read_text())
    auto = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (model / "config.json").write_text(json.dumps({**config, "model_type": kind, "auto_map": auto}))
    (model / "code.py").write_text(f"import pathlib; pathlib.Path({str(mark)!r}).touch()\n")
    assert (needs_its_own_code(model) is not None) == refused
    if refused:
        source = load_params(PROJECT / "params.yaml").source.model_copy(update={"model": str(model)})
        with pytest.raises(UserError, match=r"works with Python code of its own alone \(the architecture `evil-net`"):
            check(source)
    else:
        from training.memory import measure

        assert config["model_type"] == kind
        assert measure(model, None).parameters > 0
    assert not mark.exists()


def test_mlflow_may_not_run_models_code():
    code = "import os, tasks.stage; print(os.environ['MLFLOW_ALLOW_MODEL_CODE_EXECUTION'])"
    env = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, env=env, capture_output=True, text=True)
    assert done.stdout == "false\n"
    assert "export MLFLOW_ALLOW_MODEL_CODE_EXECUTION := false" in (PROJECT / "Makefile").read_text()


# Paths


def test_a_link_out_of_a_data_folder_is_refused_and_one_inside_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("DPO_HOME", str(tmp_path / "project"))
    data, outside = tmp_path / "data", tmp_path / "private.jsonl"
    data.mkdir()
    outside.write_text('{"prompt": "secret"}\n')
    (data / "rows.jsonl").write_text("{}\n")
    (data / "same.jsonl").symlink_to("rows.jsonl")
    fetch.check_address("source.data", str(data))
    (data / "more.jsonl").symlink_to(outside)
    with pytest.raises(UserError, match=r"more\.jsonl is a symbolic link to .*private\.jsonl, outside the folder"):
        fetch.check_address("source.data", str(data))


def test_a_stores_file_names_cannot_leave_the_folder(tmp_path):
    assert fetch._inside(tmp_path, "a/b.jsonl") == tmp_path / "a/b.jsonl"
    with pytest.raises(ValueError, match="would lie outside"):
        fetch._inside(tmp_path / "raw", "../../x.jsonl")


@pytest.mark.parametrize("name", ["..", ".hidden", "a/b", "../x", ""])
def test_names_that_become_folders_stay_below_theirs(name):
    content = read_yaml(PROJECT / "params.yaml")
    mixture = [{"name": name, "data": "demo", "weight": 1.0, "share": 1.0}]
    with pytest.raises(ValidationError, match="name"):
        Params.model_validate({**content, "source": {**content["source"], "data": mixture}})
    with pytest.raises(ValidationError, match="model_name"):
        Params.model_validate({**content, "promote": {**content["promote"], "model_name": name}})
    with pytest.raises(UserError, match="There is no recipe"):
        read_recipe(f"../{name}")


def test_the_name_of_an_address_is_one_folder():
    source = load_params(PROJECT / "params.yaml").source
    for address in ("s3://bucket/../../etc/x.jsonl", "/tmp/..", "hub:../../x@main"):
        (origin,) = origins(source.model_copy(update={"data": address}))
        assert re.fullmatch(r"[\w-]+", origin["name"])


# Servers


def test_every_server_that_we_start_is_told_where_to_listen():
    """`--host` stands behind every command that serves pages, and never names all addresses."""
    served = re.compile(r"mlflow\W+server\b|prefect\W+server\W+start|server:create_app")
    files = [PROJECT / "Makefile", *SOURCES, *(PROJECT / "infra").rglob("*.y*ml")]
    found = 0
    for path in files:
        text = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
        for match in served.finditer(text):
            behind = text[match.start() : match.start() + 400]
            if re.search(r"^\S+\s*$|`", behind.splitlines()[0]) and "--host" not in behind:
                continue  # a sentence that names the command
            found += 1
            assert "--host" in behind, f"{path.name}: {behind.splitlines()[0]}"
            if "infra" not in path.parts:  # there a container's own network is meant
                assert not re.search(r"--host\W+0\.0\.0\.0", behind), path.name
        if "--with-healthcheck" in text:  # listens on every address, as it comes
            assert re.search(r"PREFECT_WORKER_WEBSERVER_HOST\W+(LOOPBACK|127\.0\.0\.1)", text), path.name
    assert found >= 3  # MLflow and Prefect of make up, the embedded one


# Pages


def hostile_report() -> dict[str, Any]:
    histogram = {"counts": [1, 2], "edges": [0, 1, 2]}
    spread = {**dict.fromkeys(("mean", "p5", "p50", "p95", "max"), 3), "histogram": histogram}
    example = {"file": f"a{SCRIPT}.jsonl", "row": 1, "reason": LINKS, "content": SCRIPT}
    one = {"format": "pairs", "rows": 5, "train": 2, "eval": 1, "left_out": {"tie": 2}}
    return {
        "source": f"pairs {SCRIPT} {LINKS}",
        "rows": 5,
        "format": {"a": "pairs"},
        "by_source": {SCRIPT: one},
        "pairs": {"train": 2, "eval": 1},
        "tokens": dict.fromkeys(("prompt", "chosen", "rejected"), spread),
        "lengths": {part: [1, 2] for part in ("prompt", "chosen", "rejected")},
        "left_out": {"tie": 2},
        "examples": {"tie": [example]},
        "template": LINKS,
        "truncated": 0,
        "tokenizer_merged_across_the_border": 0,
        "warnings": [SCRIPT, LINKS],
        "shortcuts": {
            "chosen_longer": 0.5,
            "chosen_ends": 1.0,
            "rejected_ends": 1.0,
            "probe_accuracy": 0.5,
            "length_difference": histogram,
        },
    }


def write_run(root: Path) -> None:
    """A run whose rows, reasons and names are hostile."""
    metrics = root / "data" / "metrics"
    metrics.mkdir(parents=True)
    (root / "infra").mkdir()
    (root / "infra" / "cluster.yaml").write_text("{}\n")
    (metrics / "evaluate.json").write_text(json.dumps({"rewards/accuracies": 0.5}))
    lines = [
        {"prompt": text, "base": {"text": text}, "policy": {"text": text}, "outcome": 1.0} for text in (SCRIPT, LINKS)
    ]
    (metrics / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pair = {"id": SCRIPT, "prompt": LINKS, "margin": -1.0, "chosen": SCRIPT, "rejected": LINKS}
    (metrics / "pairs.jsonl").write_text(json.dumps(pair) + "\n")


def model_card() -> str:
    from tasks.release import card

    params = load_params(PROJECT / "params.yaml")
    hostile = f"{SCRIPT} {LINKS}"
    manifest = {
        "model": "dpo-demo",
        "data": {"source": hostile, "sha256": "0" * 64, "rows": 5},
        "base": {"model": hostile, "sha256": "1" * 64},
        "licences": {"base": hostile, "data": hostile},
        "metrics": {"rewards/accuracies": 0.5},
        "checks": {"largest_logit_difference": 0.0},
        "made": {"commit": "c" * 40, "clean": True, "packages": {"torch": "2"}},
    }
    return card.model_card(params, manifest, hostile_report())


def rendered(markdown: str) -> str:
    """As a viewer that lets HTML pass and makes bare addresses links would show it."""
    from markdown_it import MarkdownIt

    body = MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown)
    return f"<!doctype html><title>card</title>{body}"


@pytest.mark.slow
def test_in_a_real_browser_no_row_runs_anything_on_any_page(tmp_path, monkeypatch):
    chromium()
    root = tmp_path / "run"
    write_run(root)
    monkeypatch.setenv("SOME_PASSWORD", "0123-of-the-page")
    preview = [{part: [(SCRIPT, True), (LINKS, False)] for part in ("prompt", "chosen", "rejected")}]
    report = hostile_report()
    pages = {
        "report": page.page(root, f"run {SCRIPT} 0123-of-the-page"),
        "data": cardpage.page(report, preview, [["rows", SCRIPT, LINKS]]),
        "data-markdown": rendered(cardpage.markdown(report, preview, [["rows", SCRIPT, LINKS]])),
        "model-markdown": rendered(model_card().split("---\n", 2)[2]),
        "trap": f"<!doctype html><body>{SCRIPT}</body>",  # so that the test can fail
    }
    assert "0123-of-the-page" not in pages["report"]
    with browser(tmp_path / "profile") as shown:
        for name, content in pages.items():
            (tmp_path / f"{name}.html").write_text(content)
            shown.open((tmp_path / f"{name}.html").as_uri())
            if name == "trap":
                break
            shown.shows("<script>window.owned=1")  # the text is there, as text
            time.sleep(0.2)
            assert shown.ask("window.owned === undefined"), name
            reaching = (
                "[...document.querySelectorAll('script, img, iframe, svg[onload], a[href*=evil], a[href^=javascript]')]"
            )
            assert shown.ask(f"{reaching}.map(e => e.outerHTML)") == [], name
        until = time.monotonic() + 20
        while not shown.ask("window.owned === 1") and time.monotonic() < until:
            time.sleep(0.1)
        assert shown.ask("window.owned === 1")
