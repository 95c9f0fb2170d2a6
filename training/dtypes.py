"""Precisions by name."""

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def gpu_has_bfloat16() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def slow_here(dtype: str) -> bool:
    """Whether this machine's CPU has no instructions for the precision: it then takes a hundred times as long."""
    known = {
        "bfloat16": torch.ops.mkldnn._is_mkldnn_bf16_supported,
        "float16": torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return dtype in known and not known[dtype]()
