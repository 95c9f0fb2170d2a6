"""Stage `reference`: log-probabilities of every response token under the base model, computed once.

Ray workers of the group `reference` compute missing values in shards. A value is cached under a hash of its inputs:
the pair's tokens, the base model, the precision, the version of our numerics. A killed run, another beta, another
cluster or one changed pair computes only what is missing. A loss without a reference needs no values.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.artifacts.models import reference_folder, reference_hash
from tasks.artifacts.pairs import SPLITS, read_pairs
from tasks.cluster.nodes import refresh_directory
from tasks.cluster.ray_cluster import warn_of_slow_dtype
from tasks.cluster.worker_pool import WorkerPool
from tasks.config.cluster import Cluster, load_cluster
from tasks.config.params import Params, load_params
from tasks.config.paths import PAIRS, REFERENCE, main_checkout
from tasks.errors import UserError
from tasks.reference.logp_shards import (
    SCHEMA,
    missing_shards,
    pair_key,
    read_shards,
    stored_keys,
    write_reference,
)
from tasks.reference.scorer import BaseModel, ReferenceScorer, ShardStats
from tasks.system.code import worker_code
from tasks.system.files import fingerprint, hash_files, publish, write_json
from tasks.system.lock import lock_cached_folder
from tasks.system.progress import Bar
from tasks.tracking.journal import StageJournal
from training.models.model_files import weight_files

NO_IDS = SCHEMA.empty_table()["key"]
COMPILE_FROM = 1e16  # bytes of weights times tokens: half a minute on an H200, of which compiled layers save a third
SHARD_TIMEOUT = 120.0  # seconds for shared storage to show a shard that another node wrote

Shard = tuple[str, dict[str, int]]  # a split, and the numbers of pairs in it by their keys


def reference(run: StageJournal) -> None:
    params, cluster = load_params(), load_cluster()
    if params.reference.quantization and cluster.reference.zero_stage == 3:
        raise UserError(
            "infra/cluster.yaml: reference.zero_stage 3 cannot shard a quantized base model. Set it to 0, or set "
            "reference.quantization and train.quantization to null."
        )
    inputs = {"base": reference_hash(), **params.reference.model_dump(), "code": worker_code("reference")}
    folder = main_checkout() / cluster.output_dir / "reference" / fingerprint(inputs)
    if not params.train.needs_reference:
        print(f"reference: loss {', '.join(params.train.loss)} uses no reference model; nothing to compute")
        _publish({}, {}, SCHEMA.empty_table(), inputs)
        return
    folder.mkdir(parents=True, exist_ok=True)
    with lock_cached_folder(folder, run.folder, "reference"):
        _reference(run, params, cluster, folder, inputs)


def _reference(run: StageJournal, params: Params, cluster: Cluster, folder: Path, inputs: dict[str, Any]) -> None:
    pairs = {split: read_pairs(split) for split in SPLITS}
    keys = {split: [pair_key(pair) for pair in pairs[split]] for split in SPLITS}
    logps = read_shards(folder)
    missing = _missing_shards(keys, stored_keys(logps), cluster.reference.shard_pairs)
    total, to_compute = sum(map(len, pairs.values())), sum(len(shard) for _, shard in missing)
    print(f"reference: {total - to_compute} of {total} pairs are cached", flush=True)
    if missing:
        progress = Progress(total - to_compute, Bar("reference", total, "pairs"))
        _compute(
            missing, progress, params, cluster, folder, sum(int(pairs[split].columns.lengths.sum()) for split in SPLITS)
        )
        run.summary(progress.rates())
        logps = _read_all(folder, {key for _, shard in missing for key in shard})
    _publish({split: pairs[split].table["id"] for split in SPLITS}, keys, logps, inputs)
    run.summary({"reference_pairs": total, "reference_pairs_computed": to_compute})


def _missing_shards(keys: dict[str, list[str]], stored: set[str], size: int) -> list[Shard]:
    shards: list[Shard] = []
    for split in SPLITS:
        shards += ((split, shard) for shard in missing_shards(keys[split], stored, size))
        stored = stored.union(keys[split])
    return shards


def _read_all(folder: Path, expected: set[str]) -> Any:
    """All values, as soon as this node sees the shards of the other nodes."""
    deadline = time.monotonic() + SHARD_TIMEOUT
    while expected - stored_keys(logps := read_shards(folder)):
        if time.monotonic() > deadline:
            raise UserError(
                f"Workers on other nodes wrote shards that do not appear in {folder} on this one. Set output_dir in "
                "infra/cluster.yaml to storage that all nodes share."
            )
        time.sleep(1)
        refresh_directory(folder)
    return logps


def _publish(ids: dict[str, Any], keys: dict[str, list[str]], logps: Any, inputs: dict[str, Any]) -> None:
    with publish(REFERENCE) as out:
        for split in SPLITS:
            write_reference(out / f"{split}.arrow", ids.get(split, NO_IDS), keys.get(split, []), logps)
        write_json(out / "manifest.json", {**inputs, "files": hash_files(out)})


def _compute(
    missing: Sequence[Shard], progress: "Progress", params: Params, cluster: Cluster, folder: Path, tokens: int
) -> None:
    """`tokens` are those of all pairs, cached ones too: whether layers are compiled depends on nothing that varies."""
    group, config, bar = cluster.reference, params.reference, progress.bar
    warn_of_slow_dtype("reference", config.dtype, group.gpus_per_worker)
    with WorkerPool(cluster, group, ReferenceScorer, "reference", len(missing), bar.say) as pool:
        source = reference_folder(params.source.model)
        weights = sum((source / name).stat().st_size for name in weight_files(source))
        compiled = group.compile and weights * tokens >= COMPILE_FROM
        model = BaseModel(str(pool.shared_path(source)), config.dtype, config.quantization, compiled)
        root = str(pool.shared_path(Path.cwd(), PAIRS))
        tasks = [(model, root, *shard, str(folder), group.row_tokens) for shard in missing]
        with bar:
            try:
                for _, stats in pool.results("score", tasks):
                    progress.add(stats)
            except ValueError as error:
                raise UserError(f"source.model: {error}. Choose another model.") from None


class Progress:
    """Pairs and tokens that are done, in total and by worker."""

    def __init__(self, cached: int, bar: Bar) -> None:
        self.pairs, self.tokens, self.bar, self.started = cached, 0, bar, time.monotonic()
        self.workers: dict[int, tuple[int, float]] = {}

    def add(self, stats: Sequence[ShardStats]) -> None:
        if stats[0].note and not self.workers:
            self.bar.say(f"reference: {stats[0].note}")
        for part in stats:
            tokens, seconds = self.workers.get(part.worker, (0, 0.0))
            self.workers[part.worker] = (tokens + part.tokens, seconds + part.seconds)
            self.pairs, self.tokens = self.pairs + part.pairs, self.tokens + part.tokens
        self.bar.update(self.pairs, f"{self.tokens / (time.monotonic() - self.started):.0f} tokens/s")

    def rates(self) -> dict[str, float]:
        return {
            f"reference/worker{worker}/tokens_per_second": tokens / max(seconds, 1e-9)
            for worker, (tokens, seconds) in sorted(self.workers.items())
        }
