"""Every verification rule there is: one literal table."""

from draftsmith.eval.rules_block import block
from draftsmith.eval.rules_lossy import lenient, typical
from draftsmith.eval.rules_rejection import k_sequential, rejection
from draftsmith.eval.verify import RuleSpec, match, point_mass

CHAIN = "for a tree choose multi_step, without_replacement or point_mass, as it was drawn"
GUESSED = "guesses that were not drawn from q need point_mass"

RULES = {
    "greedy": RuleSpec("greedy", match, (), "set the temperature to 0, or choose another rule"),
    "point_mass": point_mass,
    "token": RuleSpec("token", rejection, ("chain",), CHAIN),
    "block": RuleSpec("block", block, ("chain",), CHAIN),
    "multi_step": RuleSpec("multi_step", rejection, ("chain", "iid"), GUESSED),
    "without_replacement": RuleSpec(
        "without_replacement", rejection, ("chain", "without_replacement"), GUESSED
    ),
    "k_sequential": RuleSpec(
        "k_sequential",
        k_sequential,
        ("chain", "iid"),
        GUESSED,
        parameters={"rho": 1.0},
        limits={"rho": (1.0, 1e6)},
    ),
    "lenient": RuleSpec(
        "lenient",
        lenient,
        ("chain",),
        "the bound p(x) / lenience is that of one draft per node",
        lossless=False,
        parameters={"lenience": 0.5},
        limits={"lenience": (1e-6, 1.0)},
    ),
    "typical": RuleSpec(
        "typical",
        typical,
        ("point", "chain", "iid", "without_replacement"),
        "drafts that were drawn carry their q",
        lossless=False,
        parameters={"epsilon": 0.09, "delta": 0.3},  # as in the Medusa release
        limits={"epsilon": (0.0, 1.0), "delta": (0.0, 1e6)},
    ),
}
