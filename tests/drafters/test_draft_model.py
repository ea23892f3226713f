"""Draft models: their cache is what a fresh forward gives, q is what is drawn from, and what they
draft changes no greedy answer.
"""

from collections import Counter

import pytest
import torch

from draftsmith.drafters.coins import SeededCoins
from draftsmith.drafters.draft_model import DraftModel, check_vocabulary, ready_writer
from draftsmith.drafters.grow import lines
from draftsmith.drafters.proposal import Plan, Verdict
from draftsmith.drafters.sampler import Sampling, standardise
from draftsmith.drafters.slots import Batch, all_roots, label_slots
from draftsmith.drafters.tree import Tree, chain
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import DraftModelConfig
from tests.coins import distance, law_of
from tests.tiny import tiny_model, tiny_target, tiny_tokenizer

WORDS = 40
BUSHY = Tree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 1)))
TREES = {"one": chain(1), "chain": chain(3), "bushy": BUSHY}


def ready(target, *models, depth=3):
    """A drafter of models in memory."""
    drafter = DraftModel.__new__(DraftModel)
    torch.nn.Module.__init__(drafter)
    drafter.config = DraftModelConfig(kind="draft_model", models=("x",) * len(models))
    drafter.depth, drafter.target, drafter.draft_ids = depth, target, None
    drafter.ready, drafter.nets = list(models), torch.nn.ModuleList(m.model for m in models)
    drafter.writers = [ready_writer(model, target.vocab_size) for model in models]
    drafter.width = drafter.writers[0].head.shape[0]
    return drafter


def small(seed, vocab=WORDS, **options):
    return tiny_target(vocab, layers=1, hidden=16, seed=seed, eos=(), **options)


def logits_after(model, text):
    return model.model(torch.tensor([text])).logits[0, -1]


def begin(drafter, *prompts):
    longest = max(map(len, prompts))
    ids = torch.tensor([[*prompt, *[9] * (longest - len(prompt))] for prompt in prompts])
    return drafter.start(ids, torch.tensor([len(prompt) for prompt in prompts]), None)


def texts_of(tree, prompt, proposal, row=0):
    """Every node's text, itself included."""
    tokens = proposal.tokens[row].tolist()
    return [[*prompt, *(tokens[n - 1] for n in line)] for line in lines(tree)]


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_point_drafts_are_the_likeliest_after_their_own_path(tree):
    target, model = tiny_target(WORDS), small(5)
    drafter = ready(target, model)
    state = begin(drafter, [3, 4, 5], [7, 8])
    plan = Plan(tree, Sampling(), SeededCoins([0, 0]))
    proposal = drafter.propose(state, torch.tensor([6, 9]), plan)
    assert proposal.draw == "point" and proposal.valid.all() and proposal.q is None
    for row, prompt in enumerate(([3, 4, 5, 6], [7, 8, 9])):
        texts = texts_of(tree, prompt, proposal, row)
        for node, path in enumerate(tree.paths, start=1):
            best = logits_after(model, texts[node][:-1]).topk(path[-1] + 1).indices
            assert texts[node][-1] == int(best[-1])


def accept(paths):
    """A verdict that accepts these nodes."""
    longest = max(map(len, paths))
    padded = [[*path, *[0] * (longest - len(path))] for path in paths]
    lengths = torch.tensor([len(path) for path in paths])
    following = torch.tensor([11 + row for row in range(len(paths))])
    return Verdict(torch.tensor(padded).long().view(len(paths), longest), lengths, following)


