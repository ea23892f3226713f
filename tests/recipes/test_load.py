"""Recipes: what is read, what is refused, and how it is said."""

from pathlib import Path

import pytest

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.load import dump_recipe, load_recipe, override_recipe
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.text import dump, parse

BASE = "name: mine\ntarget: {model: smollm2-135m}\n"
SMALLEST = Recipe.model_validate({"name": "mine", "target": {"model": "smollm2-135m"}})


@pytest.fixture
def write(tmp_path: Path):
    """Write a recipe's text; returns its path."""

    def write(text: str, base: str = BASE) -> str:
        path = tmp_path / "mine.yaml"
        path.write_text(base + text, encoding="utf-8")
        return str(path)

    return write


def refusal(path: str, *overrides: str) -> str:
    """The line that a bad recipe ends in, without the path."""
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(path, "mine.yaml")


def test_ten_lines_are_a_recipe(write) -> None:
    recipe = load_recipe(write("optim: {lr: 1e-4}\n"))
    assert recipe == Recipe.model_validate(
        {"name": "mine", "target": {"model": "smollm2-135m"}, "optim": {"lr": 1e-4}}
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [("3e-4", 3e-4), ("1E3", 1e3), ("-2", -2), (".5", 0.5), ("5.", 5.0), ("1_000", 1000)]
    + [("true", True), ("null", None), ("~", None), ("", None), ("010", "010"), ("0x1f", "0x1f")]
    + [(word, word) for word in ("on", "yes", "no", "off", "y", "2026-01-31", "1:30", "1e", "e5")],
)
def test_words_and_numbers_are_what_they_look_like(text: str, value: object) -> None:
    found = parse(f"x: {text}", "text")["x"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "word", ["3e-4", "on", "true", "null", "", "010", "2026-01-31", "1_0", "a: b", "# c", "é", "~"]
)
def test_text_that_looks_like_something_else_survives_a_round_trip(word: str) -> None:
    assert parse(dump({"x": word}), "text") == {"x": word}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("training: {lr: 1e-5}", "training.lr: unknown key; did you mean optim.lr?"),
        (
            "optim: {learning_rate: 1e-5}",
            "optim.learning_rate: unknown key; did you mean optim.lr?",
        ),
        (
            "optimizer: {betas: [0.9, 0.99]}",
            "optimizer.betas: unknown key; did you mean optim.betas?",
        ),
        ("train: {epoch: 3}", "train.epoch: unknown key; did you mean train.epochs?"),
        ("epochs: 3", "epochs: unknown key; did you mean train.epochs?"),
        (
            "data: {distil: {max_new_token: 3}}",
            "data.distil.max_new_token: unknown key; did you mean data.distil.max_new_tokens?",
        ),
        (
            "objective: {temprature: 2.0}",
            "objective.temprature: unknown key; did you mean objective.temperature?",
        ),
        (
            "eval: {zzz: 1}",
            "eval.zzz: unknown key; allowed here: prompts, max_new_tokens, repeats,",
        ),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_right_one(write, text: str, line: str) -> None:
    assert refusal(write(text)).startswith(f"mine.yaml: {line}")


def every_key(block: dict[str, object], prefix: str = "") -> list[str]:
    """Dotted keys of a dumped recipe."""
    found: list[str] = []
    for key, value in block.items():
        found += every_key(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]
    return found


