"""Continuations of several prompts at once against each of them alone, by GPT.generate without a cache."""

import pytest
import torch

from model.sampling import continuations, sample
from tests.helpers import ALL_SCHEMES, random_tokens, scheme_id, small_model

LENGTHS = [3, 9, 1, 9, 20]


def prompts_of(model):
    return [random_tokens(model, 1, length, seed=i)[0] for i, length in enumerate(LENGTHS)]


def together(model, prompts, new, **settings):
    found = [[] for _ in prompts]
    for drawn in continuations(model, prompts, new, **settings):
        for row, token in drawn.items():
            found[row].append(token)
    return found


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


def test_drawn_tokens_do_not_depend_on_the_other_prompts():
    model = small_model({"name": "alibi"})
    prompts, settings = prompts_of(model), {"temperature": 1.3, "top_k": 20, "seed": 5}
    batch = together(model, prompts, 15, **settings)
    assert batch == [together(model, [prompt], 15, **settings)[0] for prompt in prompts]
    assert batch != together(model, prompts, 15, **{**settings, "seed": 6})
    generator = torch.Generator().manual_seed(5)
    expected = model.generate(prompts[0][None], 15, temperature=1.3, top_k=20, generator=generator)
    assert batch[0] == expected[0, 3:].tolist()


def test_a_sequence_ends_at_the_stop_token_and_the_others_go_on():
    model = small_model({"name": "rope"})
    prompts = prompts_of(model)
    whole = together(model, prompts, 30)
    stop = whole[1][4]
    for found, all_of_it in zip(together(model, prompts, 30, stop=stop), whole, strict=True):
        end = all_of_it.index(stop) + 1 if stop in all_of_it else 30
        assert found == all_of_it[:end]


def test_what_cannot_be_continued_is_refused_before_any_work():
    model = small_model({"name": "learned"}, train_length=8)
    prompt = random_tokens(model, 1, 5)[0]
    assert len(together(model, [prompt], 4)[0]) == 4  # the eighth position is fed, the ninth token is only drawn
    for prompts, new, words in (
        ([], 4, "one or more"),
        ([prompt[:0]], 4, "at least one token"),
        ([prompt], 0, "max_new_tokens=0"),
        ([prompt], 5, "past the learned table"),
        ([prompt + 100], 2, "outside the vocabulary"),
    ):
        with pytest.raises(ValueError, match=words):
            together(model, prompts, new)
    with pytest.raises(ValueError, match="temperature=-1"):
        sample(torch.zeros(1, 4), -1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[float("nan"), 0.0], [float("inf"), 0.0], [-float("inf")] * 2])
def test_logits_without_a_largest_are_refused_in_any_row(bad, temperature):
    with pytest.raises(ValueError, match="not finite numbers"):
        sample(torch.tensor([[1.0, 2.0], bad]), temperature)
    assert sample(torch.tensor([[1.0, 2.0], [-float("inf"), 0.0]]), temperature)[1].item() == 1
