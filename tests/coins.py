"""Coins that fall every way in turn: the exact law of what real code does with them."""

from collections import Counter


class EnumeratedCoins:
    """Replays a script of outcomes and adds new ones at its end; the rows of a batch in turn."""

    def __init__(self):
        self.script, self.sizes, self.at, self.weight = [], [], 0, 1.0

    def pick(self, weights):
        """The index that is scripted here; only outcomes of weight > 0 are."""
        support = [i for i, weight in enumerate(weights) if weight > 0]
        if self.at == len(self.script):
            self.script.append(0)
            self.sizes.append(len(support))
        index = support[self.script[self.at]]
        self.at += 1
        self.weight *= weights[index]
        return index

    def draw(self, law, rows):
        assert law.shape[0] == len(rows)
        shares = law.double() / law.double().sum(dim=-1, keepdim=True)
        return rows.new_tensor([self.pick(weights) for weights in shares.tolist()])

    def flip(self, p, q, rows):
        assert len(p) == len(q) == len(rows)
        accepted = (p.double() / q.double()).clamp(max=1.0).tolist()
        return rows.new_tensor([self.pick([yes, 1 - yes]) for yes in accepted]) == 0

    def next(self):
        """Advance to the next script; False after the last."""
        while self.script and self.script[-1] + 1 == self.sizes[-1]:
            self.script.pop()
            self.sizes.pop()
        if not self.script:
            return False
        self.script[-1] += 1
        self.at, self.weight = 0, 1.0
        return True


def law_of(run):
    """The law of run(coins), over everything that its coins can do."""
    coins, law = EnumeratedCoins(), Counter()
    while True:
        outcome = run(coins)
        law[outcome] += coins.weight
        if not coins.next():
            return law


def distance(out, want):
    """Total variation."""
    return sum(abs(out.get(k, 0.0) - want.get(k, 0.0)) for k in {*out, *want}) / 2