@pytest.mark.parametrize(
    ("tree", "paths"),
    [(chain(3), [list(range(1, n + 1))]) for n in range(4)]
    + [(chain(3), [[], [1, 2, 3]]), (chain(3), [[1], [1, 2]])]
    + [(BUSHY, [path]) for path in ([], [2], [1, 4], [1, 3, 6], [2, 5, 7])]
    + [(BUSHY, [[1, 3, 6], [2]]), (BUSHY, [[2, 5, 7], [1, 3]])],
)
def test_after_any_accepted_path_drafts_are_those_of_a_fresh_cache(tree, paths):
    """Full acceptance too, where the last draft was never read."""
    target, prompts = tiny_target(WORDS), [[3, 4, 5], [7, 8]][: len(paths)]
    drafter = ready(target, small(5), small(6))
    plan = Plan(tree, Sampling(), SeededCoins([0] * len(paths)))
    state = begin(drafter, *prompts)
    roots = [6, 2][: len(paths)]
    first = drafter.propose(state, torch.tensor(roots), plan)
    singles = state.pages[0].drafted  # the first model's nodes keep their numbers in the union
    verdict = accept(paths)
    state = drafter.commit(state, first, verdict, None)
    second = drafter.propose(state, verdict.next, plan)
    for row, path in enumerate(paths):
        tokens = [int(singles.tokens[row, node - 1]) for node in path]
        text = [*prompts[row], roots[row], *tokens]
        fresh = begin(drafter, text)
        one = Plan(tree, Sampling(), SeededCoins([0]))
        want = drafter.propose(fresh, verdict.next[row : row + 1], one)
        real = second.valid[row]
        assert second.tokens[row][real].tolist() == want.tokens[0][want.valid[0]].tolist()
        for page, other in zip(state.pages, fresh.pages, strict=True):
            compare_caches(page.cache, row, other.cache, len(text) + 1)


def compare_caches(cache, row, other, length):
    for mine, theirs in zip(cache.buffered, other.buffered, strict=True):
        for a, b in zip(mine.buffers, theirs.buffers, strict=True):
            torch.testing.assert_close(a[row, :, :length], b[0, :, :length], rtol=1e-4, atol=1e-5)


def test_rows_can_leave_the_batch():
    target = tiny_target(WORDS)
    drafter = ready(target, small(5))
    plan = Plan(chain(2), Sampling(), SeededCoins([0, 0, 0]))
    state = begin(drafter, [3, 4, 5], [7, 8], [1])
    proposal = drafter.propose(state, torch.tensor([6, 9, 2]), plan)
    state = drafter.commit(state, proposal, accept([[1], [1, 2], []]), None)
    state = drafter.select(state, torch.tensor([2, 1]))
    left = drafter.propose(state, torch.tensor([13, 12]), plan)
    text = [7, 8, 9, *proposal.tokens[1].tolist()]
    for row, prompt in enumerate(([1, 2], text)):
        alone = drafter.propose(begin(drafter, prompt), torch.tensor([13 - row]), plan)
        assert left.tokens[row].tolist() == alone.tokens[0].tolist()


def test_a_state_can_be_proposed_from_again():
    """Costs are measured from one state over and over."""
    drafter = ready(tiny_target(WORDS), small(5))
    state, plan = begin(drafter, [3, 4, 5]), Plan(BUSHY, Sampling(), SeededCoins([0]))
    first = drafter.propose(state, torch.tensor([6]), plan)
    drafter.commit(state, first, accept([[1, 3]]), None)
    again = drafter.propose(state, torch.tensor([6]), plan)
    assert torch.equal(again.tokens, first.tokens)


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0), Sampling(0.7, top_k=2)], ids=["plain", "top_k"]
)
@pytest.mark.parametrize(
    ("tree", "draw"),
    [
        (chain(2), "chain"),
        (Tree(((0,), (1,), (0, 0))), "iid"),
        (Tree(((0,), (1,), (1, 0))), "without_replacement"),
    ],
    ids=["chain", "iid", "without_replacement"],
)
def test_q_is_the_model_s_law_and_drafts_are_drawn_from_it(tree, draw, sampling):
    target, model = tiny_target(4, hidden=16), small(3, vocab=4, spread=0.3)
    drafter = ready(target, model)
    state, laws = begin(drafter, [0, 1]), {}

    def run(coins):
        proposal = drafter.propose(state, torch.tensor([2]), Plan(tree, sampling, coins, draw))
        tokens = tuple(proposal.tokens[0].tolist())
        texts = texts_of(tree, [0, 1, 2], proposal)
        for node in range(len(tokens)):
            laws[tokens[:node]] = proposal.q[0, node]
            law = standardise(logits_after(model, texts[node + 1][:-1]), sampling)
            if draw == "without_replacement" and node == 1:
                law = law.clone().index_fill_(0, torch.tensor(tokens[:1]), 0.0)
                law = law / law.sum()
            torch.testing.assert_close(proposal.q[0, node], law, rtol=1e-4, atol=1e-5)
        return tokens

    out = law_of(run)
    assert sum(out.values()) == pytest.approx(1.0)
    for before, q in laws.items():
        here = Counter()
        for tokens, share in out.items():
            if tokens[: len(before)] == before:
                here[tokens[len(before)]] += share
        whole = sum(here.values())
        want = {token: share for token, share in enumerate(q.tolist()) if share > 0}
        assert distance({t: s / whole for t, s in here.items()}, want) < 1e-5