@pytest.mark.parametrize("key", every_key(SMALLEST.model_dump()))
def test_every_key_is_found_again_after_a_slip_of_the_finger(write, key: str) -> None:
    *blocks, leaf = key.split(".")
    wrong = ".".join([*blocks, leaf + leaf[-1]])
    message = refusal(write(""), f"{wrong}=1")
    assert message == f"command line: {wrong}: unknown key; did you mean {key}?"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "drafter: {heads: 0}",
            "drafter.heads: 0 is not allowed; allowed: a whole number at least 1 and at most 16",
        ),
        ("drafter: {heads: 2.0}", "drafter.heads: 2.0 is not allowed; allowed: a whole number"),
        ("drafter: {heads: true}", "drafter.heads: true is not allowed; allowed: a whole number"),
        ("drafter: {heads: '2'}", "drafter.heads: '2' is not allowed; allowed: a whole number"),
        (
            "drafter: {kind: eagle}",
            "drafter.kind: 'eagle' is not allowed; allowed: dflash, draft_model",
        ),
        ("optim: {lr: fast}", "optim.lr: 'fast' is not allowed; allowed: a number more than 0"),
        ("optim: {lr: .nan}", "optim.lr: nan is not allowed; allowed: a number more than 0"),
        ("optim: {lr: .inf}", "optim.lr: inf is not allowed; allowed: a number more than 0"),
        (
            "optim: {betas: [0.9]}",
            "optim.betas: [0.9] is not allowed; allowed: a list: 2 of a number",
        ),
        (
            "optim: {betas: [0.9, 2.0]}",
            "optim.betas: [0.9, 2.0] is not allowed; allowed: a list: 2 of",
        ),
        ("optim:", "optim: null is not allowed; allowed: keys such as lr, betas, weight_decay"),
        ("optim: 3", "optim: 3 is not allowed; allowed: keys such as lr"),
        (
            "data: {thinking: on}",
            "data.thinking: 'on' is not allowed; allowed: true or false or null",
        ),
        ("eval: {tree_nodes: 99}", "eval.tree_nodes: 99 is not allowed; allowed: a whole number"),
        (
            "train: {trackers: [mlflow]}",
            "train.trackers: ['mlflow'] is not allowed; allowed: a list: one of wandb, tensorboard",
        ),
        (
            "objective: {weights: dpace, loss: kl}",
            "objective: weights: dpace needs loss: ce, not kl",
        ),
        ("seed: -1", "seed: -1 is not allowed; allowed: a whole number at least 0"),
        (
            "seed: 4294967296",
            "seed: 4294967296 is not allowed; allowed: a whole number at least 0 and less than "
            "4294967296",
        ),
        (
            "optim: {betas: [0.9, 1.0]}",
            "optim.betas: [0.9, 1.0] is not allowed; allowed: a list: 2 of a number at least 0 and "
            "less than 1",
        ),
        (
            "train: {epochs: 2147483649}",
            "train.epochs: 2147483649 is not allowed; allowed: a whole number at least 1 and at "
            "most 2147483648",
        ),
        ("data: {prompts: ''}", "data.prompts: empty; give text"),
        ("runs: ''", "runs: empty; give text"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(write, text: str, line: str) -> None:
    assert refusal(write(text)).startswith(f"mine.yaml: {line}")


def test_a_missing_key_is_named(write) -> None:
    assert (
        refusal(write("", "name: mine\n"))
        == "mine.yaml: target: missing; give keys such as model, revision, dtype"
    )
    assert (
        refusal(write("", "name: mine\ntarget: {}\n"))
        == "mine.yaml: target.model: missing; give text"
    )


def test_the_unknown_key_is_said_first_and_the_rest_counted(write) -> None:
    message = refusal(write("", "name: mine\ntraget: {model: x}\n"))
    assert (
        message == "mine.yaml: traget.model: unknown key; did you mean target.model? (and 1 more)"
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "mine.yaml is empty; a recipe needs at least name and target.model"),
        ("# only a comment\n", "mine.yaml is empty;"),
        ("- a\n- b\n", "mine.yaml: a recipe is made of `key: value` lines, this is a list"),
        ("just words", "mine.yaml: a recipe is made of `key: value` lines, this is text"),
        ("a: [1,\n", "mine.yaml line 2 column 1: bad YAML"),
        ("a: b\n\tc: 1", "mine.yaml line 2 column 1: bad YAML"),
        (
            "name: a\nseed: 1\nname: b\n",
            "mine.yaml line 3 column 1: bad YAML (the key name is given twice)",
        ),
        (
            "optim:\n  lr: 1.0\n  lr: 2.0\n",
            "mine.yaml line 3 column 3: bad YAML (the key lr is given twice)",
        ),
        ("1: x\n", "mine.yaml line 1 column 1: bad YAML (a key is text, not 1)"),
        ("a: 1\n---\nb: 2\n", "mine.yaml line 2 column 1: bad YAML"),
        ("a: !!python/object:os.system x\n", "mine.yaml line 1 column 4: bad YAML"),
        ("a: &a [*a]\n", "mine.yaml: values are text, numbers, lists and keys"),
    ],
)
def test_what_is_no_recipe_is_refused(write, text: str, line: str) -> None:
    assert refusal(write(text, "")).startswith(line)


