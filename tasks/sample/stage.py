"""Stage `sample`: on-policy pairs, if params.yaml has a section `sample`.

Ray workers of the group `inference` draw several answers to each training prompt from the start model (data/base), a
judge scores them, and better against worse answers become pairs in data/sample, which `prepare` reads. Answers and
rewards are cached under a hash of their inputs: after a kill, only the missing ones are computed, and a second round
with the same model, prompts and settings computes none. Without the section data/sample holds an empty manifest.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import chain, combinations
from pathlib import Path
from statistics import mean
from typing import Any

from tasks.artifacts.models import file_hashes, source_folder, source_hash
from tasks.cluster.worker_pool import WorkerPool
from tasks.config.cluster import load_cluster
from tasks.config.evaluate import Endpoint, Evaluate
from tasks.config.params import Params, load_params
from tasks.config.paths import SAMPLE, main_checkout
from tasks.config.sample import Sample
from tasks.errors import UserError
from tasks.evaluate import judges
from tasks.evaluate.drawing import BATCH, draw_batches, sampler_pool, uses_vllm
from tasks.evaluate.endpoint import EndpointJudge
from tasks.evaluate.sampler import Weights
from tasks.prepare.templates import load_template
from tasks.sample.prompts import Prompt, read_prompts
from tasks.system.code import worker_code
from tasks.system.files import fingerprint, publish, read_json_or_empty, sha256, write_json
from tasks.system.lock import lock_cached_folder
from tasks.system.progress import Bar
from tasks.tracking.journal import StageJournal

Answer = tuple[str, bool]  # the text, and whether an end token ended it, not the limit
MANIFEST, FILE = "manifest.json", "pairs.jsonl"
VLLM_BATCH = 2000  # prompts per task
JUDGED_TOGETHER = 1024  # answers per request to the workers
SEEDS = 1000  # more than the answers to a prompt: answer k of seed s is drawn with seed 1000 s + k


class Store:
    """Values by key in a folder of JSON files, one for each addition."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.values = folder, dict[str, Any]()
        for path in sorted(folder.glob("*.json")):
            self.values |= read_json_or_empty(path)

    def add(self, values: dict[str, Any]) -> None:
        write_json(self.folder / f"{fingerprint(sorted(values))}.json", values)
        self.values |= values


def sample(run: StageJournal) -> None:
    params, cluster = load_params(), load_cluster()
    assert params.sample
    settings = params.sample.as_evaluate(params.evaluate)
    prompts = read_prompts(load_template(params), params.prepare, params.sample.prompts, settings.seed)
    if not prompts:
        raise UserError("sample: no prompt of source.data is outside the held-out set. Add data to source.data.")
    inputs = _inputs(params, settings)
    folder = main_checkout() / cluster.output_dir / "sample" / fingerprint(inputs)
    folder.mkdir(parents=True, exist_ok=True)
    with lock_cached_folder(folder, run.folder, "sample"), sampler_pool(cluster, "sample") as workers:
        drawn, computed = _draw(workers, params, settings, prompts, folder)
        usable = [_usable(answers) for answers in drawn]
        scores = [] if settings.endpoint else _scores(workers, settings, prompts, usable, folder)
    if settings.endpoint:  # after the workers ended: it may take hours, and no GPU should wait for it
        scores = _compared(settings.endpoint, prompts, usable)
    pairs = [
        {**prompt.row(), "chosen": better, "rejected": worse, "score_chosen": high, "score_rejected": low}
        for prompt, answers, values in zip(prompts, usable, scores, strict=True)
        for (better, high), (worse, low) in _pairs(answers, values, params.sample)
    ]
    figures = {
        "prompts": len(prompts),
        "answers": sum(map(len, drawn)),
        "finished": mean(float(finished) for answers in drawn for _, finished in answers),
        "score": mean([value for values in scores for value in values] or [0.0]),
        "pairs": len(pairs),
    }
    _publish(pairs, {"inputs": inputs, "settings": params.sample.model_dump(), "judge": settings.judge}, figures)
    run.summary({f"sample/{name}": float(value) for name, value in {**figures, "computed": computed}.items()})
    print(
        f"sample: {len(pairs)} pairs from {figures['answers']} answers to {len(prompts)} prompts ({computed} answers "
        f"computed, the others cached), mean score {figures['score']:.3f} by judge {settings.judge}"
    )


def _inputs(params: Params, settings: Evaluate) -> dict[str, Any]:
    """What determines an answer, besides its prompt and seed."""
    names = ("dtype", "engine", "temperature", "top_p", "max_new_tokens")
    sampling = {name: getattr(settings, name) for name in names}
    return {
        "base": source_hash(),
        "quantization": params.train.quantization,
        "code": worker_code("sample"),
        **sampling,
    }


