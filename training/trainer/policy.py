"""Load the policy, put it into its DeepSpeed engine, and write it as an adapter or as a whole model."""

import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.distributed.sequence_parallel import sequence_group
from training.distributed.tensor_parallel import tensor_group
from training.models import adapters, weights
from training.models.compiling import compile_layers
from training.models.loading import load_model
from training.models.routers import LoadBalancingLoss
from training.models.sharded import gather_convolutions, sharded_loading
from training.models.transformers_internals import revert_weight_conversion
from training.pairs.pair import Pair
from training.scoring.attention import LONG_ATTENTION
from training.scoring.logps import Scorer
from training.scoring.parity import select_scoring_path, share_tokens
from training.trainer import engine
from training.trainer.recompute import recompute_layers, tile_mlps
from training.trainer.settings import Settings
from training.trainer.split_model import check_split, load_split, make_probe
from training.trainer.start_checks import check_determinism

USE_ZERO_2 = "set actor_train.zero_stage to 2 in infra/cluster.yaml"


def start_policy(
    settings: Settings, pairs: Sequence[Pair], device: torch.device, universal: bool, notify: Callable[[str], None]
) -> Any:
    """The untrained policy in its engine; `universal` if it will load a checkpoint of another number of ranks."""
    config = engine.deepspeed_config(
        settings.zero_stage, settings.offload, settings.dtype, settings.max_grad_norm, universal
    )
    tensor, probe = tensor_group(), make_probe(pairs)
    if tensor:
        load = partial(build_policy, settings, torch.device("cpu"))
        model, expected = load_split(Path(settings.model), load, tensor, probe, _placement(settings, device))
    else:
        with sharded_loading(config):
            model = build_policy(settings, device)
    scorer = Scorer(model)
    scorer.head_is_sharded = settings.zero_stage == 3
    if settings.zero_stage == 3:
        gather_convolutions(scorer)
    ratio = settings.adapter.get("lora_plus_ratio", 1.0) if settings.adapter else 1.0
    policy = engine.initialize(scorer, config, settings.learning_rate, settings.weight_decay, settings.optimizer, ratio)
    if tensor:
        check_split(scorer.model, tensor, probe, expected, device)
    note = select_scoring_path(scorer, pairs, device)
    engine.forget_gradients(policy)
    if note:
        notify(note)
    if scorer.path == "plain" and settings.zero_stage == 3:
        raise ValueError(
            f"{note}. Under ZeRO-3 each pass is a collective, and ranks would make different numbers of passes: "
            f"{USE_ZERO_2}"
        )
    if group := sequence_group():
        share_tokens(scorer, group, pairs, device)
    check_determinism(scorer, pairs, device)
    # The hooks that record router logits are untested inside compiled layers; each number of tiles would be a graph.
    compiles = settings.compile and device.type == "cuda" and settings.zero_stage < 3 and scorer.is_packed
    if compiles and not settings.router_aux_loss_coef and not settings.mlp_tile_tokens:
        compile_layers(scorer.causal)
    scorer.load_balance = LoadBalancingLoss(scorer.causal) if settings.router_aux_loss_coef else None
    return policy


def _placement(settings: Settings, device: torch.device) -> torch.device | None:
    return None if settings.zero_stage == 3 else device  # ZeRO-3 places the shards itself


def build_policy(settings: Settings, device: torch.device) -> nn.Module:
    model: Any = load_model(Path(settings.model), settings.dtype, _placement(settings, device), settings.quantization)
    if settings.adapter:
        options = {name: value for name, value in settings.adapter.items() if name != "lora_plus_ratio"}
        model = adapters.add_adapter(model, **options, seed=settings.seed)
        model.get_input_embeddings().register_forward_hook(_require_gradient)
    if settings.activation_checkpointing:
        # Under ZeRO-3 a repeated pass gathers weights again: to torch, which keeps results, it is another computation.
        kept = None if settings.zero_stage == 3 else LONG_ATTENTION
        recompute_layers(model, settings.activation_checkpointing == "offload", kept)
        Scorer(model).causal.disable_input_require_grads()  # of transformers; ours is `_require_gradient`
    if settings.mlp_tile_tokens and not tile_mlps(model, settings.mlp_tile_tokens):
        raise ValueError(
            f"actor_train.mlp_tile_tokens: {type(model).__name__} has no MLP. Set it to null in infra/cluster.yaml"
        )
    return model.train()


def _require_gradient(_: nn.Module, __: Any, embedded: Tensor) -> None:
    """Make the input of the first layer like those of the others, so that all layers share a compiled graph.

    Without gradients no input requires one. transformers' `enable_input_require_grads` would make another graph there.
    """
    if torch.is_grad_enabled():
        embedded.requires_grad_()


def save_policy(model: nn.Module, settings: Settings, name: str) -> None:
    """Write the adapter, or the whole model, to a folder of that name by an atomic rename. A collective.

    A rank holds no more of a whole model than its shard and one file of the new folder.
    """
    temporary, target = Path(settings.folder) / f".{name}", Path(settings.folder) / name
    parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad or not settings.adapter]
    tensors = engine.gathered(parameters)
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
        if settings.adapter:
            adapters.save_adapter(model, dict(tensors), temporary, settings.model_name)  # type: ignore[arg-type]
        else:
            _save_model(model, tensors, temporary)
            adapters.copy_generation_config(Path(settings.model), temporary)  # `load_model` kept a part of it
        os.rename(temporary, target)
    deque(tensors, maxlen=0)  # the other ranks take part in every gather
    dist.barrier()


def _save_model(model: Any, tensors: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """Like `save_pretrained`, but tensor by tensor, unless weights have other names in files than in modules."""
    shapes = {name: getattr(parameter, "ds_shape", parameter.shape) for name, parameter in model.named_parameters()}
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    if revert_weight_conversion(model, empty).keys() != shapes.keys():
        model.save_pretrained(folder, state_dict=dict(tensors))
        return
    folder.mkdir()
    weights.write(tensors, folder, adapters.SHARD_SIZE)
    model.config.architectures, model.config.dtype = [type(model).__name__], model.dtype
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
