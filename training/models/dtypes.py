"""Torch dtypes by name, and what the hardware supports."""

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def gpu_has_bfloat16() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def is_slow_on_cpu(dtype: str) -> bool:
    """Whether the CPU has no instructions for the dtype, so that it is about a hundred times slower."""
    supported = {
        "bfloat16": torch.ops.mkldnn._is_mkldnn_bf16_supported,
        "float16": torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return dtype in supported and not supported[dtype]()
