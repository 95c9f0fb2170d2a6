"""The model card of an export, from its manifest and the data's report."""

import json
import re
from typing import Any

from tasks.params import Params
from tasks.release import serve
from tasks.release.gate import by_slash
from tasks.reports.markup import plain

CARD = """\
---
base_model: {base_line}
library_name: transformers
pipeline_tag: text-generation
{licence_line}tags: [dpo, preference-optimization]
---

# {name}

{base} aligned with preference data by {losses}{adapter}.

## Results on held-out data

{results}
## Intended use

Made for the preference that its data states, and measured on held-out rows of that data alone: other tasks, languages
and harms were not measured. Judge it on prompts of your own before you rely on it.

## Data

| what | which |
|---|---|
{data}

## Licences

{licences}

## Made from

| what | which |
|---|---|
{made}

Every value is in `manifest.json`, with a hash for each file of this folder: `make verify` compares them. The exported
weights give the trained policy's logits to within {difference:.2g}.{quantized}

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("data/model")
model = AutoModelForCausalLM.from_pretrained("data/model")
```

```sh
{commands}
```
"""
NOT_YAML = re.compile(r"[^\w./@-]")  # the card's header is YAML
PLAIN_LICENCE = re.compile(r"[\w.+-]+")
HEADLINES = (
    ("rewards/accuracies", "prefers the chosen answer"),
    ("rewards/margins", "reward margin"),
    ("win_rate/rate", "win rate against the base model"),
    ("win_rate/length_controlled/rate", "the same at equal length"),
    ("calibration/expected_error", "calibration error"),
    ("kl/answers", "KL to the base model, per answer"),
    ("health/repetition", "repetition"),
    ("health/length_ratio", "length of answers, against the base model's"),
)


def model_card(params: Params, manifest: dict[str, Any], report: dict[str, Any]) -> str:
    train, base, licence = params.train, manifest["base"]["model"], manifest["licences"]["base"]
    mixture = " + ".join(f"{weight:g} x {name}" for name, weight in train.loss.items())
    gguf = [f"model-{kind}.gguf" for kind in params.export.gguf]
    return CARD.format(
        base=plain(base),
        base_line=json.dumps(base, ensure_ascii=False) if NOT_YAML.search(base) else base,
        name=manifest["model"],
        licence_line=f"license: {licence}\n" if licence and PLAIN_LICENCE.fullmatch(licence) else "",
        losses=mixture,
        adapter=f" with a LoRA adapter of rank {train.adapter.rank}, merged" if train.adapter else "",
        results=_headlines(manifest["metrics"]) + _samples(manifest["metrics"].get("samples")),
        data=_rows(_data(manifest["data"], report)),
        licences="\n".join(f"- {what}: {_licence(found)}" for what, found in manifest["licences"].items()),
        made=_rows(_made(params, manifest)),
        difference=manifest["checks"]["largest_logit_difference"],
        quantized=_quantized(params, manifest["checks"]),
        commands=serve.commands(manifest["model"], "data/model", gguf),
    )


def _headlines(metrics: dict[str, Any]) -> str:
    values = by_slash(metrics)
    rows = [(text, _measured(values, metrics, name)) for name, text in HEADLINES if name in values]
    return "\n".join(["| metric | value (95% interval) |", "|---|---|", _rows(rows)]) + "\n\n"


def _measured(values: dict[str, float], metrics: dict[str, Any], name: str) -> str:
    near = name.rpartition("/")[0]
    low, high = (values.get(f"intervals/{name}/{end}", values.get(f"{near}/{end}")) for end in ("low", "high"))
    interval = f" ({low:.4g} to {high:.4g})" if low is not None and high is not None else ""
    return f"{values[name]:.4g}{interval}"


def _samples(samples: dict[str, dict[str, float]] | None) -> str:
    if not samples:
        return ""
    rows = [f"| {name} | {before:.3g} | {samples['policy'][name]:.3g} |" for name, before in samples["base"].items()]
    return "\n".join(["| sampled answers (mean) | base | this model |", "|---|---|---|", *rows]) + "\n"


def _data(data: dict[str, Any], report: dict[str, Any]) -> list[tuple[str, Any]]:
    pairs, tokens = report["pairs"], report["tokens"]
    return [
        ("source", f"{plain(data['source'])} ({data['rows']} rows, sha256 `{data['sha256'][:16]}`)"),
        ("pairs", f"{pairs['train']} to train on, {pairs['eval']} held out"),
        ("left out", ", ".join(f"{number} {name}" for name, number in report["left_out"].items()) or "nothing"),
        ("tokens (mean)", ", ".join(f"{part} {tokens[part]['mean']:g}" for part in tokens)),
    ]


def _made(params: Params, manifest: dict[str, Any]) -> list[tuple[str, Any]]:
    train, made = params.train, manifest["made"]
    clean = "clean" if made["clean"] else "with changes that were not committed"
    return [
        ("base model", f"{plain(manifest['base']['model'])} (`{manifest['base']['sha256'][:16]}`)"),
        ("training", f"beta {train.beta}, learning rate {train.learning_rate:g}, batches of {train.global_batch_size}"),
        ("code", f"commit `{made['commit'][:12]}`, {clean}"),
        ("environment", ", ".join(f"{name} {number}" for name, number in made["packages"].items())),
    ]


def _quantized(params: Params, checks: dict[str, Any]) -> str:
    """After QLoRA the results above are those of another model than this one, if a close one."""
    if "quantized_policy" not in checks:
        return ""
    bits, found = params.train.quantization, checks["quantized_policy"]
    return (
        f"\n\nThe adapter was trained and evaluated on the base model in {bits}, and these weights are the adapter "
        f"merged into the base in {params.export.dtype}. **The results above were measured with the {bits} base and "
        f"may differ for these weights**: the mean KL of their next-token distributions is {found['kl']:.3g} nats, and "
        f"the most likely next token is the same at {found['same_next_token']:.1%} of the positions of "
        f"{checks['prompts']} held-out prompts."
    )


def _licence(found: str | None) -> str:
    return plain(found) if found else "not stated in its files; look where it came from"


def _rows(rows: list[tuple[str, Any]]) -> str:
    return "\n".join(f"| {name} | {value} |" for name, value in rows)  # what came from others is `plain` already
