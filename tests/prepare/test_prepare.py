"""Source and prepare: every row is counted, the bytes are stable, and errors have messages."""

import gzip
import json
from pathlib import Path

import pytest
import torch
import yaml

from tasks.artifacts import demo
from tasks.artifacts.pairs import read_pairs, read_rows
from tasks.config.params import load_params, overlay
from tasks.config.strict import dotted, read_yaml
from tasks.errors import UserError
from tasks.evaluate.answers import held_out_prompts
from tasks.prepare.rows.preference import is_held_out, prompt_hash
from tasks.prepare.stage import prepare
from tasks.source import fetch, read_limits
from tasks.source.stage import source
from tasks.system.files import hash_files, read_json
from tasks.tracking.journal import StageJournal
from tests.support.scoring import make_scorer
from tests.support.workspaces import make_workspace, write_cluster, write_data
from training.models.loading import load_model
from training.objectives.metrics import pair_logps
from training.objectives.objective import Objective
from training.pairs.packing import build_row
from training.scoring.logps import row_logps

ROW = {"prompt": "Where is the cup?", "chosen": "On the table.", "rejected": "Find it yourself."}


def rows(count: int, start: int = 0) -> list[dict[str, str]]:
    return [{**ROW, "prompt": f"Where is cup {number}?"} for number in range(start, start + count)]


@pytest.fixture
def workspace(tmp_path, tiny_base, monkeypatch) -> Path:
    root = make_workspace(tmp_path / "workspace", tiny_base)
    monkeypatch.chdir(root)
    return root


def go(*stages) -> None:
    Path("journals").mkdir(exist_ok=True)
    for stage in stages:
        stage(StageJournal(Path("journals"), stage.__name__))


def change(**values) -> None:
    """params.yaml of the workspace, with these values by dotted names."""
    content = overlay(read_yaml(Path("params.yaml")), dotted({k.replace("__", "."): v for k, v in values.items()}))
    Path("params.yaml").write_text(yaml.safe_dump(content))


def report() -> dict:
    return read_json("data/card/report.json")


def prompts(split: str) -> set[str]:
    return {row["prompt"] for row in read_rows(Path(f"data/pairs/{split}.arrow"))}


def quarantined() -> list[dict]:
    return [json.loads(line) for line in Path("data/card/quarantine.jsonl").read_text().splitlines()]


def test_pairs_have_loss_masks_and_the_report_counts_every_row(workspace):
    broken = {**ROW, "rejected": ROW["chosen"]}
    write_data(Path("pairs.jsonl"), [*rows(50), rows(1)[0], broken, {"prompt": "x", "chosen": "y"}])
    go(source, prepare)
    assert report()["rows"] == 53
    assert sum(report()["pairs"].values()) == 50
    assert report()["left_out"] == {"duplicate": 1, "equal_answers": 1, "missing_field": 1}
    assert report()["format"] == {"pairs": "pairs"}
    assert [(entry["row"], entry["violation"]) for entry in quarantined()] == [
        (52, "equal_answers"),
        (53, "missing_field"),
    ]
    assert report()["examples"]["duplicate"][0]["row"] == 51
    for pair in read_pairs("train"):
        assert len(pair.chosen_ids) == len(pair.chosen_mask) == sum(pair.chosen_mask)
    (first, *_) = read_rows(Path("data/pairs/train.arrow"))
    assert [first[name] for name in ("label", "margin", "weight", "source")] == [1.0, 0.0, 1.0, "pairs"]


