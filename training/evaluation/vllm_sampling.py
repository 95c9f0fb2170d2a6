"""Sample by vLLM, if it is installed, in a process of its own: vLLM keeps a GPU's memory until its process ends.

python -m training.evaluation.vllm_sampling REQUEST.json ANSWERS.json
"""

import ctypes
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from training.evaluation.samples import Answer, make_answer, prompt_digest
from training.models.ends import end_ids_of
from training.models.model_files import loadable
from training.models.remote_code import check_configuration


def sample(
    model: Path,
    adapter: Path | None,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    options: dict[str, Any],
    folder: Path,
) -> list[Answer]:
    """One answer per prompt. Request and answers travel as files in `folder`.

    `options` has dtype, max_new_tokens, temperature, top_p, seed and gpu_memory_utilization.
    """
    folder.mkdir(parents=True, exist_ok=True)
    request, answers = folder / "request.json", folder / "answers.json"
    check_configuration(model)
    with loadable(model) as files:
        end_ids = end_ids_of(tokenizer, model)
        content = {"model": str(files), "adapter": str(adapter) if adapter else None, "ends": end_ids, **options}
        request.write_text(json.dumps({**content, "prompts": [list(ids) for ids in prompts]}))
        command = [sys.executable, "-m", "training.evaluation.vllm_sampling", str(request), str(answers)]
        subprocess.run(command, check=True)
    return [make_answer(ids, tokenizer, end_ids) for ids in json.loads(answers.read_text())]


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
        generation_config="vllm",  # ignore the model's own
    )
    params = [
        SamplingParams(
            temperature=request["temperature"],
            top_p=request["top_p"],
            max_tokens=request["max_new_tokens"],
            seed=int.from_bytes(prompt_digest(ids, request["seed"])[:4], "big") >> 1,
            stop_token_ids=request["ends"],
        )
        for ids in request["prompts"]
    ]
    lora = LoRARequest("policy", 1, adapter) if adapter else None
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    return [list(output.outputs[0].token_ids) for output in engine.generate(prompts, params, lora_request=lora)]


def main() -> None:
    if sys.platform == "linux":  # end with the worker: vLLM must not stay on its GPU after the worker was killed
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG
    request, answers = map(Path, sys.argv[1:3])
    answers.write_text(json.dumps(_generate(json.loads(request.read_text()))))


if __name__ == "__main__":
    main()
