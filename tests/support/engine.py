"""Small models and pairs, a training of them by plain torch, and the same training on ranks of DeepSpeed."""

import json
import os
import pickle
import random
import socket
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
)

from training.models.loading import load_model
from training.objectives.objective import Objective
from training.objectives.pair_logps import PairLogps
from training.pairs import batches
from training.pairs.pair import Pair
from training.scoring.logps import plain_logps

SHARED = {"beta": 0.1}
OBJECTIVE = ({"sigmoid": {"weight": 1.0, "label_smoothing": 0.1}, "sft": 0.5}, SHARED)
SCORED = ({"sigmoid": {"weight": 1.0, "label_smoothing": 0.1, "margin_scale": 0.5}, "sft": 0.5}, SHARED)
RECOMPUTED = {"activation_checkpointing": "offload", "mlp_tile_tokens": 7}
LORA = {"rank": 3, "alpha": 8.0, "targets": "all-linear", "use_rslora": False, "use_dora": False}
DORA, LORA_PLUS = {**LORA, "use_dora": True}, {**LORA, "lora_plus_ratio": 4.0}
PISSA = {**LORA, "use_rslora": True, "init": "pissa"}
SAVED = {**LORA, "modules_to_save": ["embed_tokens"]}  # and with it the tied head
VARIANTS = {"dora": DORA, "pissa": PISSA, "saved-modules": SAVED}
SAVED_VARIANTS = ["dora", "zero2-pissa", "saved-modules"]  # that of ZeRO-2 has two ranks, the others one
RATE, BATCH = 1e-3, 6
CLIP, PEAK = 0.2, 1e-2  # of the runs named options
OPTIONS = {"learning_rate": PEAK, "max_grad_norm": CLIP, "warmup_fraction": 0.5, "schedule": "linear"}
EVALUATED = ("loss", "logps/chosen", "logps/rejected", "sft_loss", "rewards/chosen", "rewards/rejected")
COMPACT = {"adamw_bf16": 1e-3, "adamw_8bit": 3e-3}  # difference of a loss from that with float32 moments, at most
TRAINED, STEPS, SAVE = 10, 4, 2  # pairs; steps of two epochs; a checkpoint after each epoch
SAVED_STEP = f"step-{SAVE:08d}"
FAST = 3 * RATE  # so that few steps change the losses by more than the tolerance
CPU = torch.device("cpu")
PROJECT = Path(__file__).resolve().parents[2]
AOT = ({"aot": 1.0, "aot_unpaired": 0.5}, {"beta": 0.1})
SHAPE = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def save(folder: Path, config: PreTrainedConfig) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def make_model(folder: Path) -> Path:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 47, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=61, num_key_value_heads=2, **shape)).save_pretrained(folder)
    return folder


def make_pairs(model: Path, trained: int = 22) -> list[Pair]:
    """Eight held out, and those that are trained in batches of 6: the last batch is short."""
    rng, policy = random.Random(3), load_model(model, "float32")

    def tokens() -> list[int]:
        return [rng.randrange(61) for _ in range(rng.randint(2, 9))]

    made = []
    for number in range(8 + trained):
        prompt, chosen, rejected = tokens(), tokens(), tokens()
        with torch.no_grad():
            ref_chosen_logps, ref_rejected_logps = (
                plain_logps(policy, prompt, r, CPU).tolist() for r in (chosen, rejected)
            )
        masks = [1] * len(chosen), [1] * len(rejected)
        reference = {"ref_chosen_logps": ref_chosen_logps, "ref_rejected_logps": ref_rejected_logps}
        made.append(Pair(str(number), prompt, chosen, rejected, *masks, **reference))
    return made


