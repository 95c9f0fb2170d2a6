"""Stage `reference`: log-probabilities of every response token under the base model, computed once.

Ray actors of the worker group `reference` compute shards of pairs. A shard's address is made from all that determines
it (its pairs, the base model, the precision, how we compute), so a killed run, another beta or another cluster computes
only what is missing.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks import stage
from tasks.errors import UserError
from tasks.files import fingerprint, hash_files, home, publish, write_json
from tasks.models import base_folder, base_hash
from tasks.pairs import REFERENCE_SCHEMA, SPLITS, read_pairs, read_rows, write_rows
from tasks.params import Cluster, load_cluster, load_params
from tasks.paths import REFERENCE
from tasks.progress import Bar
from tasks.tracking import Run
from training.packing import Pair

NUMERICS = 1  # raise when the values that we compute change


def reference(run: Run) -> None:
    params, cluster = load_params(), load_cluster()
    model = base_folder(params.source.model)
    basis = {"base": base_hash(), "dtype": params.reference.dtype, "numerics": NUMERICS}
    folder = home() / cluster.output_dir / "reference" / fingerprint(basis)
    folder.mkdir(parents=True, exist_ok=True)
    shards = {split: list(_shards(read_pairs(split), cluster.reference.shard_pairs, folder)) for split in SPLITS}
    missing = [(pairs, path) for split in SPLITS for pairs, path in shards[split] if not path.exists()]
    total = sum(len(pairs) for split in SPLITS for pairs, _ in shards[split])
    found = total - sum(len(pairs) for pairs, _ in missing)
    print(f"reference: {found} of {total} pairs were computed before")
    if missing:
        _compute(missing, found, total, model, params.reference.dtype, cluster)
    with publish(REFERENCE) as out:
        for split in SPLITS:
            rows = [row for _, path in shards[split] for row in read_rows(path)]
            write_rows(out / f"{split}.parquet", REFERENCE_SCHEMA, rows)
        write_json(out / "manifest.json", {**basis, "files": hash_files(out)})
    run.summary({"reference_pairs": total, "reference_pairs_computed": total - found})


def _shards(pairs: list[Pair], size: int, folder: Path) -> Iterator[tuple[list[Pair], Path]]:
    for start in range(0, len(pairs), size):
        shard = pairs[start : start + size]
        content = [[pair.id, *map(list, (pair.prompt, pair.chosen, pair.rejected))] for pair in shard]
        yield shard, folder / f"{fingerprint(content)}.parquet"


def _compute(
    missing: list[tuple[list[Pair], Path]], found: int, total: int, model: Path, dtype: str, cluster: Cluster
) -> None:
    from tasks.cluster import ray_cluster, warn_of_slow_dtype

    group = cluster.reference
    workers = min(group.num_workers, len(missing))
    warn_of_slow_dtype("reference", dtype, group.gpus_per_worker)
    with ray_cluster(cluster.ray.address, workers * group.cpus_per_worker), Bar("reference", total, "pairs") as bar:
        import ray
        from ray.util import ActorPool

        actor = ray.remote(num_cpus=group.cpus_per_worker, num_gpus=group.gpus_per_worker, max_restarts=2)(Scorer)
        actors = [actor.options(max_task_retries=2).remote(str(model), dtype) for _ in range(workers)]
        pool, done = ActorPool(actors), found
        work = [(pairs, str(path), group.row_tokens) for pairs, path in missing]
        try:
            for count in pool.map_unordered(lambda worker, shard: worker.score.remote(*shard), work):
                done += count
                bar.update(done)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ValueError):
                raise UserError(f"source.model: {error.cause}. Choose another model.") from None
            raise


class Scorer:
    """A worker of the group: holds the base model and writes whole shards."""

    def __init__(self, model: str, dtype: str) -> None:
        from training.model import best_device, load_model

        self.device, self.dtype = best_device(), dtype
        self.model = load_model(Path(model), dtype, self.device).eval()
        self.checked = False

    def score(self, pairs: list[Pair], path: str, row_tokens: int) -> int:
        """Compute a shard and publish it; how many pairs it has."""
        import os

        from training.dtypes import DTYPES
        from training.logps import check_packing, score_pairs

        if not self.checked:
            check_packing(self.model, sorted(pairs, key=len)[:2], DTYPES[self.dtype], self.device)
            self.checked = True
        rows: list[dict[str, Any]] = [
            {"id": pair.id, "chosen_logps": chosen, "rejected_logps": rejected}
            for pair, (chosen, rejected) in zip(
                pairs, score_pairs(self.model, pairs, row_tokens, self.device), strict=True
            )
        ]
        aside = Path(f"{path}.{os.getpid()}")
        write_rows(aside, REFERENCE_SCHEMA, rows)
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(aside, path)
        return len(pairs)


if __name__ == "__main__":
    stage.main(reference)