def _draw(
    workers: WorkerPool, params: Params, settings: Evaluate, prompts: Sequence[Prompt], folder: Path
) -> tuple[list[list[Answer]], int]:
    """The answers to each prompt, and how many of them were not cached."""
    assert params.sample
    store, seeds = Store(folder / "answers"), [SEEDS * settings.seed + k for k in range(params.sample.answers)]
    keys = {(n, seed): fingerprint([prompt.ids, seed]) for n, prompt in enumerate(prompts) for seed in seeds}
    missing = {item for item, key in keys.items() if key not in store.values}
    if missing:
        base = workers.shared_path(source_folder(params.source.model))
        weights = Weights(base, base, settings.dtype, params.train.quantization)
        size = VLLM_BATCH if uses_vllm(workers, settings, weights) else BATCH
        batches = list(_missing_batches(prompts, seeds, missing, size))
        requests = [([prompts[n].ids for n, _ in batch], batch[0][1]) for batch in batches]
        with Bar("sample", len(keys), "answers") as bar:
            bar.update(len(keys) - len(missing))
            for number, answers in draw_batches(workers, settings, weights, requests):
                items = zip(batches[number], answers, strict=True)
                store.add({keys[item]: [answer.text, answer.finished] for item, answer in items})
                bar.more(len(answers))
    return [[store.values[keys[n, seed]] for seed in seeds] for n in range(len(prompts))], len(missing)


def _missing_batches(
    prompts: Sequence[Prompt], seeds: list[int], missing: set[tuple[int, int]], size: int
) -> Iterator[list[tuple[int, int]]]:
    """(prompt, seed) items by batch. All items are split, not the missing ones, so that a batch is the same after a
    kill, and with it the rounding of its numbers."""
    order = sorted(range(len(prompts)), key=lambda n: (len(prompts[n].ids), n))  # for little padding
    for seed in seeds:
        for start in range(0, len(order), size):
            if batch := [(n, seed) for n in order[start : start + size] if (n, seed) in missing]:
                yield batch


def _usable(answers: Sequence[Answer]) -> list[str]:
    """The different texts. An answer without an end would be learnt with an end that the model did not choose."""
    return list(dict.fromkeys(text for text, finished in answers if finished and text.strip()))


def _scores(
    workers: WorkerPool, settings: Evaluate, prompts: Sequence[Prompt], answers: Sequence[list[str]], folder: Path
) -> list[list[float]]:
    """The score of each answer by a judge of single answers."""
    store = Store(folder / f"scores-{fingerprint(_judge(settings))}")
    exchanges = [[(prompt.text, text) for text in texts] for prompt, texts in zip(prompts, answers, strict=True)]
    keys = {exchange: fingerprint(exchange) for exchange in chain.from_iterable(exchanges)}
    missing = [exchange for exchange, key in keys.items() if key not in store.values or settings.judge == "demo"]
    with Bar("sample", len(keys), "judgements") as bar:
        bar.update(len(keys) - len(missing))
        for start in range(0, len(missing), JUDGED_TOGETHER):
            batch = missing[start : start + JUDGED_TOGETHER]
            verdicts = judges.verdicts(workers, settings, [prompt for prompt, _ in batch], [text for _, text in batch])
            scores = map(judges.score, verdicts)
            store.add({keys[exchange]: score for exchange, score in zip(batch, scores, strict=True)})
            bar.more(len(batch))
    return [[store.values[keys[exchange]] for exchange in row] for row in exchanges]


def _judge(settings: Evaluate) -> list[Any]:
    """What determines a verdict, besides prompt and answer."""
    if settings.reward_model is None:
        return [settings.judge]
    return [file_hashes(judges.reward_folder(settings)), settings.reward_model.label, settings.dtype]


def _compared(endpoint: Endpoint, prompts: Sequence[Prompt], answers: Sequence[list[str]]) -> list[list[float]]:
    """The share of the other answers to its prompt that each answer beats. The judge caches its replies itself."""
    matches = [(n, pair) for n, texts in enumerate(answers) for pair in combinations(range(len(texts)), 2)]
    items = [(prompts[n].text, answers[n][first], answers[n][second]) for n, (first, second) in matches]
    outcomes = EndpointJudge(endpoint).compare(items, "sample")
    scores = [[0.0] * len(texts) for texts in answers]
    for (n, (first, second)), outcome in zip(matches, outcomes, strict=True):
        share = 0.5 if outcome is None else outcome  # a refusal is a tie
        scores[n][first] += (1 - share) / (len(answers[n]) - 1)
        scores[n][second] += share / (len(answers[n]) - 1)
    return scores


def _pairs(
    answers: Sequence[str], scores: Sequence[float], params: Sample
) -> list[tuple[tuple[str, float], tuple[str, float]]]:
    """(better, worse) answers with their scores; none if no two differ by the margin."""
    ranked = sorted(zip(answers, scores, strict=True), key=lambda answer: -answer[1])
    candidates = [(ranked[0], ranked[-1])] if params.pairs == "best_worst" and ranked else combinations(ranked, 2)
    return [(best, worst) for best, worst in candidates if 0.0 < best[1] - worst[1] >= params.min_margin]


def _publish(pairs: list[dict[str, Any]], facts: dict[str, Any], figures: dict[str, float]) -> None:
    if not pairs:
        raise UserError(
            f"sample: the judge {facts['judge']} sees no difference of at least sample.min_margin between any two "
            "answers to a prompt. Raise sample.answers or sample.temperature, lower sample.min_margin, or choose "
            "another judge."
        )
    with publish(SAMPLE) as out:
        (out / FILE).write_text("".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs))
        file = {"file": FILE, "called": f"{SAMPLE / FILE}", "sha256": sha256(out / FILE), "rows": len(pairs)}
        write_json(out / MANIFEST, {**facts, "figures": figures, "file": file})


def skip() -> None:
    with publish(SAMPLE) as out:
        write_json(out / MANIFEST, {})
    print("sample: off")