def test_padding_rows_of_either_vocabulary_are_no_drafts():
    wide, narrow = small(5, vocab=48), small(5, vocab=32)
    target = tiny_target(WORDS)
    for model, rows in ((wide, WORDS), (narrow, 32)):
        drafter = ready(target, model)
        state = begin(drafter, [3, 39, 5])  # 39 has no row in the narrow one
        coins = SeededCoins([0])
        plan = Plan(chain(2), Sampling(1.0), coins, "chain")
        proposal = drafter.propose(state, torch.tensor([6]), plan)
        assert int(proposal.tokens.max()) < rows
        law = proposal.law(torch.tensor([0]), torch.tensor([1]), WORDS)
        assert law.shape == (1, WORDS) and float(law.sum()) == pytest.approx(1.0)


def test_a_text_that_leaves_the_positions_is_drafted_no_more():
    target, model = tiny_target(WORDS), small(5)
    model.config.max_position_embeddings = 6
    drafter, plan = ready(target, model), Plan(chain(2), Sampling(), SeededCoins([0]))
    state = begin(drafter, [3, 4, 5])
    proposal = drafter.propose(state, torch.tensor([6]), plan)
    assert proposal.tokens.shape == (1, 2)
    state = drafter.commit(state, proposal, accept([[1]]), None)
    proposal = drafter.propose(state, torch.tensor([7]), plan)
    assert proposal.tokens.shape == (1, 0)
    state = drafter.commit(state, proposal, accept([[]]), None)
    assert drafter.propose(state, torch.tensor([7]), plan).tokens.shape == (1, 0)


def test_guesses_read_the_model_s_own_state_before_the_token():
    target, model = tiny_target(WORDS), small(5)
    drafter = ready(target, model)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 6]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, -1]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 0]])
    batch = Batch(ids, positions, documents, documents >= 0)
    roots = all_roots(batch)
    labels = label_slots(batch, roots, 2)
    found = drafter.guesses(batch, None, roots, slots=2, count=3, chunk=4)
    for group, (row, at) in enumerate(zip(roots.row, roots.position, strict=True)):
        for slot in range(2):
            if labels.valid[group, slot]:
                end = int(at) + slot
                text = ids[row, end - int(positions[row, end]) : end + 1].tolist()
                want = logits_after(model, text).topk(3).indices
                assert torch.equal(found[group, slot], want)


def test_another_tokenizer_is_refused():
    target, other = tiny_target(), tiny_target()
    check_vocabulary(other, target)
    other.tokenizer.add_tokens(["<extra>"])
    with pytest.raises(
        UserError, match=r"another vocabulary .* 1 tokens differ, such as '<extra>'"
    ):
        check_vocabulary(other, target)


def test_ready_models_are_loaded_from_their_folders(tmp_path):
    tiny_model(layers=1, seed=4).save_pretrained(tmp_path / "small")
    tiny_tokenizer().save_pretrained(tmp_path / "small")
    target = tiny_target()
    config = DraftModelConfig(kind="draft_model", models=(str(tmp_path / "small"),))
    drafter = DraftModel(config, target, None)
    assert drafter.width == target.vocab_size and drafter.native_file is None
    state = begin(drafter, [20, 21])
    proposal = drafter.propose(state, torch.tensor([22]), Plan(chain(2), Sampling(), None))
    want = logits_after(drafter.ready[0], [20, 21, 22]).argmax()
    assert proposal.tokens[0, 0] == want
    with pytest.raises(UserError, match=r"drafter\.models: no folder"):
        DraftModel(config.model_copy(update={"models": ("./nowhere",)}), target, None)
