"""Push and pull, against a Hub on loopback, by its real client."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, constants
from markdown_it import MarkdownIt
from safetensors.torch import load_file, save_file

from draftsmith.drafters.checkpoint import load_drafter, read_metadata
from draftsmith.drafters.hub import fetch
from draftsmith.drafters.hub_name import HubName, hub_name
from draftsmith.drafters.target import Target
from draftsmith.eval.export_check import guesses
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import TargetConfig
from draftsmith.train import cli
from tests.drafted import KINDS, write_drafter
from tests.hub_server import TOKEN, Server, Trouble
from tests.test_kinds import PROMPTS, RECIPE

BASE, REPO = "acme/tiny", "me/mine"
TEXT = [1, 20, 30, 40, 21, 22, 20, 30, 40, 23, 24, 25]
GIVEN = ["--repo", REPO, "--license", "apache-2.0", "--data-license", "made up, CC0"]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The Hub, an empty cache, and a token."""
    server = Server()
    url = server.hub.url
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    yield server.hub
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_folder):
    """The folder of a run that went through every stage."""
    desk = tmp_path_factory.mktemp("desk")
    (desk / "prompts.jsonl").write_text(PROMPTS)
    (desk / "questions.jsonl").write_text(PROMPTS.replace("Say", "Repeat"))
    drafter = "{kind: medusa, heads: 3}"
    text = RECIPE.format(target=tiny_folder, drafter=drafter, temperature=0.0)
    (desk / "mine.yaml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(desk)
        patch.setattr(sys, "argv", ["/home/ann/bin/draftsmith", "run", "mine.yaml"])
        patch.setattr("draftsmith.eval.figures.draw_figures", lambda report: {})
        assert cli.main(["run", "mine.yaml"]) == 0
    return desk / "runs/mine"


@pytest.fixture
def run(tmp_path, finished, monkeypatch):
    """A copy of it, whose report says that drafts were accepted; in the folder above."""
    copy = tmp_path / "runs/mine"
    shutil.copytree(finished, copy)
    change_report(copy, lambda arm: arm.update(tau_micro=1.5))
    monkeypatch.chdir(tmp_path)
    return copy


def change_report(run, change):
    path = run / "report/report.json"
    report = json.loads(path.read_text())
    for arm in report["arms"]:
        if arm["drafter"] is not None:
            change(arm)
    path.write_text(json.dumps(report))


def based(tiny_folder):
    """What stands for the target's folder, and for nothing else of this machine."""
    return ["--base-model", BASE]


def push(run, tiny_folder, *more):
    return cli.main(["push", str(run), *GIVEN, *based(tiny_folder), *more])


def test_a_dry_run_lists_every_file_and_asks_nobody(run, tiny_folder, hub, capsys):
    assert push(run, tiny_folder, "--dry-run", "--export", "vllm") == 0
    out = capsys.readouterr().out
    for name in (
        "README.md",
        "config.json",
        "draftsmith.json",
        "medusa_lm_head.safetensors",
        "recipe.yaml",
        "report.json",
        "custom_generate/generate.py",
        "custom_generate/requirements.txt",
        "vllm/config.json",
        "vllm/model.safetensors",
    ):
        assert f"\n{name} " in f"\n{out}", name
    assert f"{tiny_folder} is replaced by {BASE}" in out and "nothing was pushed" in out
    assert not hub.asked and not hub.repos


def test_what_is_pushed_is_private_whole_and_clean(run, tiny_folder, hub, capsys):
    assert push(run, tiny_folder, "--export", "vllm") == 0
    repo = hub.repos[REPO]
    files = repo.commits[-1].files
    assert repo.private and len(repo.commits) == 2
    assert ("PUT", "/store/" + next(iter(hub.large))) in hub.asked
    text = b"\n".join(data for path, data in files.items() if "safetensors" not in path).decode()
    assert str(tiny_folder) not in text and TOKEN not in text and str(Path.home()) + "/" not in text
    meta = json.loads(files["draftsmith.json"])
    assert meta["target"]["model"] == meta["recipe"]["target"]["model"] == BASE
    assert meta["target"]["content"] == "none"
    assert f"commit/{repo.commits[-1].oid}" in capsys.readouterr().out


def test_the_card_renders_with_its_figures_and_their_conditions(run, tiny_folder, hub):
    assert push(run, tiny_folder) == 0
    card = ModelCard(hub.repos[REPO].commits[-1].files["README.md"].decode())
    data = card.data
    assert data.base_model == BASE and data.license == "apache-2.0"
    assert {"speculative-decoding", "medusa", "custom_generate"} <= set(data.tags)
    report = json.loads((run / "report/report.json").read_text())
    arms = {arm["name"]: arm for arm in report["arms"] if arm["drafter"] == "medusa"}
    lengths = [one for one in data.eval_results if one.metric_type == "acceptance_length"]
    speedups = [one for one in data.eval_results if one.metric_type == "speedup"]
    assert len(lengths) == len(arms) and speedups
    for one in data.eval_results:
        arm = arms[one.metric_name.rpartition(", ")[2]]
        for name in ("rule", "temperature", "batch", "dtype", "device", "threads", "tokens"):
            assert one.metric_args[name] == arm[name]
    html = MarkdownIt("commonmark").enable("table").render(card.content.partition("\n---\n")[2])
    assert "<table>" in html and "draftsmith eval me/mine" in html and "made up, CC0" in html
    assert "{" not in html.replace("[{&quot;role&quot;", "").replace("}]", "").replace("{1}", "")


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_comes_back_the_same(run, tiny_folder, hub, tmp_path, name):
    target = Target.load(TargetConfig(model=str(tiny_folder), dtype="float32", device="cpu"))
    kind = KINDS[name]["kind"]
    home = tmp_path / "other"
    shutil.copytree(run, home)
    change_report(home, lambda arm: arm.update(drafter=kind))
    write_drafter(target, home / "drafter", KINDS[name])
    assert push(home, tiny_folder) == 0
    folder = fetch(HubName(REPO, None))
    assert not list(folder.rglob("*.py"))  # code is never fetched
    mine, theirs = load_drafter(home / "drafter", target), load_drafter(REPO, target)
    with torch.no_grad():
        assert torch.equal(guesses(target, mine, TEXT), guesses(target, theirs, TEXT))
    for key, value in mine.native_tensors().items():
        assert torch.equal(value, theirs.native_tensors()[key])


def test_a_pulled_drafter_is_evaluated_by_name(run, tiny_folder, hub, capsys):
    assert push(run, tiny_folder) == 0
    first = hub.repos[REPO].commits[-1].oid
    words = [f"target.model={tiny_folder}", "eval.prompts=1", "eval.max_new_tokens=4"]
    words.append(f"data.eval_prompts={run.parent.parent}/questions.jsonl")
    Path("questions.jsonl").write_text(PROMPTS)
    assert cli.main(["eval", REPO, *words]) == 0
    report = json.loads(Path("runs/me--mine/report/report.json").read_text())
    assert any(arm["drafter"] == "medusa" for arm in report["arms"])
    assert not list(Path(constants.HF_HUB_CACHE).rglob("report.html"))
    # another commit; the first one is still there by name
    hub.put(REPO, {**hub.repos[REPO].commits[-1].files, "draftsmith.json": b"{}"})
    assert read_metadata(fetch(hub_name(f"{REPO}@{first}")))["steps"] > 0
    with pytest.raises(UserError, match="does not say which format"):
        read_metadata(fetch(HubName(REPO, None)))
    assert cli.main(["eval", f"{REPO}@{'0' * 40}"]) == 2
    assert f"{REPO} has no revision" in capsys.readouterr().err


CALLER = """
import sys
sys.modules["draftsmith"] = None  # not importable
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from huggingface_hub import snapshot_download
folder = snapshot_download("me/mine")
target = AutoModelForCausalLM.from_pretrained("acme/tiny", dtype=torch.float32)
ids = torch.tensor([[1, 20, 30, 40, 21, 22]])
options = dict(max_new_tokens=24, do_sample=False, pad_token_id=0)
want = target.generate(ids, **options)
for place in ("me/mine", folder):
    have = target.generate(ids, custom_generate=place, trust_remote_code=True, **options)
    assert torch.equal(want, have), place
assert not [name for name in sys.modules if name.startswith("draftsmith.")]
print("same", *sorted(name for name in sys.modules if "custom_generate" in name)[:3])
"""


def elsewhere(hub, tmp_path, code):
    """Another process, with an empty cache and nothing of ours on its path."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PY"))},
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "elsewhere"),
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def base_on_hub(hub, tiny_folder):
    files = {path.name: path.read_bytes() for path in tiny_folder.iterdir() if path.is_file()}
    hub.put(BASE, files)


def test_plain_transformers_decodes_with_it_and_the_snippet_runs(run, tiny_folder, hub, tmp_path):
    base_on_hub(hub, tiny_folder)
    assert push(run, tiny_folder) == 0
    card = hub.repos[REPO].commits[-1].files["README.md"].decode()
    snippet = card.partition("```python\n")[2].partition("```")[0]
    assert f'custom_generate="{REPO}"' in snippet
    plain = snippet.replace(f'custom_generate="{REPO}", trust_remote_code=True', "do_sample=False")
    line = "\nprint('=====')\n"
    said = elsewhere(hub, tmp_path, line.join([CALLER, snippet, plain])).split("=====\n")
    assert said[0].startswith("same") and said[1] == said[2] and said[1].strip()


# --- what must not leave ---


def test_what_is_missing_is_asked_for(run, tiny_folder, hub, capsys):
    command = ["push", str(run), "--repo", REPO]
    for more, line in (
        ([], "--license is missing"),
        (["--license", "Apache 2!"], "--license Apache 2!: say under"),
        (["--license", "mit"], "--data-license is missing"),
        (["--license", "mit", "--data-license", "mine"], "--base-model is missing"),
    ):
        assert cli.main([*command, *more]) == 2
        assert line in capsys.readouterr().err
    for repo in ("mine", "a/b@c", "runs/mine"):
        assert cli.main(["push", str(run), *GIVEN[2:], "--repo", repo]) == 2
        assert f"--repo {repo}: give a name" in capsys.readouterr().err
    (run / "report/report.json").unlink()
    assert push(run, tiny_folder) == 2
    assert "has no report" in capsys.readouterr().err
    assert not hub.asked


def edit(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


WEIGHTS = "drafter/medusa_lm_head.safetensors"
BAD = {
    "nan": lambda run: edit(run / WEIGHTS, lambda t: t["0.0.linear.bias"].fill_(float("nan"))),
    "untrained": lambda run: edit(run / WEIGHTS, lambda t: t["1.0.linear.weight"].zero_()),
    "no step": lambda run: rewrite(run / "drafter/draftsmith.json", steps=0),
    "lossy": lambda run: change_report(run, lambda arm: arm.update(lossless=False)),
    "no gain": lambda run: change_report(run, lambda arm: arm.update(tau_micro=1.0)),
    "another drafter's report": lambda run: change_report(run, lambda arm: arm.update(drafter="x")),
    "token": lambda run: append(run / "recipe.yaml", "# key: hf_" + "a" * 34),
    "own token": lambda run: append(run / "recipe.yaml", "# " + os.environ["DRAFTSMITH_API_KEY"]),
    "path": lambda run: append(run / "recipe.yaml", "# see /home/ann/prompts.jsonl"),
    "windows path": lambda run: append(run / "recipe.yaml", "# see C:\\Users\\ann\\prompts"),
    "home": lambda run: append(run / "recipe.yaml", f"# {Path.home()}/x"),
    "user": lambda run: append(run / "recipe.yaml", "# by annabel on her machine"),
}
LINES = {
    "nan": "NaN or infinite numbers in 0.0.linear.bias",
    "untrained": "1.0.linear.weight is all zeros",
    "no step": "took no training step",
    "lossy": "did not give the target's output",
    "no gain": "none of its drafts was ever accepted",
    "another drafter's report": "no arm of this drafter",
    "token": "a token (hf_a..., 37 characters)",
    "own token": "a token (very..., 20 characters)",
    "path": "the path /home/ann/prompts.jsonl",
    "windows path": "the path C:\\Users\\ann\\prompts",
    "home": "/x",
    "user": "the user's name annabel",
}


def rewrite(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def append(path, line):
    path.write_text(path.read_text() + line + "\n")


@pytest.mark.parametrize("case", BAD)
def test_what_must_not_leave_stays(run, tiny_folder, hub, capsys, monkeypatch, case):
    monkeypatch.setenv("DRAFTSMITH_API_KEY", "veryveryverysecret12")
    monkeypatch.setattr("getpass.getuser", lambda: "annabel")
    BAD[case](run)
    assert push(run, tiny_folder) == 2
    error = capsys.readouterr().err
    assert LINES[case] in error and error.count("\n") == 1
    assert "veryverysecret" not in error and "a" * 34 not in error
    assert not hub.asked


def test_a_healed_drafter_that_got_worse_stays(run, tiny_folder, hub, capsys):
    meta = json.loads((run / "drafter/draftsmith.json").read_text())
    healing = {"kind": "mtp", "draft_tokens": 2, "start": "checkpoint"}
    from draftsmith.eval.publish_checks import check_gain

    change_report(run, lambda arm: arm.update(drafter="mtp"))
    report = json.loads((run / "report/report.json").read_text())
    meta["drafter"] = healing
    for taus, bad in (((1.5, 1.4), True), ((1.5,), True), ((1.5, 1.6), False)):
        lines = [json.dumps({"kind": "held_out", "tau": tau}) + "\n" for tau in taus]
        (run / "log.jsonl").write_text("".join(lines))
        if bad:
            with pytest.raises(UserError, match="got worse is not pushed"):
                check_gain(meta, report, run / "log.jsonl")
        else:
            check_gain(meta, report, run / "log.jsonl")


def test_a_users_paths_are_replaced_where_the_user_says_so(run, tiny_folder, hub):
    append(run / "recipe.yaml", "# see /home/ann/prompts.jsonl")
    assert push(run, tiny_folder, "--replace", "/home/ann/=") == 0
    text = hub.repos[REPO].commits[-1].files["recipe.yaml"].decode()
    assert "# see prompts.jsonl" in text


# --- a Hub in trouble ---


def test_a_wrong_token_and_a_taken_name_are_told(run, tiny_folder, hub, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "wrong" * 6)
    assert push(run, tiny_folder) == 2
    assert "refuses access (401); log in" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.put(REPO, {"pytorch_model.bin": b"x", ".gitattributes": b""})
    assert push(run, tiny_folder) == 2
    assert "holds other weights (pytorch_model.bin)" in capsys.readouterr().err
    assert cli.main(["eval", "nobody/nothing"]) == 2
    assert "knows no such repository" in capsys.readouterr().err


def test_a_repository_that_is_there_gets_a_commit_more(run, tiny_folder, hub):
    assert push(run, tiny_folder) == 0  # 409 of the second time means that it is there
    append(run / "recipe.yaml", "# newer")
    asked = len(hub.asked)
    assert push(run, tiny_folder) == 0
    assert len(hub.repos[REPO].commits) == 3
    assert not [one for one in hub.asked[asked:] if one[0] == "PUT"]  # weights are there


def test_somebody_elses_commit_meanwhile_is_told(run, tiny_folder, hub, capsys):
    hub.troubles.append(Trouble("POST", "/commit/", 412))
    assert push(run, tiny_folder) == 2
    assert "changed meanwhile" in capsys.readouterr().err
    assert push(run, tiny_folder) == 0


def test_a_server_that_stumbles_is_asked_again(run, tiny_folder, hub):
    hub.troubles += [
        Trouble("POST", "/preupload/", 503, times=2),
        Trouble("PUT", "/store/", 500, times=2),
        Trouble("POST", "/objects/batch", 502),
    ]
    assert push(run, tiny_folder) == 0
    assert "medusa_lm_head.safetensors" in hub.repos[REPO].commits[-1].files


def test_a_cut_upload_goes_on_with_what_is_missing(run, tiny_folder, hub, capsys):
    hub.troubles.append(Trouble("PUT", "/store/", None, times=100, after=1000))
    assert push(run, tiny_folder, "--export", "vllm") == 2
    assert "run the same command again" in capsys.readouterr().err
    assert len(hub.repos[REPO].commits) == 1 and not hub.large  # nothing is there by half
    hub.troubles.clear()
    assert push(run, tiny_folder, "--export", "vllm") == 0
    assert len(hub.large) == 2 and len(hub.repos[REPO].commits) == 2


def test_a_file_that_is_uploaded_is_not_sent_again(run, tiny_folder, hub, capsys):
    hub.troubles.append(Trouble("POST", "/commit/", 400))
    assert push(run, tiny_folder) == 2
    sent = [one for one in hub.asked if one[0] == "PUT"]
    assert len(sent) == 1 and len(hub.large) == 1
    assert push(run, tiny_folder) == 0
    assert [one for one in hub.asked if one[0] == "PUT"] == sent


def test_a_cut_download_goes_on_where_it_was(run, tiny_folder, hub):
    assert push(run, tiny_folder) == 0
    hub.troubles.append(Trouble("GET", "medusa_lm_head.safetensors", None, after=3000))
    folder = fetch(HubName(REPO, None))
    want = load_file(run / WEIGHTS)
    have = load_file(folder / "medusa_lm_head.safetensors")
    assert all(torch.equal(have[name], value) for name, value in want.items())
    count = len(hub.asked)
    assert fetch(HubName(REPO, None)) == folder  # nothing is fetched twice
    assert not [path for how, path in hub.asked[count:] if "safetensors" in path and how == "GET"]


def test_offline_says_so_and_the_cache_is_enough(run, tiny_folder, hub, monkeypatch, capsys):
    assert push(run, tiny_folder) == 0
    folder = fetch(HubName(REPO, None))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch(HubName(REPO, None)) == folder
    assert cli.main(["eval", "other/one"]) == 2
    assert "not in this machine's cache" in capsys.readouterr().err


def test_words_that_mean_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    for word in ("mine", "./a/b", "/a/b", "runs/mine", "a/b/c", "a/b.yaml", "-a/b", "~/x", "a/"):
        assert hub_name(word) is None, word
    assert hub_name("org/some.name-1") == HubName("org/some.name-1", None)
    assert hub_name("org/name@v1.0") == HubName("org/name", "v1.0")
    assert hub_name("org/name@refs/pr/1") == HubName("org/name", "refs/pr/1")
