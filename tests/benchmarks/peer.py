"""TRL's side of a measurement: its DPOTrainer with its fastest options.

It gets the same tokens, with a precomputed reference and, on a GPU, Liger's kernels. `trl` has our order of pairs.
`trl-grouped` has micro-batches of similar lengths, as its users get by `train_sampling_strategy="group_by_length"`.
Its weights and moments are bf16, where ours keeps float32 masters: that favours TRL in time and memory.
"""

import importlib.util
import tempfile
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from tests.benchmarks.job import Job, Steps, Stopwatch
from tests.benchmarks.ours import LORA, in_order
from training.models.dtypes import DTYPES
from training.pairs.pair import Pair


def measure(job: Job, pairs: Sequence[Pair]) -> dict[str, Any]:
    pairs = in_order(job, pairs)
    if job.side == "trl-grouped":
        pairs = grouped_by_length(pairs, job.warmup * job.batch)
    with tempfile.TemporaryDirectory(prefix="bench-trl-") as folder:
        trainer = make_trainer(job, pairs, folder)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        steps, curve = Steps(job), list[dict[str, float]]()
        trainer.add_callback(_watcher(steps, curve))
        trainer.train()
    computed = padded_tokens(pairs[job.warmup * job.batch :], job.micro_batch)
    return {**trainer.result, **steps.speed(), "tokens_per_pair": computed / steps.pairs, "curve": curve}


def make_trainer(job: Job, pairs: Sequence[Pair], folder: str) -> Any:
    import datasets
    from trl import DPOTrainer

    datasets.disable_progress_bars()

    class Peer(DPOTrainer):
        """DPOTrainer for tokenised data, with a timed reference pass."""

        result: ClassVar[dict[str, float]] = {}

        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

        def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
            super()._precompute_ref_logps(dataset.select(range(2 * job.batch)), name, batch_size)
            watch = Stopwatch()
            watch.start()
            done = super()._precompute_ref_logps(dataset, name, batch_size)
            watch.stop()
            self.result.update(watch.speed(len(dataset), "reference_"))
            return done

    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=DTYPES[job.dtype], attn_implementation="sdpa")
    Peer.result["parameters"] = model.num_parameters()
    columns = ("prompt_ids", "chosen_ids", "rejected_ids")
    return Peer(
        model=model,
        args=_config(job, folder),
        train_dataset=datasets.Dataset.from_dict(
            {column: [list(getattr(pair, column)) for pair in pairs] for column in columns}
        ),
        processing_class=_tokenizer(),
        peft_config=_lora() if job.lora else None,
    )


def _config(job: Job, folder: str) -> Any:
    from trl import DPOConfig

    on_gpu = torch.cuda.is_available()
    return DPOConfig(
        output_dir=folder,
        per_device_train_batch_size=job.micro_batch,
        gradient_accumulation_steps=job.batch // job.micro_batch,
        max_steps=job.total,
        learning_rate=job.learning_rate,
        lr_scheduler_type=job.schedule,
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        loss_type=list(job.loss),
        beta=job.beta,
        precompute_ref_log_probs=True,
        max_length=None,  # no truncation, as on our side
        train_sampling_strategy="sequential",
        gradient_checkpointing=bool(job.checkpointing),
        gradient_checkpointing_kwargs={"use_reentrant": False},
        bf16=job.dtype == "bfloat16",
        use_liger_kernel=on_gpu and importlib.util.find_spec("liger_kernel") is not None,
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
        logging_steps=job.logging_steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=job.seed,
    )


def _watcher(steps: Steps, curve: list[dict[str, float]]) -> TrainerCallback:
    class Watcher(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.done(state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "loss" in logs:
                curve.append({"step": state.global_step, **logs})

    return Watcher()


def _tokenizer() -> PreTrainedTokenizerFast:
    """Only for its padding token: the pairs are tokenised."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def _lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=LORA["rank"],
        lora_alpha=LORA["alpha"],
        target_modules=LORA["targets"],
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )


def grouped_by_length(pairs: Sequence[Pair], warmup: int) -> list[Pair]:
    """The warm-up's pairs, then the measured ones, each sorted by length, longest first.

    transformers' sampler does the same with 50 global batches at a time, but on a small data set with fewer. The option
    itself would therefore pad more in a measurement of a few steps than in a whole epoch.
    """
    return [pair for part in (pairs[:warmup], pairs[warmup:]) for pair in sorted(part, key=_longer_side, reverse=True)]


def _longer_side(pair: Pair) -> int:
    return len(pair.prompt_ids) + max(len(pair.chosen_ids), len(pair.rejected_ids))


def padded_tokens(pairs: Sequence[Pair], micro_batch: int) -> int:
    """The tokens that TRL computes: prompts twice, and every sequence padded to the longest of its micro-batch."""
    total = 0
    for start in range(0, len(pairs), micro_batch):
        members = pairs[start : start + micro_batch]
        total += 2 * len(members) * max(map(_longer_side, members))
    return total
