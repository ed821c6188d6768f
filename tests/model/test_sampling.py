"""Several prompts decoded at once against each of them alone, by GPT.generate without a cache."""

import pytest
import torch

from model.sampling import sample, stream
from tests.helpers import ALL_SCHEMES, random_tokens, scheme_id, small_model

LENGTHS = [3, 9, 1, 9, 20]


def prompts_of(model):
    return [random_tokens(model, 1, length, seed=i)[0] for i, length in enumerate(LENGTHS)]


def together(model, prompts, new, **settings):
    steps = torch.stack(list(stream(model, prompts, new, **settings)))  # (steps, prompts)
    return [[token for token in row.tolist() if token >= 0][:new] for row in steps.T]


@pytest.mark.parametrize("pos", ALL_SCHEMES, ids=scheme_id)
def test_each_prompt_of_a_batch_gets_what_it_gets_alone(pos):
    model = small_model(pos, train_length=40)
    prompts = prompts_of(model)
    for prompt, found in zip(prompts, together(model, prompts, 12), strict=True):
        assert found == model.generate(prompt[None], 12, use_cache=False)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("scaling", [{"name": "yarn", "factor": 2.0}, {"name": "dynamic"}])
def test_past_the_training_length_under_a_scaling(scaling):
    model = small_model({"name": "rope"}, scaling=scaling, train_length=8)
    prompts = prompts_of(model)
    for prompt, found in zip(prompts, together(model, prompts, 12), strict=True):
        assert found == model.generate(prompt[None], 12, use_cache=False)[0, len(prompt) :].tolist()
    for prompt, found in zip(prompts, together(model, prompts, 12, scaling_length=32), strict=True):
        expected = model.generate(prompt[None], 12, use_cache=False, scaling_length=32)
        assert found == expected[0, len(prompt) :].tolist()


def test_linear_attention():
    model = small_model({"name": "rope"}, attention="linear")
    prompts = prompts_of(model)
    for prompt, found in zip(prompts, together(model, prompts, 12), strict=True):
        assert found == model.generate(prompt[None], 12, use_cache=False)[0, len(prompt) :].tolist()


def test_draws_come_from_the_generator():
    model = small_model({"name": "alibi"})
    prompt = prompts_of(model)[0]

    def drawn(seed):
        generator = torch.Generator().manual_seed(seed)
        return together(model, [prompt], 15, temperature=1.3, top_k=20, generator=generator)[0]

    assert drawn(5) == drawn(5)
    assert drawn(5) != drawn(6)


def test_what_cannot_be_continued_is_refused_before_any_work():
    model = small_model({"name": "learned"}, train_length=8)
    prompt = random_tokens(model, 1, 5)[0]
    assert len(together(model, [prompt], 4)[0]) == 4  # the eighth position is fed, the ninth token is only drawn
    for prompts, new, words in (
        ([], 4, "at least one prompt"),
        ([prompt[:0]], 4, "at least 1"),
        ([prompt], 0, "max_new_tokens=0"),
        ([prompt], 5, "past the learned table"),
        ([prompt + 100], 2, "outside the vocabulary"),
    ):
        with pytest.raises(ValueError, match=words):
            together(model, prompts, new)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[float("nan"), 0.0], [float("inf"), 0.0], [-float("inf")] * 2])
def test_logits_without_a_largest_are_refused_in_any_row(bad, temperature):
    with pytest.raises(ValueError, match="not finite numbers"):
        sample(torch.tensor([[1.0, 2.0], bad]), temperature)
    assert sample(torch.tensor([[1.0, 2.0], [-float("inf"), 0.0]]), temperature)[1].item() == 1
