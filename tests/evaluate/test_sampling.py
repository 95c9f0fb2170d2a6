"""Sampled answers: left padding, a seed per prompt, and no influence of a model's generation config."""

from pathlib import Path

import pytest
import torch

from training.evaluation.sampling import SeededNucleus, sample

SHORT, LONG = [1, 4, 30, 31], [1, 4, *range(40, 70)]
STAND_IN = """
from types import SimpleNamespace as Found
class SamplingParams:
    def __init__(self, **given): self.given = given
class LLM:
    def __init__(self, **given):
        assert given["enable_lora"] and given["max_lora_rank"] == 8 and given["generation_config"] == "vllm"
        assert given["gpu_memory_utilization"] == 0.5
    def generate(self, asked, how, lora_request):
        assert lora_request[:2] == ("policy", 1) and len({h.given["seed"] for h in how}) == len(how)
        end = how[0].given["stop_token_ids"]
        return [Found(outputs=[Found(token_ids=a["prompt_token_ids"][:2] + end[:1])]) for a in asked]
"""
PROMPTS = [SHORT, LONG, [1, 4, 99, 98, 97, 96, 95]]


@pytest.fixture(scope="module")
def both(tiny_base: Path):
    from training.models.loading import load_model
    from training.models.tokenizer import load_tokenizer

    return load_model(tiny_base, "float32"), load_tokenizer(tiny_base)


def answers(both, prompts, temperature=0.7, seed=0, batch_size=50):
    return sample(*both, prompts, 12, temperature, 0.95, seed, batch_size=batch_size)


def test_padding_does_not_change_a_greedy_answer(both):
    together = answers(both, PROMPTS, temperature=0.0)
    alone = [answers(both, [prompt], temperature=0.0)[0] for prompt in PROMPTS]
    assert together == alone


def test_a_sampled_answer_depends_only_on_its_prompt_and_the_seed(both):
    first = answers(both, PROMPTS)
    assert answers(both, PROMPTS) == first
    assert answers(both, PROMPTS, batch_size=1) == first
    assert list(reversed(answers(both, list(reversed(PROMPTS))))) == first
    assert answers(both, PROMPTS, seed=1) != first


def test_the_models_generation_config_is_ignored(both, monkeypatch):
    model, _ = both
    plain = answers(both, PROMPTS, temperature=0.0)
    monkeypatch.setattr(model.generation_config, "repetition_penalty", 5.0)
    monkeypatch.setattr(model.generation_config, "no_repeat_ngram_size", 1)
    assert answers(both, PROMPTS, temperature=0.0) == plain


def test_every_end_token_of_the_model_ends_an_answer(both, monkeypatch):
    model, tokenizer = both
    (plain,) = answers(both, [LONG], temperature=0.0)
    stop = plain.ids[2]
    monkeypatch.setattr(model.generation_config, "eos_token_id", [tokenizer.eos_token_id, stop])
    (cut,) = answers(both, [LONG], temperature=0.0)
    assert cut.finished
    assert cut.ids == plain.ids[: plain.ids.index(stop) + 1]
    assert cut.tokens == len(cut.ids) - 1


def test_vllm_gets_prompts_and_seeds_and_returns_answers(both, tiny_base: Path, tmp_path: Path, monkeypatch):
    """vLLM needs a GPU, so a stand-in with its calls checks our requests and how we read the responses."""
    from training.evaluation import vllm_sampling

    (tmp_path / "vllm" / "lora").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text(STAND_IN)
    (tmp_path / "vllm" / "lora" / "request.py").write_text("LoRARequest = lambda *given: given\n")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"r": 8}')
    project = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{project}")
    _, tokenizer = both
    how = {"dtype": "float32", "max_new_tokens": 12, "temperature": 0.7, "top_p": 0.9, "seed": 3}
    how["gpu_memory_utilization"] = 0.5
    found = vllm_sampling.sample(tiny_base, tmp_path / "adapter", tokenizer, PROMPTS, how, tmp_path / "files")
    assert [answer.ids[:-1] for answer in found] == [tuple(prompt[:2]) for prompt in PROMPTS]
    assert all(answer.finished and answer.tokens == 2 for answer in found)


def test_draws_follow_the_nucleus():
    """Of the probabilities 0.5, 0.3, 0.15 and 0.05, top_p 0.9 keeps three, 0.95 in total: 10, 6 and 3 of 19 draws."""
    scores = torch.tensor([[0.05, 0.5, 0.15, 0.3]]).log().repeat(1900, 1)
    draws = (torch.arange(1900) / 1900 + 1 / 3800)[:, None]
    chosen = SeededNucleus(draws, temperature=1.0, top_p=0.9)(torch.empty(0), scores).argmax(-1)
    assert torch.bincount(chosen, minlength=4).tolist() == [0, 1000, 300, 600]


def test_a_draw_close_to_one_stays_in_the_nucleus():
    scores = torch.tensor([[0.6, 0.4]]).log()
    edge = torch.tensor([[1 - 2**-24]])
    assert SeededNucleus(edge, 1.0, 0.5)(torch.empty(0), scores).argmax(-1).tolist() == [0]
    assert SeededNucleus(edge, 1.0, 1.0)(torch.empty(0), scores).argmax(-1).tolist() == [1]