def test_the_same_rows_give_the_same_bytes_for_any_number_of_processes(workspace, monkeypatch):
    monkeypatch.setattr(read_limits, "CHUNK_BYTES", 4000)  # some forty rows
    monkeypatch.setattr("tasks.prepare.stage.ROWS_PER_PROCESS", 1)
    write_data(Path("pairs.jsonl"), [*rows(200), {**ROW, "chosen": ""}, *rows(20)])
    made = []
    for processes in (1, 3):
        write_cluster(workspace, {"prepare.num_workers": processes})
        go(source, prepare)
        made.append(hash_files(Path("data/pairs")) | hash_files(Path("data/card")))
    assert set(made[0]) == {
        *(
            "train.arrow",
            "eval.arrow",
            "hashes.json",
            "report.json",
            "card.md",
            "card.html",
            "preview.json",
            "quarantine.jsonl",
        )
    }
    assert made[0] == made[1]
    assert report()["left_out"] == {"empty_answer": 1, "duplicate": 20}
    assert [int(row["prompt"].split()[-1][:-1]) for row in read_rows(Path("data/pairs/train.arrow"))] == sorted(
        n for n in range(200) if f"Where is cup {n}?" in prompts("train")
    )


def test_a_prompt_never_crosses_the_split_and_new_rows_move_none(workspace):
    write_data(Path("pairs.jsonl"), rows(60))
    go(source, prepare)
    before = {split: prompts(split) for split in ("train", "eval")}
    more = [{**row, "chosen": "Near the window."} for row in rows(90)]
    write_data(Path("pairs.jsonl"), [*rows(60), *more])
    go(source, prepare)
    assert not prompts("train") & prompts("eval")
    assert before["train"] <= prompts("train")
    assert before["eval"] <= prompts("eval")
    assert prompt_hash("  Where IS\nit? ") == prompt_hash("where is it?")
    assert not is_held_out(1 << 63, 0.5)
    assert is_held_out((1 << 63) - 1, 0.5)


def test_without_the_loss_mask_every_token_but_the_first_counts_and_answers_start_from_the_whole_prompt(
    workspace, tiny_base
):
    """The sums that a loss takes are those of plain passes over whole sequences; what is sampled from is the prompt."""
    write_data(Path("pairs.jsonl"), rows(30))
    go(source, prepare)
    asked = [row["prompt_ids"] for row in held_out_prompts(read_rows(Path("data/pairs/eval.arrow")), 4)]
    masked = read_pairs("train")[:2]
    change(prepare__apply_loss_mask=False)
    go(prepare)
    again = held_out_prompts(read_rows(Path("data/pairs/eval.arrow")), 4)
    assert [row["prompt_ids"] for row in again] == asked
    assert min(map(len, asked)) > 5

    pairs, device = read_pairs("train")[:2], torch.device("cpu")
    model = load_model(tiny_base, "float32", device).eval()
    row = build_row(pairs, range(2))
    with torch.no_grad():
        given = pair_logps(
            row, row_logps(make_scorer(model, pairs, device), row), Objective({"sigmoid": 1.0}, {"beta": 0.1})
        )
        model.set_attn_implementation("sdpa")
        for number, pair in enumerate(masked):
            for part, sums, counts in (
                ("chosen_ids", given.chosen_logps, given.chosen_tokens),
                ("rejected_ids", given.rejected_logps, given.rejected_tokens),
            ):
                ids = torch.tensor([[*pair.prompt_ids, *getattr(pair, part)]])
                logps = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
                assert sums[number].item() == pytest.approx(logps.sum().item(), rel=1e-5)
                assert counts[number] == ids.shape[1] - 1
    # As before: the prompt is computed once for both responses.
    assert len(pairs[0]) <= len(masked[0])


@pytest.mark.parametrize("policy", ["drop", "truncate_prompt", "truncate_response", "fail"])
def test_pairs_above_max_tokens(workspace, policy):
    long = {"prompt": {**ROW, "prompt": "Where? " * 200}, "response": {**ROW, "chosen": "There. " * 200}}
    one = long["response" if policy == "truncate_response" else "prompt"]
    write_data(Path("pairs.jsonl"), [*rows(30), one])
    change(prepare__max_tokens=64, prepare__over_length=policy)
    go(source)
    if policy == "fail":
        with pytest.raises(UserError, match=r"pairs\.jsonl: row 31 has .* tokens, above prepare\.max_tokens 64"):
            go(prepare)
        assert not Path("data/pairs").exists()
        return
    go(prepare)
    assert report()["left_out"] == ({"over_length": 1} if policy == "drop" else {})
    assert report()["truncated"] == (0 if policy == "drop" else 1)
    longest = max(
        len(p.prompt_ids) + max(len(p.chosen_ids), len(p.rejected_ids))
        for s in ("train", "eval")
        for p in read_pairs(s)
    )
    assert longest <= 64


