"""On an NVIDIA GPU: FlashAttention over rows, the head's kernels, compiled layers and 4 bits match plain passes.

python -m pytest tests/train/test_gpu.py
"""

import importlib.util
import json
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from tasks.system.files import sha256
from tasks.tracking.journal_reader import read_journal, read_lines
from tests.support import engine
from tests.support.scoring import make_scorer, score_pairs
from tests.support.workspaces import make_workspace, run, start, wait_for_step, workers
from training.models import adapters
from training.models.compiling import compile_layers
from training.models.loading import load_model
from training.objectives.metrics import pair_logps, row_loss
from training.objectives.objective import Objective
from training.objectives.pair_logps import PairLogps
from training.pairs.packing import build_row
from training.pairs.pair import Pair
from training.scoring import attention, head
from training.scoring.logps import LOGP_TOLERANCE
from training.scoring.parity import scoring
from training.trainer.recompute import recompute_layers
from training.trainer.start_checks import check_start

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
GPU = torch.device("cuda")
SHAPE = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
HYBRID = ["linear_attention", "full_attention", "linear_attention"]
DELTA_NET = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, **HEADS),
    "qwen2": Qwen2Config(**SHAPE, **HEADS, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, **HEADS, head_dim=64),
    "mistral": MistralConfig(**SHAPE, **HEADS, sliding_window=32),
    "gemma2": Gemma2Config(**SHAPE, **HEADS, head_dim=64, sliding_window=32),
    # Recurrent layers, which are not compiled: by their kernels where installed.
    "qwen3.5": Qwen3_5TextConfig(**SHAPE, **HEADS, head_dim=64, **DELTA_NET, layer_types=HYBRID),
    "bamba": BambaConfig(**SHAPE, **HEADS, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_state=64),
}


def make_pairs(count: int = 6) -> list[Pair]:
    rng = np.random.default_rng(0)

    def tokens() -> np.ndarray:
        return rng.integers(0, 4096, rng.integers(3, 120))

    parts = [(tokens(), tokens(), tokens()) for _ in range(count)]
    # The responses of every other pair share a prefix.
    parts[1::2] = [(p, np.append(s, c), np.append(s, r)) for p, c, r in parts[1::2] for s in [tokens()]]
    return [Pair(str(n), p, c, r, np.ones(len(c)), np.ones(len(r))) for n, (p, c, r) in enumerate(parts)]