def test_files_that_cannot_be_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in refusal(str(path))
    path.write_bytes(b"a" * (1 << 21))
    assert "is over 1 MB" in refusal(str(path))
    assert "is a folder" in refusal(str(tmp_path))
    assert refusal(str(tmp_path / "gone.yaml")).startswith("no file mine.yaml; shipped: ")


def test_a_shipped_name_is_found_and_a_near_one_suggested() -> None:
    assert load_recipe("smollm2-135m_medusa").name == "smollm2-135m_medusa"
    assert refusal("smollm-135m_medusa").endswith("did you mean smollm2-135m_medusa?")


def test_overrides_go_through_the_schema(write) -> None:
    path = write("optim: {lr: 1e-4}\n")
    recipe = load_recipe(
        path,
        ["optim.lr=3e-4", "data.distil.batch_size=8", "train.trackers=[wandb]", "data.limit=null"],
    )
    assert (recipe.optim.lr, recipe.data.distil.batch_size) == (3e-4, 8)
    assert recipe.train.trackers == ("wandb",)
    assert load_recipe(path, ["optim={weight_decay: 0.1}"]).optim.lr != 1e-4  # a block is replaced


@pytest.mark.parametrize(
    "override", ["optim.lr", "=3", "optim..lr=3", ".lr=3", "optim.l r=3", "--lr=3"]
)
def test_an_override_of_bad_form_is_refused(write, override: str) -> None:
    assert refusal(write(""), override) == (
        f"override {override!r}: write KEY=VALUE, for example optim.lr=1e-4"
    )


def test_an_override_that_is_wrong_is_blamed_on_the_command_line(write) -> None:
    assert refusal(write(""), "optim.lr=-1").startswith("command line: optim.lr: -1 is not allowed")
    assert refusal(write(""), "optim.lr=").endswith("has no value; write optim.lr=null for none")
    assert (
        refusal(write("seed: 1"), "seed.x=1")
        == "override 'seed.x=1': seed is a number, it has no keys below"
    )
    assert "bad YAML" in refusal(write(""), "optim.lr=[")
    assert refusal(write(""), "target.model=''") == "command line: target.model: empty; give text"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "runs=a\udcff",  # as Python reads a byte that is no UTF-8
            "override 'runs=a\\udcff': no valid text, its character 2 (U+DCFF) is not allowed in "
            "YAML",
        ),
        (
            'runs="\\ud800"',
            "command line: runs: no valid text, it holds half a surrogate pair",
        ),
        (
            'train.trackers=[wandb, "\\ud800"]',
            "command line: train.trackers: no valid text, it holds half a surrogate pair",
        ),
    ],
    ids=["byte", "escape", "in a list"],
)
def test_an_override_that_is_no_text_is_named(write, override: str, line: str) -> None:
    assert refusal(write(""), override) == line


def test_text_that_is_none_is_blamed_on_the_file(write) -> None:
    line = "no valid text, it holds half a surrogate pair"
    assert refusal(write('data: {prompts: "\\udc00"}')) == f"mine.yaml: data.prompts: {line}"
    assert refusal(write('"\\udc00": 1')) == f"mine.yaml: \\udc00: {line}"


def test_a_recipe_in_nobodys_home_is_refused() -> None:
    assert "home folder" in refusal("~nobody-of-this-name/mine.yaml")


def test_overrides_leave_the_given_data_alone() -> None:
    data = {"name": "mine", "target": {"model": "x"}}
    assert override_recipe(data, ["target.model=y"], source="checkpoint").target.model == "y"
    assert data == {"name": "mine", "target": {"model": "x"}}


def test_a_dumped_recipe_reloads_to_the_same(write) -> None:
    text = "objective: {weights: list, slot_weights: [1.0, 0.5]}\noptim: {lr: 1e-7}\nruns: '3e4'\n"
    recipe = load_recipe(write(text))
    assert load_recipe(write(dump_recipe(recipe), "")) == recipe


def test_a_recipe_is_frozen(write) -> None:
    recipe = load_recipe(write(""))
    with pytest.raises(ValueError, match="frozen"):
        recipe.optim.lr = 1.0