def test_max_pairs_is_a_sample_by_seed_and_the_rest_is_counted(workspace, monkeypatch):
    monkeypatch.setattr(read_limits, "CHUNK_BYTES", 1000)
    bad = [{**row, "rejected": row["chosen"]} for row in rows(100, start=100)]
    write_data(Path("pairs.jsonl"), [*rows(100), *bad])
    change(prepare__max_pairs=40, prepare__max_bad_fraction=0.6)
    go(source)
    made = []
    for seed in (0, 0, 1):
        change(prepare__seed=seed)
        go(prepare)
        made.append(prompts("train") | prompts("eval"))
        assert sum(report()["pairs"].values()) == 40
        assert report()["left_out"] == {"equal_answers": 100, "not_sampled": 60}  # the first sample was too small
    assert made[0] == made[1] != made[2]
    assert 8 <= sum(f"Where is cup {n}?" in made[0] for n in range(50)) <= 32  # not the first rows; 20 on average


def test_a_large_loss_and_few_held_out_pairs_are_warnings_with_the_setting_that_helps(workspace, capsys):
    long = [{**row, "chosen": "There. " * 200} for row in rows(20, start=40)]
    longer = [{**row, "chosen": "There. " * 450} for row in rows(4, start=70)]
    write_data(Path("pairs.jsonl"), [*rows(40), *long, *longer])
    change(prepare__max_tokens=256)
    go(source, prepare)
    (loss,) = [one for one in report()["warnings"] if "prepare.max_tokens" in one and "of 64 pairs" in one]
    assert "24 of 64 pairs (37.5%) are left out" in loss
    assert "keeps 20 of them" in loss
    assert "keeps 24 of them" in loss
    held_out = report()["pairs"]["eval"]
    half = 98 / (held_out + 1.96**2) ** 0.5  # Wilson's interval around one half: z / (2 sqrt(n + z^2))
    (small,) = [one for one in report()["warnings"] if "held-out pairs say little" in one]
    assert f"{held_out} held-out pairs" in small
    assert f"+-{half:.0f} points" in small
    said = capsys.readouterr().out
    assert "prepare: pairs is read as pairs. Check three pairs (+ chosen, - rejected), the loss in «»:" in said
    assert "  <|bos|><|user|>Where is cup 0?<|assistant|>\n    + «On the table.<|eos|>»\n" in said
    assert "    - «Find it yourself.<|eos|>»\n" in said
    assert f"prepare: warning: {loss}" in said


def test_rows_that_another_shape_reads_are_an_error_that_names_it(workspace):
    both = [{**row, "messages": [{"role": "user", "content": row["prompt"]}]} for row in rows(20)]
    write_data(
        Path("pairs.jsonl"),
        [{**row, "messages": [*row["messages"], {"role": "assistant", "content": "On the table."}]} for row in both],
    )
    change(prepare__format="messages")
    go(source)
    with pytest.raises(UserError, match=r"20 of 20 rows .* were read as messages\. Set prepare\.format to pairs\.$"):
        go(prepare)
    change(prepare__format="openai", prepare__columns={"prompt": "rejected"})
    with pytest.raises(UserError, match=r"20 of 20 rows .* Check prepare\.format and prepare\.columns") as error:
        go(prepare)
    assert "max_bad_fraction" not in str(error.value)


