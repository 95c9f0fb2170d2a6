"""Stage `reference`: log-probabilities of every response token under the base model, computed once.

Ray actors of the worker group `reference` compute what is missing, in shards. A value's address is made from all that
determines it (the pair's tokens, the base model, the precision, how we compute), so a killed run, another beta, another
cluster or one changed pair computes only what is not there yet. A loss without a reference needs none.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks import stage
from tasks.dataset.logp_shards import key_of, known_keys, no_values, read_shards, shards, write_shard, write_values
from tasks.dataset.pairs import SPLITS, read_pairs
from tasks.errors import UserError
from tasks.files import fingerprint, hash_files, home, publish, write_json
from tasks.machines.lock import at_address
from tasks.machines.pool import Member
from tasks.models import base_folder, base_hash
from tasks.params import Cluster, Params, Reference, load_cluster, load_params
from tasks.paths import REFERENCE
from tasks.place import ReferenceGroup
from tasks.progress import Bar
from tasks.tracking.journal import Run
from training.packing import Pair

NUMERICS = 4  # raise when the values that we compute change
PATIENCE = 120.0  # seconds for shared storage to show what another node wrote

Shard = tuple[list[Pair], list[str]]


def reference(run: Run) -> None:
    params, cluster = load_params(), load_cluster()
    if params.reference.quantization and cluster.reference.zero_stage == 3:
        raise UserError(
            "infra/cluster.yaml: reference.zero_stage 3 cannot split a base of 4 bits. Set it to 0, or "
            "reference.quantization and train.quantization to null."
        )
    basis = {"base": base_hash(), **params.reference.model_dump(), "numerics": NUMERICS}
    if not params.train.needs_reference:
        print(f"reference: loss {', '.join(params.train.loss)} has no reference; nothing to compute")
        nothing: dict[str, list[str]] = {split: [] for split in SPLITS}
        _publish(nothing, nothing, no_values(), basis)
        return
    folder = home() / cluster.output_dir / "reference" / fingerprint(basis)
    folder.mkdir(parents=True, exist_ok=True)
    with at_address(folder, run.folder, "reference"):
        _reference(run, params, cluster, folder, basis)


def _reference(run: Run, params: Params, cluster: Cluster, folder: Path, basis: dict[str, Any]) -> None:
    pairs = {split: read_pairs(split) for split in SPLITS}
    keys = {split: [key_of(pair) for pair in pairs[split]] for split in SPLITS}
    values = read_shards(folder)
    missing = _missing(pairs, keys, known_keys(values), cluster.reference.shard_pairs)
    total = sum(map(len, pairs.values()))
    left = sum(len(some) for some, _ in missing)
    print(f"reference: {total - left} of {total} pairs were computed before", flush=True)
    if missing:
        model = base_folder(params.source.model)
        run.summary(_compute(missing, total - left, total, model, params.reference, cluster, folder))
        values = _written(folder, {key for _, some in missing for key in some})
    ids = {split: [pair.id for pair in pairs[split]] for split in SPLITS}
    _publish(ids, keys, values, basis)
    run.summary({"reference_pairs": total, "reference_pairs_computed": left})


def _missing(pairs: dict[str, list[Pair]], keys: dict[str, list[str]], known: set[str], size: int) -> list[Shard]:
    wanted: list[Shard] = []
    for split in SPLITS:
        new = [(pair, key) for pair, key in zip(pairs[split], keys[split], strict=True) if key not in known]
        wanted += shards([pair for pair, _ in new], [key for _, key in new], size)
        known = known.union(key for _, key in new)
    return wanted


def _written(folder: Path, expected: set[str]) -> Any:
    """All values, once those of workers on other nodes can be read here."""
    from tasks.machines.cluster import look_again

    until = time.monotonic() + PATIENCE
    while expected - known_keys(values := read_shards(folder)):
        if time.monotonic() > until:
            raise UserError(
                f"Workers on other nodes wrote shards that are not in {folder} here. output_dir in "
                "infra/cluster.yaml must be storage that every node shares."
            )
        time.sleep(1)
        look_again(folder)
    return values


def _publish(ids: dict[str, list[str]], keys: dict[str, list[str]], values: Any, basis: dict[str, Any]) -> None:
    with publish(REFERENCE) as out:
        for split in SPLITS:
            write_values(out / f"{split}.parquet", ids[split], keys[split], values)
        write_json(out / "manifest.json", {**basis, "files": hash_files(out)})


def _compute(
    missing: Sequence[Shard], found: int, total: int, model: Path, params: Reference, cluster: Cluster, folder: Path
) -> dict[str, float]:
    """Tokens a second of each worker."""
    from tasks.machines.cluster import nodes_told, on_nodes, ray_cluster, room_for, warn_of_slow_dtype, worker

    group = cluster.reference
    split = group.zero_stage == 3
    workers = group.num_workers if split else min(group.num_workers, len(missing))
    warn_of_slow_dtype("reference", params.dtype, group.gpus_per_worker)
    with ray_cluster(cluster.ray, workers * group.cpus_per_worker) as private, Bar("reference", total, "pairs") as bar:
        import ray
        from ray.util import ActorPool

        work = [(*shard, str(folder), group.row_tokens) for shard in missing]
        tally = Tally(found, bar)
        with room_for(cluster.ray, group, workers) as placed, nodes_told(cluster.ray, bar):
            given = (str(on_nodes(cluster, model)), params.dtype, params.quantization, group.compile)
            try:
                if split:
                    _together(work, group, placed, given[:2], private, tally)
                    return tally.rates()
                actors = [worker(group, Scorer, placed, number).remote(number, *given) for number in range(workers)]
                for done in ActorPool(actors).map_unordered(lambda actor, shard: actor.score.remote(*shard), work):
                    tally.add(*done)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, ValueError):
                    raise UserError(f"source.model: {error.cause}. Choose another model.") from None
                raise
    return tally.rates()


def _together(
    work: Sequence[tuple[Any, ...]],
    group: ReferenceGroup,
    placed: Any,
    model: tuple[str, str],
    private: Path | None,
    tally: "Tally",
) -> None:
    """All workers compute each shard, its rows dealt out; when one is lost the group starts again with what is left.

    `model` is its folder and precision.
    """
    import ray

    from tasks.machines.cluster import RESTARTS, worker

    left, actors = list(work), []
    for attempt in range(RESTARTS + 1):
        try:
            actors = [
                worker(group, SplitScorer, placed, number, restarts=0).remote(number, group.num_workers, *model)
                for number in range(group.num_workers)
            ]
            meeting = ray.get(actors[0].meeting.remote(str(private) if private else None))
            ray.get([actor.join.remote(meeting, number, group.num_workers) for number, actor in enumerate(actors)])
            futures = [[actor.score.remote(*shard) for actor in actors] for shard in map(_stored, left)]
            while left:
                for done in ray.get(futures.pop(0)):
                    tally.add(*done)
                left.pop(0)
            return
        except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as error:  # its own, or of those it left
            if attempt == RESTARTS or isinstance(getattr(error, "cause", None), ValueError):
                raise
            tally.bar.say("reference: a worker was lost; the group starts again with the shards that are missing")
        finally:
            for actor in actors:
                ray.kill(actor)


def _stored(shard: tuple[Any, ...]) -> tuple[Any, ...]:
    """With its pairs in Ray's store, once for all workers."""
    import ray

    return (ray.put(shard[0]), *shard[1:])


