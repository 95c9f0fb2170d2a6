"""Sampled answers: left padding, seeds of each prompt's own, and nothing taken from a model's generation config."""

from pathlib import Path

import pytest
import torch

from training.sampling import OwnDraws, sample

SHORT, LONG = [1, 4, 30, 31], [1, 4, *range(40, 70)]
PROMPTS = [SHORT, LONG, [1, 4, 99, 98, 97, 96, 95]]


@pytest.fixture(scope="module")
def both(tiny_base: Path):
    from training.model import load_model, load_tokenizer

    return load_model(tiny_base, "float32"), load_tokenizer(tiny_base)


def answers(both, prompts, temperature=0.7, seed=0, batch_size=50):
    return sample(*both, prompts, 12, temperature, 0.95, seed, batch_size=batch_size)


def test_padding_does_not_change_a_greedy_answer(both):
    together = answers(both, PROMPTS, temperature=0.0)
    alone = [answers(both, [prompt], temperature=0.0)[0] for prompt in PROMPTS]
    assert together == alone


def test_a_sampled_answer_depends_on_its_prompt_and_the_seed_alone(both):
    first = answers(both, PROMPTS)
    assert answers(both, PROMPTS) == first
    assert answers(both, PROMPTS, batch_size=1) == first
    assert list(reversed(answers(both, list(reversed(PROMPTS))))) == first
    assert answers(both, PROMPTS, seed=1) != first


def test_the_models_own_generation_config_says_nothing(both, monkeypatch):
    model, _ = both
    plain = answers(both, PROMPTS, temperature=0.0)
    monkeypatch.setattr(model.generation_config, "repetition_penalty", 5.0)
    monkeypatch.setattr(model.generation_config, "no_repeat_ngram_size", 1)
    assert answers(both, PROMPTS, temperature=0.0) == plain


def test_every_end_that_the_model_names_ends_an_answer(both, monkeypatch):
    model, tokenizer = both
    (plain,) = answers(both, [LONG], temperature=0.0)
    stop = plain.ids[2]
    monkeypatch.setattr(model.generation_config, "eos_token_id", [tokenizer.eos_token_id, stop])
    (cut,) = answers(both, [LONG], temperature=0.0)
    assert cut.finished
    assert cut.ids == plain.ids[: plain.ids.index(stop) + 1]
    assert cut.tokens == len(cut.ids) - 1


def test_draws_follow_the_nucleus():
    """Probabilities 0.5, 0.3, 0.15, 0.05 and top_p 0.9 keep three, of 0.95 together: 10, 6 and 3 in 19 draws."""
    scores = torch.tensor([[0.05, 0.5, 0.15, 0.3]]).log().repeat(1900, 1)
    draws = (torch.arange(1900) / 1900 + 1 / 3800)[:, None]
    chosen = OwnDraws(draws, temperature=1.0, top_p=0.9)(torch.empty(0), scores).argmax(-1)
    assert torch.bincount(chosen, minlength=4).tolist() == [0, 1000, 300, 600]


def test_a_draw_next_to_one_stays_in_the_nucleus():
    scores = torch.tensor([[0.6, 0.4]]).log()
    edge = torch.tensor([[1 - 2**-24]])
    assert OwnDraws(edge, 1.0, 0.5)(torch.empty(0), scores).argmax(-1).tolist() == [0]
    assert OwnDraws(edge, 1.0, 1.0)(torch.empty(0), scores).argmax(-1).tolist() == [1]