def test_contradictions_and_repeated_ids_are_quarantined(workspace):
    turned = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows(2)]
    keyed = [{**row, "key": n} for n, row in enumerate([*rows(50), *turned, *rows(1, start=70)])]
    keyed[-1]["key"] = 5
    write_data(Path("pairs.jsonl"), keyed)
    change(prepare__columns={"id": "key"}, prepare__max_bad_fraction=0.2)
    go(source, prepare)
    assert report()["left_out"] == {"contradiction": 4, "id_not_unique": 1}  # both sides of a contradiction
    assert [(entry["row"], entry["violation"]) for entry in quarantined()] == [
        (1, "contradiction"),
        (2, "contradiction"),
        (51, "contradiction"),
        (52, "contradiction"),
        (53, "id_not_unique"),
    ]
    assert quarantined()[-1]["content"] == keyed[-1]


def test_near_duplicates_are_skipped_on_request(workspace):
    long = "Please tell me in a few words where the red cup is that Xaver put on the table this morning before he left"
    near = [{**ROW, "prompt": f"{long} for {place}."} for place in ("school", "work")]
    write_data(Path("pairs.jsonl"), [*demo.rows(0)[:40], *near])
    change(prepare__near_duplicates=0.7, prepare__eval_fraction=0.5)
    go(source, prepare)
    assert report()["left_out"] == {"near_duplicate": 1}
    assert sum("Xaver" in prompt for split in ("train", "eval") for prompt in prompts(split)) == 1


def test_prompts_of_held_out_data_are_removed_from_training(workspace):
    write_data(Path("pairs.jsonl"), rows(30))
    write_data(Path("held.jsonl"), [{**row, "chosen": "Near the window."} for row in rows(5, start=27)])
    change(source__eval="held.jsonl", prepare__eval_fraction=None, prepare__max_bad_fraction=0.2)
    go(source, prepare)
    assert report()["pairs"] == {"train": 27, "eval": 5}
    assert report()["left_out"] == {"prompt_in_eval": 3}
    change(prepare__eval_fraction=0.2)
    with pytest.raises(UserError, match=r"`source.eval` or `prepare.eval_fraction`: set one"):
        load_params()


def test_a_mixture_has_weights_shares_and_layouts(workspace):
    write_data(Path("one.jsonl"), rows(40))
    write_data(Path("two.jsonl"), [{"q": f"Where is hat {n}?", "a": "Here.", "b": "No."} for n in range(400)])
    two = {"name": "two", "data": "two.jsonl", "weight": 0.5, "share": 0.25}
    change(
        source__data=[{"name": "one", "data": "one.jsonl", "weight": 2.0, "share": 1.0}, two],
        prepare__by_source={"two": {"format": "auto", "columns": {"prompt": "q", "chosen": "a", "rejected": "b"}}},
    )
    go(source, prepare)
    made = [row for split in ("train", "eval") for row in read_rows(Path(f"data/pairs/{split}.arrow"))]
    assert {(row["source"], row["weight"]) for row in made} == {("one", 2.0), ("two", 0.5)}
    taken = sum(row["source"] == "two" for row in made)
    assert 70 <= taken <= 130  # 400 rows, a quarter by hash: 100 and three standard deviations of 8.7
    assert report()["by_source"]["two"]["left_out"] == {"not_sampled": 400 - taken}
    change(prepare__max_pairs=40)
    go(prepare)
    assert {name: one["train"] + one["eval"] for name, one in report()["by_source"].items()} == {"one": 20, "two": 20}


def test_an_option_without_effect_is_an_error(workspace):
    go(source)
    change(prepare__columns={"id": "key"})
    with pytest.raises(UserError, match=r"prepare.columns maps id to `key`, but pairs.jsonl has no such column"):
        go(prepare)
    change(prepare__columns={}, prepare__by_source={"two": {"format": "auto", "columns": {}}})
    with pytest.raises(UserError, match=r"prepare.by_source: there is no source `two`. There are: pairs"):
        go(prepare)