class Tally:
    """Pairs and tokens done, of all workers and of each."""

    def __init__(self, found: int, bar: Bar) -> None:
        self.pairs, self.tokens, self.bar, self.begun = found, 0, bar, time.monotonic()
        self.workers: dict[int, tuple[int, float]] = {}

    def add(self, worker: int, pairs: int, tokens: int, seconds: float, note: str | None) -> None:
        if note and not self.workers:
            self.bar.say(f"reference: {note}")
        before = self.workers.get(worker, (0, 0.0))
        self.workers[worker] = (before[0] + tokens, before[1] + seconds)
        self.pairs, self.tokens = self.pairs + pairs, self.tokens + tokens
        self.bar.update(self.pairs, f"{self.tokens / (time.monotonic() - self.begun):.0f} tokens/s")

    def rates(self) -> dict[str, float]:
        return {
            f"reference/worker{worker}/tokens_per_second": tokens / max(seconds, 1e-9)
            for worker, (tokens, seconds) in sorted(self.workers.items())
        }


class Scorer:
    """A worker of the group: holds the base model and writes whole shards."""

    def __init__(self, number: int, model: str, dtype: str, quantization: str | None, compiled: bool) -> None:
        from training.model import best_device, load_model

        self.number, self.device, self.compiled = number, best_device(), compiled
        self.model = load_model(Path(model), dtype, self.device, quantization).eval()
        self.scorer: Any = None
        self.note: str | None = None

    def score(
        self, pairs: list[Pair], keys: list[str], folder: str, row_tokens: int
    ) -> tuple[int, int, int, float, str | None]:
        """Compute a shard and publish it: worker, pairs, tokens, seconds, and what is slow about it."""
        from training.logps import score_pairs

        self.scorer = self.scorer or self._scorer(pairs)
        begun = time.monotonic()
        write_shard(Path(folder), keys, score_pairs(self.scorer, pairs, row_tokens, self.device))
        return self.number, len(pairs), sum(map(len, pairs)), time.monotonic() - begun, self.note

    def _scorer(self, pairs: list[Pair]) -> Any:
        """In the fastest way that gives the model's own numbers."""
        from training import logps
        from training.model import compile_layers
        from training.proof import find_way

        scorer = logps.Scorer(self.model)
        self.note = find_way(scorer, pairs, self.device)
        if self.compiled and self.device.type == "cuda" and scorer.packs:
            compile_layers(self.model)
        return scorer


class SplitScorer(Member):
    """A worker of a group that shares one copy of the base model (ZeRO-3): each holds a part of the weights."""

    def __init__(self, number: int, world: int, model: str, dtype: str) -> None:
        self.number, self.world, self.model, self.dtype = number, world, model, dtype
        self.ready = False
        self.note: str | None = None

    def join(self, meeting: str, rank: int, world: int) -> None:
        from training.model import best_device
        from training.split import load_split

        super().join(meeting, rank, world)
        self.device = best_device()
        self.scorer, self.engine = load_split(Path(self.model), self.dtype)

    def score(
        self, pairs: list[Pair], keys: list[str], folder: str, row_tokens: int
    ) -> tuple[int, int, int, float, str | None]:
        """Compute this worker's rows of a shard and publish their pairs. A collective."""
        from training.logps import score_share
        from training.proof import find_way

        if not self.ready:
            self.note, self.ready = find_way(self.scorer, pairs, self.device), True
            if self.scorer.how == "plain":
                raise ValueError(f"{self.note}. Workers would differ in their passes: set reference.zero_stage to 0")
        begun = time.monotonic()
        scores = score_share(self.engine, pairs, row_tokens, self.device, rank=self.number, world=self.world)
        numbers = sorted(scores)
        if numbers:
            write_shard(Path(folder), [keys[n] for n in numbers], [scores[n] for n in numbers])
        tokens = sum(len(pairs[n]) for n in numbers)
        return self.number, len(numbers), tokens, time.monotonic() - begun, self.note


if __name__ == "__main__":
    stage.main(reference)
