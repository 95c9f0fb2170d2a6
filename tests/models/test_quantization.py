"""LoRA on a quantized base: every stage that loads the base quantizes it alike, or refuses alike."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.compare.reevaluate import evaluated_weights
from tasks.config.cluster import load_cluster
from tasks.config.params import load_params
from tasks.errors import UserError
from tasks.evaluate.drawing import sample_answers
from tasks.evaluate.scoring import base_and_policy, evaluator_pool
from tasks.reference.stage import BaseModel, ReferenceScorer
from tasks.system.files import hash_files, read_json, write_json
from tests.benchmarks.workload import make_model
from tests.support.settings import make_settings
from tests.support.workspaces import make_workspace, run
from training.models import loading
from training.models.tokenizer import load_tokenizer
from training.trainer.policy import build_policy

ON_GPU = torch.cuda.is_available()
NF4 = {"train.quantization": "nf4", "reference.quantization": "nf4"}
SAME = ("loss", "rewards/margins", "rewards/chosen", "logps/chosen", "kl")  # in train and in evaluate
GPU: dict[str, Any] = {
    **dict.fromkeys(("reference.gpus_per_worker", "actor_train.gpus_per_worker"), 1),
    **dict.fromkeys(("reference.row_tokens", "actor_train.row_tokens"), 4096),
    "tensorboard": False,
}


@pytest.fixture
def workspace(tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace whose held-out set is empty: enough for a stage to load its model."""
    import pyarrow as pa

    from tasks.artifacts.pairs import PAIR_SCHEMA

    root = make_workspace(tmp_path / "workspace", tiny_base, **NF4)
    monkeypatch.chdir(root)
    Path("data/pairs").mkdir(parents=True)
    pa.ipc.new_stream("data/pairs/eval.arrow", PAIR_SCHEMA).close()
    files = hash_files(tiny_base)
    sizes = {name: (tiny_base / name).stat().st_size for name in files}
    manifest = {"model": str(tiny_base), "sha256": "b" * 64, "files": files, "sizes": sizes}
    write_json(Path("data/base/manifest.json"), manifest)
    return root


def test_without_bitsandbytes_no_stage_falls_back_to_16_bits(
    workspace: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    params = load_params()
    manifest = {"params": params.model_dump()}
    adapter = params.train.adapter
    assert adapter is not None
    trained = make_settings(model=str(tiny_base), folder="x", adapter=adapter.model_dump(), quantization="nf4")
    loads: list[Callable[[], Any]] = [
        lambda: ReferenceScorer().load(BaseModel(str(tiny_base), "float32", params.reference.quantization), []),
        lambda: build_policy(trained, torch.device("cpu")),
        lambda: sample_answers(workers, params.evaluate, policy, [[1]], lambda count: None),
        lambda: sample_answers(workers, params.evaluate, exported, [[1]], lambda count: None),
    ]
    with evaluator_pool(load_cluster(), "evaluate") as workers:
        _, policy = base_and_policy(workers, params)
        exported = evaluated_weights(workers, params, workspace / "data/model", manifest)
        for load in loads:
            with pytest.raises((ValueError, UserError), match="nf4 needs `pip install bitsandbytes`"):
                load()


@pytest.fixture
def base(tmp_path: Path, tiny_base: Path) -> Path:
    """The demo's model on a CPU; on a GPU one of Qwen2.5-0.5B's shape, with random weights and the demo's tokenizer."""
    if not ON_GPU:
        return tiny_base
    make_model("0.5b", "bfloat16", tmp_path / "base")
    load_tokenizer(tiny_base).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.slow
@pytest.mark.exhaustive  # test_thumbs.py has nf4 on unpaired rows, test_fp8.py layers in fp8
@pytest.mark.parametrize("kind", ["fp8", "nf4"])
def test_a_run_on_a_quantized_base_is_evaluated_as_it_was_trained_and_exported_with_the_difference(
    tmp_path: Path, base: Path, kind: str
) -> None:
    """Through the real stages, on a GPU in bf16 or on a CPU in float32: `eval/*` of train is what evaluate finds."""
    dtype = "bfloat16" if ON_GPU else "float32"
    precision = {f"{stage}.dtype": dtype for stage in ("reference", "train", "evaluate", "export")}
    one = {"actor_train.num_workers": 1, **(GPU if ON_GPU else {})}
    quantization = dict.fromkeys(("train.quantization", "reference.quantization"), kind)
    few = {"train.max_steps": 6}
    root = make_workspace(tmp_path / "workspace", base, 60, one, **quantization, **precision, **few)
    said = run(root, "source", "prepare", "reference", "train", "evaluate", "export")

    before, after = (read_json(root / f"data/metrics/{stage}.json") for stage in ("train", "evaluate"))
    found = read_json(root / "data/model/manifest.json")["checks"]["quantized_policy"]
    print(said, found, *((name, before[f"eval/{name}"], after[name]) for name in SAME), sep="\n")
    rounding = 0.05 if ON_GPU else 1e-3
    for name in SAME:
        assert after[name] == pytest.approx(before[f"eval/{name}"], rel=rounding, abs=rounding), name
    assert 0 < found["kl"] < 1
    assert "evaluated: the mean KL of next tokens is" in said
    card = (root / "data/model/README.md").read_text()
    assert f"measured with the {kind} base and may differ for these weights**: the mean KL of their" in card
    assert "quantization_config" not in read_json(root / "data/model/config.json")  # a plain 16- or 32-bit model
