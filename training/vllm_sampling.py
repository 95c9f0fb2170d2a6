"""The same sampling by vLLM, where it is installed, in a process of its own: it keeps a GPU's memory until it ends.

python -m training.vllm_sampling REQUEST.json ANSWERS.json
"""

import ctypes
import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from training.outputs import Answer


def sample(
    model: Path,
    adapter: Path | None,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    request: dict[str, Any],
    folder: Path,
) -> list[Answer]:
    """`request` has dtype, max_new_tokens, temperature, top_p, seed and gpu_memory_utilization.

    `folder` is for the two files.
    """
    ends = _ends(model, tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    asked, told = folder / "request.json", folder / "answers.json"
    content = {"model": str(model), "adapter": str(adapter) if adapter else None, "ends": ends, **request}
    asked.write_text(json.dumps({**content, "prompts": [list(ids) for ids in prompts]}))
    subprocess.run([sys.executable, "-m", "training.vllm_sampling", str(asked), str(told)], check=True)
    return [_answer(ids, tokenizer, ends) for ids in json.loads(told.read_text())]


def _answer(ids: list[int], tokenizer: PreTrainedTokenizerBase, ends: list[int]) -> Answer:
    finished = bool(ids) and ids[-1] in ends
    text = tokenizer.decode(ids[:-1] if finished else ids, skip_special_tokens=True)
    return Answer(str(text), tuple(ids), finished)


def _ends(model: Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    named: Any = None
    if (model / "generation_config.json").exists():
        named = GenerationConfig.from_pretrained(model).eos_token_id
    more = named if isinstance(named, list) else [named]
    return sorted({token for token in [tokenizer.eos_token_id, *more] if isinstance(token, int)})


def _generate(request: dict[str, Any]) -> list[list[int]]:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    adapter = request["adapter"]
    rank = json.loads((Path(adapter) / "adapter_config.json").read_text())["r"] if adapter else 16
    engine = LLM(
        model=request["model"],
        dtype=request["dtype"],
        seed=request["seed"],
        gpu_memory_utilization=request["gpu_memory_utilization"],  # of the whole GPU
        enable_lora=adapter is not None,
        max_lora_rank=rank,
        generation_config="vllm",  # nothing of the model's own
    )
    how = [
        SamplingParams(
            temperature=request["temperature"],
            top_p=request["top_p"],
            max_tokens=request["max_new_tokens"],
            seed=_seed(ids, request["seed"]),
            stop_token_ids=request["ends"],
        )
        for ids in request["prompts"]
    ]
    lora = LoRARequest("policy", 1, adapter) if adapter else None
    asked = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    return [list(found.outputs[0].token_ids) for found in engine.generate(asked, how, lora_request=lora)]


def _seed(prompt: Sequence[int], seed: int) -> int:
    """Each prompt's own, whichever requests it is batched with."""
    digest = hashlib.sha256(f"{seed}:{','.join(map(str, prompt))}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def main() -> None:
    if sys.platform == "linux":  # a killed worker must not leave vLLM on its GPU
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG
    asked, told = map(Path, sys.argv[1:3])
    told.write_text(json.dumps(_generate(json.loads(asked.read_text()))))


if __name__ == "__main__":
    main()
