"""Stage `sft`: supervised fine-tuning of the base model, if params.yaml has a section `sft`.

It learns the chosen answers, or the data of `source.sft`, on the worker group `actor_train`. The result in data/sft
takes the place of the base model: the reference model of DPO, and the start of the policy. Without the section
data/sft holds an empty manifest.
"""

from pathlib import Path

from tasks.artifacts.models import model_hashes, source_folder, source_hash
from tasks.artifacts.pairs import check
from tasks.artifacts.training_data import TrainingData
from tasks.config.cluster import load_cluster
from tasks.config.params import Params, load_params
from tasks.config.paths import SFT
from tasks.config.train import Train
from tasks.errors import UserError
from tasks.system.files import fingerprint, publish, sha256, write_json
from tasks.tracking.journal import StageJournal
from tasks.train.driver import Training, check_options, train_locked
from tasks.train.progress import metrics_by_step, name_keys
from tasks.train.worker import JOURNAL
from training.pairs import batches

MANIFEST = "manifest.json"


def sft(run: StageJournal) -> None:
    params, cluster = load_params(), load_cluster()
    assert params.sft
    check_options("sft", params.sft, cluster)
    data = TrainingData(preferences=False, own_file=params.source.sft is not None)
    for split in ("train", "eval"):
        check(data.file(split), "prepare")
    inputs = {
        "base": source_hash(),
        "pairs": fingerprint([sha256(data.file(split)) for split in ("train", "eval")]),
        "reference": None,
    }
    model, count = source_folder(params.source.model), len(data.read("train"))
    steps = batches.total_steps(count, params.sft.global_batch_size, params.sft.epochs, params.sft.max_steps)
    answers = min(count, steps * params.sft.global_batch_size)  # max_steps may leave some out
    training = Training("sft", with_sft_as_train(params), cluster, model, data, inputs)
    try:
        with train_locked(training, run) as folder, publish(SFT) as out:
            logged = (item for row in metrics_by_step(folder / JOURNAL).values() for item in row.items())
            metrics = {name: value for name, value in logged if name in ("loss", "eval/loss")}
            _write_model(model, folder / "policy", out)
            write_json(out / MANIFEST, {**model_hashes(out), "answers": answers, "metrics": metrics})
    except UserError as error:
        raise UserError(name_keys(str(error), "sft")) from error
    run.summary({f"sft/{name}": value for name, value in metrics.items()})
    print(f"sft: the base model has learnt {answers} answers, held-out loss {metrics['eval/loss']:.3f}")


def with_sft_as_train(params: Params) -> Params:
    """The parameters with the section `sft` in place of `train`, and the loss of SFT."""
    assert params.sft
    unused = dict.fromkeys(Train.model_fields.keys() - type(params.sft).model_fields.keys())
    own = {"loss": {"sft": 1.0}, "reference_model": "start", "stop_on_alarm": False}
    return params.model_copy(update={"train": Train.model_validate({**unused, **params.sft.model_dump(), **own})})


def _write_model(base: Path, policy: Path, out: Path) -> None:
    """The tuned model with its tokenizer."""
    from training.models.adapters import merge_folders  # heavy: torch, peft

    merge_folders(base, policy, out)


def skip() -> None:
    with publish(SFT) as out:
        write_json(out / MANIFEST, {})
    print("sft: off")