def plain_run(
    model: Path,
    pairs: list[Pair],
    objective: Objective,
    adapter: dict | None = None,
    rates: list[float] | None = None,
    clip: float = 1.0,
) -> list[dict[str, float]]:
    """The metrics of each step: two ordinary passes per pair, one backward pass per step."""
    policy = load_model(model, "float32")
    policy = peft_model(policy, adapter) if adapter else policy
    policy.train()
    trainable = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    ratio = (adapter or {}).get("lora_plus_ratio", 1.0)
    groups = [
        {"params": [p], "ratio": ratio if "lora_B" in name else 1.0, "weight_decay": 0.01 * (p.dim() > 1)}
        for name, p in policy.named_parameters()
        if p.requires_grad
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    steps, seen = batches.total_steps(len(pairs), BATCH, 2, None), []
    rates = rates or [batches.learning_rate(step, steps, RATE, 0.1, "cosine") for step in range(steps)]
    for step, rate in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = rate * group["ratio"]
        chosen = [pairs[number] for number in batches.step_pairs(step, len(pairs), BATCH, seed=0)]
        given, weight = batch_pairs(policy, chosen, objective)
        loss, metrics = plain_metrics(given, weight, chosen, objective)
        loss.backward()
        metrics["num_zeros_in_grad"] = float(sum((p.grad == 0).sum().item() for p in trainable))
        metrics["grad_norm"] = torch.nn.utils.clip_grad_norm_(trainable, clip).item()
        optimizer.step()
        optimizer.zero_grad()
        seen.append({**metrics, "learning_rate": rate, "epoch": (step + 1) * BATCH / len(pairs)})
    return seen


def peft_model(policy: torch.nn.Module, adapter: dict) -> torch.nn.Module:
    """The policy with an adapter, made by peft alone."""
    torch.manual_seed(0)
    lora = LoraConfig(
        r=adapter["rank"],
        lora_alpha=adapter["alpha"],
        target_modules="all-linear",
        use_rslora=adapter["use_rslora"],
        use_dora=adapter["use_dora"],
        init_lora_weights="pissa" if adapter.get("init") == "pissa" else True,
        modules_to_save=adapter.get("modules_to_save"),
        ensure_weight_tying="modules_to_save" in adapter,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(policy, lora)


def batch_pairs(policy: torch.nn.Module, pairs: list[Pair], objective: Objective) -> tuple[PairLogps, torch.Tensor]:
    """The log-probabilities of the whole batch by plain passes, and its weights."""
    names = ("chosen_ids", "rejected_ids")
    chosen, rejected = (
        torch.stack([plain_logps(policy, pair.prompt_ids, getattr(pair, name), CPU).sum() for pair in pairs])
        for name in names
    )
    refs = [
        torch.tensor([sum(getattr(pair, name)) for pair in pairs])
        for name in ("ref_chosen_logps", "ref_rejected_logps")
    ]
    counts = [torch.tensor([float(len(getattr(pair, name))) for pair in pairs]) for name in names]
    label, margin, weight = (torch.tensor([getattr(p, n) for p in pairs]) for n in ("label", "margin", "weight"))
    given = PairLogps(
        chosen_logps=chosen,
        rejected_logps=rejected,
        ref_chosen_logps=refs[0],
        ref_rejected_logps=refs[1],
        chosen_mean_logps=chosen / counts[0],
        rejected_mean_logps=rejected / counts[1],
        chosen_tokens=counts[0],
        rejected_tokens=counts[1],
        label=label,
        margin=margin if objective.reads_margin else 0.0,
    )
    return given, weight


def plain_metrics(
    given: PairLogps, weight: torch.Tensor, pairs: list[Pair], objective: Objective
) -> tuple[torch.Tensor, dict[str, float]]:
    """The weighted mean loss over the whole batch, and the batch's logged metrics."""
    loss = (objective.losses(given)["loss"] * weight).sum() / weight.sum()
    beta = float(objective.options["beta"])
    metrics = {
        "loss": loss,
        "logps/chosen": given.chosen_logps.mean(),
        "logps/rejected": given.rejected_logps.mean(),
        "sft_loss": -given.chosen_mean_logps.mean(),
        "rewards/chosen": beta * (given.chosen_logps - given.ref_chosen_logps).mean(),
        "rewards/rejected": beta * (given.rejected_logps - given.ref_rejected_logps).mean(),
        "pairs": len(pairs),
        "tokens": sum(len(p.prompt_ids) + len(p.chosen_ids) + len(p.rejected_ids) - common_tokens(p) for p in pairs),
    }
    return loss, {name: torch.as_tensor(value).item() for name, value in metrics.items()}


@torch.no_grad()
def evaluated(policy: torch.nn.Module, pairs: list[Pair], objective: Objective) -> dict[str, float]:
    """The held-out metrics by plain passes."""
    _, metrics = plain_metrics(*batch_pairs(policy, pairs, objective), pairs, objective)
    return {name: metrics[name] for name in EVALUATED}


def common_tokens(pair: Pair) -> int:
    """Length of the shared response prefix, which is computed once; each response keeps its last token."""
    pairs = zip(pair.chosen_ids[:-1], pair.rejected_ids[:-1], strict=False)
    return len(list(takewhile(lambda both: both[0] == both[1], pairs)))


def settings(folder: Path, model: Path, name: str, pairs: list[Pair], **changes: object) -> dict[str, object]:
    folder = folder / name
    folder.mkdir()
    (folder / "pairs.pickle").write_bytes(pickle.dumps(pairs))
    return {
        "name": name,
        "model": str(model),
        "model_name": "test",
        "folder": str(folder),
        "objective": OBJECTIVE,
        "learning_rate": RATE,
        "weight_decay": 0.01,
        "global_batch_size": BATCH,
        "row_tokens": 64,
        "epochs": 2,
        "logging_steps": 1,
        "pairs": str(folder / "pairs.pickle"),
        **changes,
    }


def run_ranks(folder: Path, world: int, runs: list[dict[str, object]], gpu: bool = False) -> dict[str, list[dict]]:
    return run_groups(folder, {world: runs}, gpu)


def run_groups(folder: Path, runs: dict[int, list[dict[str, object]]], gpu: bool = False) -> dict[str, list[dict]]:
    """Runs by number of ranks. On a GPU, of one number only: CUDA does not survive a fork."""
    (folder / "settings.json").write_text(json.dumps(runs))
    (folder / "log.json").unlink(missing_ok=True)
    path = os.pathsep.join([str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])])
    common = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    common |= {} if gpu else {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    started = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.support.train_ranks",
                str(folder / "settings.json"),
                str(folder / "log.json"),
            ],
            env=common | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for variables in (_rank_variables(*runs) if gpu else [{}])
    ]
    outputs = [process.communicate(timeout=900)[0] for process in started]
    assert all(process.returncode == 0 for process in started), "\n".join(output[-3000:] for output in outputs)
    return json.loads((folder / "log.json").read_text())


def _rank_variables(world: int) -> list[dict[str, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
