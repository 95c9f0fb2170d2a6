"""The model card of an export, from its manifest."""

from typing import Any

from tasks.params import Params

CARD = """\
---
base_model: {base}
library_name: transformers
pipeline_tag: text-generation
tags: [dpo, preference-optimization]
---

# {name}

{base} aligned with preference data by {losses}{adapter}.

## Results on held-out data

| metric | value |
|---|---|
{results}

{samples}
## Made from

| what | which |
|---|---|
| data | {data} ({rows} rows, sha256 `{data_hash}`) |
| base model | {base} (`{base_hash}`) |
| training | {steps} |

Every value is in `manifest.json`, with a hash for each file of this folder. {merge}

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("data/model")
model = AutoModelForCausalLM.from_pretrained("data/model")
```

Made for the preference that its data states, and measured on held-out rows of that data alone. The licences of the base
model and of the data apply.
"""


def model_card(params: Params, manifest: dict[str, Any]) -> str:
    train, metrics = params.train, dict(manifest["metrics"])
    samples = metrics.pop("samples", None)
    mixture = " + ".join(f"{weight:g} x {name}" for name, weight in train.loss.items())
    return CARD.format(
        base=manifest["base"]["model"],
        name=manifest["model"],
        losses=mixture,
        adapter=f" with a LoRA adapter of rank {train.adapter.rank}, merged" if train.adapter else "",
        results="\n".join(f"| {name} | {value:.4g} |" for name, value in metrics.items()),
        samples=_samples(samples) if samples else "",
        data=manifest["data"]["source"],
        rows=manifest["data"]["rows"],
        data_hash=manifest["data"]["sha256"][:16],
        base_hash=manifest["base"]["sha256"],
        steps=f"beta {train.beta}, learning rate {train.learning_rate:g}, batches of {train.global_batch_size} pairs",
        merge="The exported weights give the trained policy's logits to within "
        f"{manifest['merge']['largest_logit_difference']:.2g}.",
    )


def _samples(samples: dict[str, dict[str, float]]) -> str:
    rows = [f"| {name} | {before:.3g} | {samples['policy'][name]:.3g} |" for name, before in samples["base"].items()]
    return "\n".join(["| sampled answers (mean) | base | this model |", "|---|---|---|", *rows]) + "\n"
