"""Our loop as transformers' `custom_generate`."""

import pytest
import torch

from draftsmith.drafters.tree import Tree
from draftsmith.eval.generate import speculate
from draftsmith.recipes.errors import UserError
from tests.eval.test_decode import noisy_drafter
from tests.tiny import tiny_target

IDS = torch.tensor([[20, 21, 22, 23]])
TREE = Tree(((0,), (1,), (0, 0), (0, 1)))


def generate(target, ids=IDS, **options):
    mask = options.pop("attention_mask", torch.ones_like(ids))
    return target.model.generate(ids, attention_mask=mask, pad_token_id=0, **options)


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_greedy_output_is_what_generate_gives(tree):
    target = tiny_target(40, seed=1, spread=0.15)
    loop = speculate(noisy_drafter(target, seed=1), tree)
    want = generate(target, max_new_tokens=20, do_sample=False)
    assert torch.equal(
        generate(target, max_new_tokens=20, do_sample=False, custom_generate=loop), want
    )
    token = int(want[0, -3])
    for eos in (token, [token, 39]):
        options = dict(max_new_tokens=20, do_sample=False, eos_token_id=eos)
        assert torch.equal(
            generate(target, **options, custom_generate=loop), generate(target, **options)
        )


def test_padding_on_the_left_is_not_seen():
    target = tiny_target(40, seed=1, spread=0.15, eos=())
    loop = speculate(noisy_drafter(target))
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), IDS], dim=1)
    mask = (torch.arange(7) >= 3).long()[None]
    options = dict(max_new_tokens=9, do_sample=False, custom_generate=loop)
    out = generate(target, padded, attention_mask=mask, **options)
    assert torch.equal(out[:, 7:], generate(target, **options)[:, 4:])


def test_sampling_follows_the_callers_seed():
    target = tiny_target(40, eos=())
    loop = speculate(noisy_drafter(target))
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(
            generate(target, max_new_tokens=12, do_sample=True, top_k=5, custom_generate=loop)
        )
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"repetition_penalty": 1.3}, "RepetitionPenalty"),
        ({"do_sample": True, "min_p": 0.1}, "MinP"),
    ],
)
def test_what_would_be_left_out_is_refused(options, says):
    target = tiny_target(40)
    loop = speculate(noisy_drafter(target))
    with pytest.raises(UserError, match=says):
        generate(target, max_new_tokens=4, custom_generate=loop, **options)


def test_two_prompts_are_refused():
    target = tiny_target(40)
    loop = speculate(noisy_drafter(target))
    with pytest.raises(UserError, match="one prompt at a time"):
        generate(target, IDS.repeat(2, 1), max_new_tokens=4, custom_generate=loop)