def make_model(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(deepcopy(CONFIGS[name])).to(GPU, torch.bfloat16).eval()


def gradients(model: torch.nn.Module, scorer: torch.nn.Module, row: object) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    logps = scorer(row)[0]
    logps.sum().backward()
    return logps.detach(), torch.cat([p.grad.float().flatten() for p in model.parameters()])


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_compiled_rows_equal_plain_passes(name):
    model, pairs = make_model(name), make_pairs()
    row = build_row(pairs, range(len(pairs))).to(GPU)
    plain = make_scorer(model, pairs, GPU)
    plain.path = "plain"
    model.set_attn_implementation("eager")
    expected, expected_gradient = gradients(model, plain, row)
    scorer = make_scorer(model, pairs, GPU)
    assert scorer.path == "fused"
    compile_layers(model)
    given, gradient = gradients(model, scorer, row)
    assert (given - expected).abs().mean() < LOGP_TOLERANCE[torch.bfloat16]
    assert torch.nn.functional.cosine_similarity(gradient, expected_gradient, dim=0) > 0.999
    assert gradient.norm().item() == pytest.approx(expected_gradient.norm().item(), rel=0.02)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_long_sequences_by_cudnn_equal_plain_passes(name, monkeypatch):
    """Compiled and recomputed layers, which keep the results of long attention."""
    monkeypatch.setattr(attention, "LONG", 128)
    model, pairs = make_model(name).train(), make_pairs()
    row = build_row(pairs, range(len(pairs))).to(GPU)
    assert {part.cu_seqlens is None for part in attention.kernel_calls(row)} == {True, False}
    plain = make_scorer(model, pairs, GPU)
    plain.path = "plain"
    model.set_attn_implementation("eager")
    expected, expected_gradient = gradients(model, plain, row)
    scorer = make_scorer(model, pairs, GPU)
    assert scorer.path == "fused"
    recompute_layers(model, offload=False)
    compile_layers(model)
    with torch.profiler.profile() as profile:
        given, gradient = gradients(model, scorer, row)
    kernels = {event.key for event in profile.key_averages()}
    assert (
        "aten::_cudnn_attention_backward" in kernels or "aten::_scaled_dot_product_cudnn_attention_backward" in kernels
    )
    assert (given - expected).abs().mean() < LOGP_TOLERANCE[torch.bfloat16]
    assert torch.nn.functional.cosine_similarity(gradient, expected_gradient, dim=0) > 0.999


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "recomputed"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_head_kernels_match_torch(monkeypatch, keep, softcap):
    monkeypatch.setattr(head, "KEEP_BYTES", head.KEEP_BYTES if keep else 0)
    monkeypatch.setattr(head, "CHUNK_BYTES", 20_000 * 2 * 64)
    torch.manual_seed(0)
    hidden = torch.randn(150, 96, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    weight = (0.2 * torch.randn(20_000, 96, device=GPU)).bfloat16().requires_grad_()
    targets = torch.randint(0, 20_000, (150,), device=GPU)
    wanted = torch.randn(150, device=GPU)
    transform = head.LogitTransform(softcap=softcap)

    def run(values):
        hidden.grad = weight.grad = None
        (values[0] * wanted).sum().backward()
        return [*(value.detach().float() for value in values), hidden.grad.float(), weight.grad.float()]

    expected = run(head.target_values(transform(hidden @ weight.t()).float(), targets))
    given = run(head.FusedHead.apply(hidden, weight, None, targets, transform))
    for ours, theirs in zip(given, expected, strict=True):
        assert (ours - theirs).abs().max() <= 0.02 * theirs.abs().max()
    torch.testing.assert_close(given[0], expected[0], atol=2e-5, rtol=0)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_a_4_bit_policy_starts_as_its_reference_and_learns(tmp_path: Path):
    make_model("llama").save_pretrained(tmp_path)
    pairs, objective = make_pairs(), Objective({"sigmoid": 1.0}, {"beta": 0.1})
    base = load_model(tmp_path, "bfloat16", GPU, "nf4").eval()
    with scoring(base, pairs, GPU) as (reference, _):
        pairs = with_scores(pairs, reference)
    policy = adapters.add_adapter(base, 8, 16.0, "all-linear", False, False, seed=0)
    scorer = make_scorer(policy.train(), pairs, GPU)
    check_start(scorer, objective, pairs, 2048, GPU)
    assert sum(p.numel() for n, p in policy.named_parameters() if p.requires_grad and "lora" not in n) == 0
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-2)
    row, losses = build_row(pairs, range(len(pairs))).to(GPU), []
    for _ in range(10):
        loss = row_loss(scorer, objective, row)[0].mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(0.693, abs=0.02)
    assert losses[-1] < 0.5


def with_scores(pairs: list[Pair], scorer: torch.nn.Module) -> list[Pair]:
    scores = score_pairs(scorer, pairs, 2048, GPU)
    return [replace(p, ref_chosen_logps=c, ref_rejected_logps=r) for p, (c, r) in zip(pairs, scores, strict=True)]


def test_float16_trains_with_loss_scaling(tmp_path: Path):
    """Losses of float32, under every ZeRO stage; an overflow halves the scale, and training continues."""
    model = engine.make_model(tmp_path / "model")
    pairs = engine.make_pairs(model)
    scaled = {"loss_scaling": {"initial_scale_power": 12}}  # far from an overflow of this model
    stages = [engine.settings(tmp_path, model, f"zero{s}", pairs, zero_stage=s, **scaled) for s in (1, 2, 3)]
    huge = {"loss_scaling": {"initial_scale_power": 21}, "max_skipped_steps": 1}
    runs = [*stages, engine.settings(tmp_path, model, "huge", pairs, zero_stage=2, **huge)]
    logs = engine.run_ranks(tmp_path, 1, [{**each, "dtype": "float16"} for each in runs], gpu=True)
    expected = engine.plain_run(model, pairs[8:], Objective(*engine.OBJECTIVE))
    for stage in stages:
        steps = [line for line in logs[str(stage["name"])] if "loss" in line]
        assert [line["loss"] for line in steps] == pytest.approx([line["loss"] for line in expected], abs=2e-3)
        assert [line["grad_norm"] for line in steps] == pytest.approx(
            [line["grad_norm"] for line in expected], rel=2e-2
        )
        assert {line["loss_scale"] for line in steps} == {4096.0}
    last = [line for line in logs["huge"] if "loss" in line][-1]
    assert last["skipped_steps"] >= 1
    assert last["loss_scale"] == 2.0 ** (21 - last["skipped_steps"])
    said = [line["said"] for line in logs["zero1"] if "said" in line]
    assert any("bfloat16" in sentence for sentence in said) == torch.cuda.is_bf16_supported(including_emulation=False)


def test_sums_on_the_gpu_match_the_cpu():
    pairs, objective = make_pairs(), Objective({"sigmoid": 1.0}, {"beta": 0.1, "ld_alpha": 0.5})
    row = build_row(pairs, range(len(pairs)))
    values = -torch.rand(len(row.response_index))
    from training.scoring.logps import TokenLogps

    def sums(where: torch.device) -> PairLogps:
        tokens = TokenLogps(*(values.to(where) for _ in range(3)))
        return pair_logps(row.to(where), tokens, objective)

    for name in ("chosen_logps", "rejected_logps", "chosen_mean_logps", "chosen_tokens"):
        on_gpu, on_cpu = (getattr(sums(where), name).cpu() for where in (GPU, torch.device("cpu")))
        torch.testing.assert_close(on_gpu, on_cpu)


def test_offload_gives_the_same_losses_with_less_memory(tmp_path: Path):
    from tests.support.engine import run_ranks, settings

    torch.manual_seed(0)  # 68 million weights: more than the measured matrix product takes
    config = LlamaConfig(**{**SHAPE, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}, **HEADS)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "model")
    pairs = make_pairs(8 + 12)
    with scoring(load_model(tmp_path / "model", "bfloat16", GPU).eval(), pairs, GPU) as (reference, _):
        pairs = with_scores(pairs, reference)
    common = {"objective": ({"sigmoid": 1.0}, {"beta": 0.1}), "dtype": "bfloat16", "row_tokens": 2048, "compile": False}
    # Runs share a process, whose memory peak only rises, so the smallest run comes first.
    modes = {
        "all": {"zero_stage": 3, "offload": "all"},
        "optimizer": {"zero_stage": 2, "offload": "optimizer"},
        "none": {"zero_stage": 2},
    }
    runs = [settings(tmp_path, tmp_path / "model", name, pairs, **common, **mode) for name, mode in modes.items()]
    logs = run_ranks(tmp_path, 1, runs, gpu=True)
    courses = {name: [line for line in log if "loss" in line] for name, log in logs.items()}
    for name in ("optimizer", "all"):
        assert [line["loss"] for line in courses[name]] == pytest.approx(
            [line["loss"] for line in courses["none"]], abs=0.02
        )
    states = 12 * sum(parameter.numel() for parameter in model.parameters()) / 2**30  # bytes of AdamW, in GiB
    peaks = {name: max(line["peak_memory_gib"] for line in course) for name, course in courses.items()}
    assert all(0.0 < line["mfu"] < 1.0 for course in courses.values() for line in course)
    assert peaks["none"] - max(peaks["all"], peaks["optimizer"]) > 0.3 * states