def test_too_many_bad_rows_stop_the_stage_with_advice(workspace):
    write_data(Path("pairs.jsonl"), [*rows(8), {**ROW, "rejected": ROW["chosen"]}, {**ROW, "chosen": 3}])
    go(source)
    with pytest.raises(UserError) as error:
        go(prepare)
    for part in (
        "2 of 10 rows",
        "The first is row 9 of pairs.jsonl",
        "chosen and rejected are the same",
        "not_text",
        "0.201",
    ):
        assert part in str(error.value)
    assert not Path("data/pairs").exists()
    assert not Path("data/card").exists()
    change(prepare__thresholds={"equal_answers": 0.1, "not_text": 0.05})
    with pytest.raises(UserError, match=r"1 of 10 rows .* raise prepare\.thresholds\.not_text \(now 0\.05\)"):
        go(prepare)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("source__data", "nothing.jsonl", "source.data: there is no file nothing.jsonl. Set a file"),
        ("source__data", "params.yaml", "must end in one of .jsonl, .ndjson, .json, .csv"),
        ("source__data", "infra", "the folder infra has no file of rows"),
        ("source__data", "s4://bucket/a.jsonl", "source.data: s4://bucket/a.jsonl must use one protocol of"),
        ("source__model", "/nowhere", r"source.model: there is no model in /nowhere.*\(no config.json\)"),
    ],
)
def test_missing_inputs_are_errors_before_anything_is_written(workspace, key, value, message):
    change(**{key: value})
    with pytest.raises(UserError, match=message):
        go(source)
    assert not list(Path().glob("data/*"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "source.data: a.jsonl has no rows"),
        ("a.jsonl", b'{"prompt": "cut', "a.jsonl was cut off: its last line, 1,"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 500, mtime=0)[:-9], "a.jsonl.gz is damaged or was cut off"),
    ],
)
def test_a_damaged_or_empty_file_writes_nothing(workspace, name, content, message):
    Path(name).write_bytes(content)
    change(source__data=name)
    with pytest.raises(UserError, match=message):
        go(source)
    assert not list(Path("data").glob("*"))


def test_a_folder_a_url_and_a_data_set_give_the_same_pairs(workspace, monkeypatch):
    """The same rows from each; the hub's library loads a local folder as it would a repository."""
    monkeypatch.setattr(fetch, "DATASETS", f"{workspace}/")
    Path("a/folder/more").mkdir(parents=True)
    write_data(Path("a/folder/a.jsonl"), rows(20))
    write_data(Path("a/folder/more/b.jsonl"), rows(20, start=20))
    Path("a/folder/README.md").write_text("not rows")
    hashes = []
    for address in ("a/folder", f"file://{workspace}/a/folder", "hub:a/folder?split=train"):
        change(source__data=address)
        go(source, prepare)
        assert report()["rows"] == 40
        hashes.append(hash_files(Path("data/pairs")))
    assert hashes[0] == hashes[1] == hashes[2]


def test_content_that_changed_behind_an_address_is_noticed(workspace):
    from tasks.source.fingerprint import content_ids

    for address in ("pairs.jsonl", f"file://{workspace}/pairs.jsonl"):
        write_data(Path("pairs.jsonl"), rows(20))
        change(source__data=address)
        before = content_ids(load_params().source)
        assert content_ids(load_params().source) == before
        write_data(Path("pairs.jsonl"), rows(21))
        assert content_ids(load_params().source) != before


def test_a_base_model_that_changed_since_source_is_noticed(workspace, tiny_base, tmp_path):
    import shutil

    copy = Path(shutil.copytree(tiny_base, tmp_path / "copy"))
    change(source__model=str(copy))
    go(source)
    (copy / "config.json").write_text((copy / "config.json").read_text() + " ")
    with pytest.raises(UserError, match=r"config\.json is not the file that the source stage read"):
        go(prepare)
