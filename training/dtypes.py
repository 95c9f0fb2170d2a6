"""Precisions by name."""

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def slow_here(dtype: str) -> bool:
    """Whether this machine's CPU has no instructions for the precision: it then takes a hundred times as long."""
    return dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