@pytest.mark.slow
def test_a_preempted_worker_saves_a_checkpoint_and_the_run_resumes_from_it(tmp_path: Path, tiny_base: Path):
    """Under Ray: the worker handles the signal, and the next NCCL group forms through a file in the workspace."""
    one = {"num_workers": 1, "gpus_per_worker": 1, "row_tokens": 256}
    cluster = {f"{group}.{name}": value for group in ("reference", "actor_train") for name, value in one.items()}
    cluster |= {"actor_train.max_failures": 0, "actor_train.save_steps": 1000, "tensorboard": False}
    precision = {f"{stage}.dtype": "bfloat16" for stage in ("reference", "train", "evaluate")}
    workspace = make_workspace(tmp_path / "workspace", tiny_base, cluster=cluster, **precision, **{"train.epochs": 20})
    run(workspace, "source", "prepare", "reference")
    driver = start(workspace, "train")
    group = workers(driver, 1)
    journal = wait_for_step(driver, workspace)
    group[0].terminate()
    said, _ = driver.communicate(timeout=900)
    assert driver.returncode == 0, said
    (step,) = map(int, re.findall(r"a worker was asked to stop: the checkpoint of step (\d+) is saved", said))
    steps = [line["step"] for line in read_lines(journal)[0] if "loss" in line.get("values", {})]
    assert steps == list(range(1, len(steps) + 1))  # nothing was computed twice
    assert 0 < step < len(steps)
    print(said)


