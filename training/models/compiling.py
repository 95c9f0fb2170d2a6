"""Compile the decoder layers of a model on a GPU. Imports torch alone: the compiler can start before the rest."""

from typing import Any

import torch
from torch import nn


def start_compiler() -> bool:
    """Start Inductor's processes, which load torch while this one loads transformers and the model. False: no GPU.

    Kernels of a graph that is compiled before they are ready are compiled one after the other.
    """
    if not torch.cuda.is_available():
        return False

    from torch._inductor.async_compile import AsyncCompile  # heavy

    AsyncCompile.warm_pool()
    AsyncCompile.use_process_pool()
    return True


def compile_layers(causal: Any) -> None:
    """Compile the decoder layers; all layers and all row lengths share one graph.

    Not of models with recurrent layers, which have convolutions: their kernels and the tables of a row's segments would
    split the graph.
    """
    from torch._inductor import config as inductor  # heavy

    from training.models.transformers_internals import unsplit_modules

    if any(isinstance(module, nn.Conv1d) for module in causal.modules()):
        return

    inductor.cpp.vec_isa_ok = False  # or Inductor builds programs to learn about the CPU, for half a minute
    layers = unsplit_modules(causal)
    for module in causal.modules():
        if type(module).__name__ in layers:
            module.compile(dynamic=True)
