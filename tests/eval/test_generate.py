"""Our loop as transformers' `custom_generate`: the output is what plain `generate` gives."""

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria
from transformers.generation.stopping_criteria import MaxLengthCriteria, StopStringCriteria

from draftsmith.drafters.tree import Tree
from draftsmith.eval.generate import speculate
from draftsmith.eval.rules import RULES
from draftsmith.recipes.errors import UserError
from tests.eval.test_decode import noisy_drafter
from tests.tiny import tiny_target, tiny_tokenizer

IDS = torch.tensor([[20, 21, 22, 23]])
TREE = Tree(((0,), (1,), (0, 0), (0, 1)))
BATCH = torch.tensor([[0, 0, 0, 20, 21, 22], [5, 6, 7, 8, 9, 10], [0, 0, 0, 0, 0, 30]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6, [0] * 5 + [1]])
ENDS = [17, 31]


class Twice(LogitsProcessor):
    """A law of its ids alone: no token twice in a row, and a bias that depends on all of them."""

    def __call__(self, input_ids, scores):
        rows = torch.arange(len(scores))
        scores[rows, input_ids[:, -1]] = -float("inf")
        scores[rows, input_ids.sum(dim=1) % scores.shape[1]] += 1.0
        return scores


class Divisible(StoppingCriteria):
    """Ends a row whose ids have a sum that 11 divides."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.sum(dim=1) % 11 == 0


class Listener:
    """A streamer that writes down what it gets."""

    def __init__(self):
        self.heard, self.ended = [], 0

    def put(self, value):
        self.heard.append(value.tolist())

    def end(self):
        self.ended += 1


def generate(target, ids=IDS, **options):
    mask = options.pop("attention_mask", torch.ones_like(ids))
    options = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0} | options
    return target.model.generate(ids, attention_mask=mask, **options)


@pytest.fixture(scope="module")
def target():
    target = tiny_target(40, seed=1, spread=0.15, eos=())
    target.model.generation_config.eos_token_id = None
    return target


@pytest.fixture(scope="module", params=[None, TREE], ids=["chain", "tree"])
def loop(request, target):
    return speculate(noisy_drafter(target, seed=1), request.param)


def test_greedy_output_is_what_generate_gives(target, loop):
    want = generate(target)
    assert torch.equal(generate(target, custom_generate=loop), want)
    token = int(want[0, -3])
    for eos in (token, [token, 39]):
        options = dict(eos_token_id=eos)
        assert torch.equal(
            generate(target, **options, custom_generate=loop), generate(target, **options)
        )


PROCESSED = {
    "penalty": dict(repetition_penalty=1.7),
    "several": dict(repetition_penalty=1.3, no_repeat_ngram_size=2, bad_words_ids=[[3], [20, 21]]),
    "foreign": dict(logits_processor=LogitsProcessorList([Twice()])),
    "length": dict(min_new_tokens=9, eos_token_id=ENDS),
    "by row": dict(prefix_allowed_tokens_fn=lambda row, ids: range(row, 40, 2 + row)),
}


@pytest.mark.parametrize("options", PROCESSED.values(), ids=PROCESSED)
def test_processors_see_the_ids_of_every_nodes_own_path(target, loop, options):
    plain = generate(target)
    for ids, mask in ((IDS, torch.ones_like(IDS)), (BATCH, MASK)):
        want = generate(target, ids, attention_mask=mask, **options)
        out = generate(target, ids, attention_mask=mask, **options, custom_generate=loop)
        assert torch.equal(out, want)
    assert "length" in options or not torch.equal(generate(target, **options), plain)


def test_a_batch_padded_on_the_left_is_what_generate_gives(target, loop):
    options = dict(attention_mask=MASK, eos_token_id=ENDS)
    want = generate(target, BATCH, **options)
    out = generate(
        target, BATCH, **options, custom_generate=loop, return_dict_in_generate=True
    ).sequences
    assert torch.equal(out, want)
    assert (want == 0)[:, 6:].any()  # rows ended at different tokens


def test_any_stopping_criterion_is_asked_after_every_token(target, loop):
    options = dict(stopping_criteria=[Divisible()], max_new_tokens=40)
    want = generate(target, **options)
    assert torch.equal(generate(target, **options, custom_generate=loop), want)
    assert want.shape[1] < 44
    options |= dict(eos_token_id=39, attention_mask=MASK)
    assert torch.equal(
        generate(target, BATCH, **options, custom_generate=loop),
        generate(target, BATCH, **options),
    )
    options = dict(stopping_criteria=[MaxLengthCriteria(11)])
    assert generate(target, **options, custom_generate=loop).shape == (1, 11)


def test_stop_strings_end_where_generate_ends():
    target = tiny_target(100, seed=1, spread=0.15, eos=())
    tokenizer = tiny_tokenizer()
    loop = speculate(noisy_drafter(target, seed=1))
    new = generate(target)[0, 4:].tolist()
    for start in (2, 7, 13):
        text = tokenizer.decode(new[start : start + 3])
        want = generate(target, stop_strings=[text], tokenizer=tokenizer)
        criteria = [StopStringCriteria(tokenizer, [text])]
        out = generate(target, stopping_criteria=criteria, custom_generate=loop)
        assert torch.equal(out, want) and out.shape[1] <= 4 + start + 3


@pytest.mark.parametrize(("ids", "mask"), [(IDS, torch.ones_like(IDS)), (BATCH, MASK)])
def test_a_streamer_gets_what_generate_gives_it(target, loop, ids, mask):
    plain, ours = Listener(), Listener()
    options = dict(attention_mask=mask, eos_token_id=ENDS)
    generate(target, ids, **options, streamer=plain)
    generate(target, ids, **options, streamer=ours, custom_generate=loop)
    assert ours.heard == plain.heard and ours.ended == plain.ended == 1


def test_sampling_follows_the_callers_seed(target, loop):
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(generate(target, do_sample=True, top_k=5, custom_generate=loop))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


@pytest.mark.parametrize(
    "options",
    [dict(repetition_penalty=1.7), dict(logits_processor=LogitsProcessorList([Twice()]))],
    ids=["penalty", "foreign"],
)
def test_a_sampled_law_goes_through_the_processors_too(target, loop, options):
    """With one token left to choose from, sampling is greedy."""
    out = generate(target, do_sample=True, top_k=1, custom_generate=loop, **options)
    assert torch.equal(out, generate(target, **options))


@pytest.mark.parametrize("name", ["token", "block", "greedy"])
def test_rules_can_be_chosen(target, name):
    out = generate(target, custom_generate=speculate(noisy_drafter(target), rule=RULES[name]))
    assert torch.equal(out, generate(target))


def test_the_model_is_given_back_as_it_was():
    model = (target := tiny_target(40)).model
    loop = speculate(noisy_drafter(target))
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    model.model.embed_tokens.weight.requires_grad_(False)
    model.train()
    model.model.layers[0].eval()

    def state():
        grads = [parameter.requires_grad for parameter in model.parameters()]
        return grads, [module.training for module in model.modules()]

    before = state()
    generate(target, custom_generate=loop)
    assert state() == before
    with pytest.raises(RuntimeError, match="stop here"):
        generate(target, custom_generate=loop, stopping_criteria=[Breaking()])
    assert state() == before


class Breaking(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        raise RuntimeError("stop here")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"guidance_scale": 1.5}, "ClassifierFreeGuidance"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
    ],
)
def test_what_would_be_left_out_is_refused(target, loop, options, says):
    with pytest.raises(UserError, match=says):
        generate(target, custom_generate=loop, **options)


def test_rows_that_cannot_be_filled_up_are_refused(target, loop):
    options = dict(attention_mask=MASK, pad_token_id=None, stopping_criteria=[Divisible()])
    with pytest.raises(UserError, match="pad_token_id"):
        generate(target, BATCH, **options, max_new_tokens=60, custom_generate=loop)