@pytest.mark.parametrize("adapter", [None, engine.LORA], ids=["full", "lora"])
def test_deterministic_runs_and_a_resumed_one_are_bit_identical(tmp_path: Path, adapter: dict | None):
    """With compiled layers; the resumed run in another process. Prints whether runs without the option are equal."""
    config = LlamaConfig(**{**SHAPE, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}, **HEADS)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    pairs = make_pairs(8 + 160)
    with scoring(load_model(tmp_path / "model", "bfloat16", GPU).eval(), pairs, GPU) as (reference, _):
        pairs = with_scores(pairs, reference)
    common = {"objective": ({"sigmoid": 1.0}, {"beta": 0.1}), "dtype": "bfloat16", "row_tokens": 4096, "save_steps": 5}
    common |= {"global_batch_size": 16, "learning_rate": 1e-4, "adapter": adapter, "keep_checkpoints": 10, "epochs": 2}

    def make(name: str, deterministic: bool) -> dict:
        return engine.settings(tmp_path, tmp_path / "model", name, pairs, **common, deterministic=deterministic)

    def weights(run: dict) -> str:
        (path,) = (Path(run["folder"]) / "policy").glob("*.safetensors")
        return sha256(path)

    runs = [make("first", True), make("second", True), make("free", False), make("free-again", False)]
    engine.run_ranks(tmp_path, 1, runs, gpu=True)
    first, second, *free = map(weights, runs)
    engine.run_ranks(tmp_path, 1, [{**runs[0], "again_from": 10}], gpu=True)
    print("without train.deterministic:", "equal" if free[0] == free[1] else "not equal")
    assert second == first
    assert weights(runs[0]) == first


@pytest.mark.slow
def test_a_sharded_model_runs_all_stages_in_bfloat16(tmp_path: Path, tiny_base: Path):
    """ZeRO-3 on one GPU: NCCL, bfloat16, DeepSpeed's streams; tests/distributed/test_split.py shards over two ranks."""
    one = {"num_workers": 1, "gpus_per_worker": 1, "row_tokens": 256, "zero_stage": 3}
    groups = ("reference", "actor_train", "inference")
    cluster = {f"{group}.{name}": value for group in groups for name, value in one.items()}
    precision = {f"{stage}.dtype": "bfloat16" for stage in (*groups[:1], "train", "evaluate", "export")}
    given = {**cluster, "tensorboard": False, "system_metrics": 1}
    workspace = make_workspace(tmp_path / "workspace", tiny_base, cluster=given, **precision)
    said = run(workspace, "source", "prepare", "reference", "train", "evaluate", "export")
    (journal,) = workspace.glob(".scratch/train/*/metrics.jsonl")
    trained = [line["values"] for line in read_lines(journal)[0] if "eval/loss" in line.get("values", {})][-1]
    evaluated = json.loads((workspace / "data/metrics/evaluate.json").read_text())
    for name in ("loss", "rewards/margins"):
        assert evaluated[name] == pytest.approx(trained[f"eval/{name}"], abs=0.05), name
    (tracked,) = workspace.glob(".scratch/runs/*/train.jsonl")
    logged = {
        name for line in read_journal(tracked)[0] for name in line.get("values", {}) if name.startswith("system/")
    }
    assert any("gpu" in name for name in logged), logged
    print(said, sorted(logged), evaluated["loss"], trained["eval/loss"])
