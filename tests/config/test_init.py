"""`dpo init`: a recipe from data, model and machine."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml
from transformers import AutoModelForCausalLM, GPT2Config, Qwen3MoeConfig

from tasks.artifacts import demo
from tasks.config.cluster import Cluster, load_cluster
from tasks.config.params import Params, load_params, overlay
from tasks.config.strict import dotted, read_yaml, validate
from tasks.errors import UserError
from tasks.init import recipe
from tasks.init.choices import choose
from tasks.init.data_facts import DataFacts, languages
from tasks.init.facts import Facts
from tasks.init.machine import GIB, Machine, ModelFacts, examine_model
from tasks.init.times import Estimate, estimate_here, run_seconds, short_trial
from tasks.lifecycle.estimates import adapter as adapter_of
from tasks.lifecycle.estimates import worker_memory
from tasks.runs import run_config
from tests.benchmarks.workload import qwen_config
from tests.models.test_architectures import ALL
from tests.support.workspaces import PROJECT, write_data
from training.models import adaptation
from training.models.tokenizer import load_tokenizer
from training.trainer.memory import Sizes, model_sizes

CPU = Machine([], 4, 16 * GIB, False)
OWN_CODE = {"model_type": "evil-net", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
GPU = Machine([("H200", 140 * GIB)], 16, 100 * GIB, True)


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(recipe, "RECIPES", tmp_path)
    return tmp_path


def init(data: Path, model: Path, force: bool = False, **overrides: object) -> None:
    given = {key.replace("__", "."): value for key, value in overrides.items()}
    recipe.init(str(data), str(model), "mine", False, given, force)


def test_a_recipe_has_a_reason_for_each_value_and_is_valid(recipes: Path, tiny_base: Path, capsys) -> None:
    rows = [{"question": row["prompt"], "good": row["chosen"], "bad": row["rejected"]} for row in demo.rows(0)[:150]]
    write_data(recipes / "pairs.jsonl", [*rows, {"question": "x", "good": "y", "bad": "y"}])
    columns = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    init(recipes / "pairs.jsonl", tiny_base, prepare__columns=columns)
    output = capsys.readouterr().out
    assert "A short trial first" not in output  # the whole run is short
    assert output.count("    + ") == output.count("    - ") == 3  # pairs as they are understood
    assert "151 rows of the shape pairs, 150 usable pairs" in output
    assert "left out 1: equal_answers" in output
    assert "English 100%" in output
    assert "512: 100.0%, 1024: 100.0%" in output
    assert "Next: `dpo run --recipe mine` (about " in output

    text = (recipes / "mine.yaml").read_text()
    content = yaml.safe_load(text)
    values = [line for line in text.splitlines() if not line.endswith(":") and not line.startswith("#")]
    assert all("  # " in line for line in values)
    params = validate(Params, overlay(read_yaml(PROJECT / "params.yaml"), content["params"]), Path("mine"))
    assert (params.prepare.max_tokens, params.prepare.columns, params.evaluate.judge) == (512, columns, "none")
    assert params.promote.model_name == "mine"
    load_cluster(PROJECT, content["cluster"])
    with pytest.raises(UserError, match=r"flows/recipes/mine\.yaml exists\. .* --force"):
        init(recipes / "pairs.jsonl", tiny_base)


def test_what_cannot_work_is_one_sentence_and_writes_nothing(recipes: Path, tiny_base: Path) -> None:
    write_data(recipes / "other.jsonl", [{"a": 1}])
    write_data(recipes / "pairs.jsonl", demo.rows(0)[:20])
    (recipes / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (recipes / "model" / name).write_bytes((tiny_base / name).read_bytes())
    for data, model, message in (
        ("other.jsonl", tiny_base, "match no known row shape"),
        ("pairs.jsonl", recipes / "model", "cannot be used: "),
    ):
        with pytest.raises(UserError, match=message):
            init(recipes / data, model)
    with pytest.raises(UserError, match="A recipe cannot be named 'a/b'"):
        recipe.init("pairs.jsonl", "model", "a/b", False, {}, False)
    assert not list(recipes.glob("*.yaml"))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_the_adapter_trains_is_said_or_refused(
    recipes: Path, tiny_base: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_data(recipes / "pairs.jsonl", demo.rows(0)[:50])
    examined, examine = [], adaptation.examine
    monkeypatch.setattr(adaptation, "examine", lambda *given: examined.append(given) or examine(*given))
    init(recipes / "pairs.jsonl", tiny_base)
    assert len(examined) == 1  # a large model takes seconds
    printed = re.search(
        r"Adapter  LoRA of rank 16: (\S+) trained parameters, .* on q_proj, .*; frozen: embed_tokens",
        (capsys.readouterr().out),
    )
    lora = {**load_params().train.adapter.model_dump(), "rank": 16}
    assert int(printed[1].replace(",", "")) == model_sizes(tiny_base, lora).trainable
    experts, shape = recipes / "experts", {**ALL["Qwen3Moe"], "vocab_size": 520}
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**shape)).save_pretrained(experts)
    load_tokenizer(tiny_base).save_pretrained(experts)
    for key, value in {"dropout": 0.1, "use_dora": True, "init": "pissa"}.items():
        with pytest.raises(UserError, match=rf"params.yaml: train\.adapter\.{key}: .* does not work on the experts"):
            init(recipes / "pairs.jsonl", experts, force=True, **{f"train__adapter__{key}": value})
    sft = {"sft": {"learning_rate": 1e-4, "adapter": {**lora, "use_dora": True}}}
    with pytest.raises(
        UserError, match=r"params.yaml: sft\.adapter\.use_dora: true does not work .* or sft\.adapter\.targets"
    ):
        init(recipes / "pairs.jsonl", experts, force=True, **sft)
    init(recipes / "pairs.jsonl", experts, force=True)
    assert "experts, router; frozen: " in capsys.readouterr().out
    changes = {"source.data": "pairs.jsonl", "source.model": str(experts), "train.adapter.dropout": 0.1}
    params = validate(Params, overlay(read_yaml(PROJECT / "params.yaml"), dotted(changes)), Path("params.yaml"))
    for estimate in (adapter_of, partial(worker_memory, cluster=load_cluster(PROJECT), stage="train")):  # `dpo plan`
        with pytest.raises(UserError, match=r"train\.adapter\.dropout: 0\.1 does not work"):
            estimate(params=params, root=recipes)


ADDRESSES = {
    "DATA": (
        ("nothing.jsonl", "there is no file nothing.jsonl"),
        ("notes.txt", "must end in one of"),
        ("empty", "has no file of rows"),
        ("empty.jsonl", "has no rows"),
        ("feedback:mine?colour=red", "`colour` in .* is an unknown option"),
        ("hub:owner/name?colour=red", "`colour` in .* is an unknown option"),
        ("ftp://host/pairs.jsonl", "must use one protocol of"),
        ("http://127.0.0.1:9/pairs.jsonl", "could not be read"),
    ),
    "MODEL": (
        ("nothing", r"there is no model in nothing \(no config\.json\)"),
        ("no-weights", "has no .safetensors file"),
        ("damaged", "cannot be used: "),
        ("with-code", "needs its own Python code"),
        ("registry:champion", "examines the files of a model"),
    ),
}
KEY_OF = {"DATA": "source.data", "MODEL": "source.model"}


@pytest.mark.parametrize(
    ("argument", "given", "message"), [(a, *case) for a, cases in ADDRESSES.items() for case in cases]
)
def test_an_address_that_cannot_work_is_called_as_it_was_typed(
    recipes: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch, argument: str, given: str, message: str
) -> None:
    monkeypatch.chdir(recipes)
    write_data(recipes / "pairs.jsonl", demo.rows(0)[:20])
    (recipes / "empty").mkdir()
    for name in ("notes.txt", "empty.jsonl"):
        (recipes / name).touch()
    for name, changes in (("no-weights", {}), ("damaged", {"model_type": "nonesuch"}), ("with-code", OWN_CODE)):
        shutil.copytree(tiny_base, recipes / name)
        config = json.loads((recipes / name / "config.json").read_text())
        (recipes / name / "config.json").write_text(json.dumps(config | changes))
    (recipes / "no-weights/model.safetensors").rename(recipes / "no-weights/consolidated.safetensors")
    data, model = (given, tiny_base) if argument == "DATA" else ("pairs.jsonl", given)
    with pytest.raises(UserError, match=rf"^{argument}: .*{message}") as error:
        recipe.init(str(data), str(model), "mine", False, {}, False)
    assert f"{KEY_OF[argument]}:" not in str(error.value)
    assert not list(recipes.glob("*.yaml"))


def test_an_address_of_a_setting_keeps_its_key(recipes: Path, tiny_base: Path) -> None:
    write_data(recipes / "pairs.jsonl", demo.rows(0)[:20])
    with pytest.raises(UserError, match=r"^source\.eval: there is no file nothing\.jsonl"):
        init(recipes / "pairs.jsonl", tiny_base, source__eval="nothing.jsonl", prepare__eval_fraction=None)


def test_a_registered_model_is_set_beside_the_one_that_is_examined(recipes: Path, tiny_base: Path) -> None:
    write_data(recipes / "pairs.jsonl", demo.rows(0)[:50])
    init(recipes / "pairs.jsonl", tiny_base, source__model="registry:mine/champion")  # as the error advises
    assert yaml.safe_load((recipes / "mine.yaml").read_text())["params"]["source"]["model"] == "registry:mine/champion"


def test_init_says_that_a_base_model_learns_to_answer_first(recipes: Path, tiny_base: Path, capsys) -> None:
    base = Path(shutil.copytree(tiny_base, recipes / "base"))
    (base / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "chat_template"}))
    rows = demo.rows(0)[:50]
    write_data(recipes / "pairs.jsonl", rows)
    write_data(recipes / "thumbs.jsonl", [unpaired(row, n % 2 == 0) for n, row in enumerate(rows)])

    def said(data: str, model: Path = base, **given: object) -> str:
        init(recipes / data, model, force=True, **given)
        return capsys.readouterr().out

    text = said("pairs.jsonl")
    assert "it is a base model" in text
    assert "begins with supervised fine-tuning on the chosen answers (`sft` in the recipe, docs/sft.md)" in text
    rate = yaml.safe_load((recipes / "mine.yaml").read_text())["params"]["sft"]["learning_rate"]
    assert f"`--set source.sft=FILE --set sft.learning_rate={rate}`" in text
    assert "fine-tuning on the desirable answers" in said("thumbs.jsonl")
    write_data(recipes / "answers.jsonl", [{"prompt": "Where?", "response": "Here."}] * 5)
    answers = str(recipes / "answers.jsonl")
    assert f"fine-tuning on the answers of {answers}" in said(
        "pairs.jsonl", source__sft=answers, sft__learning_rate=rate
    )
    assert "warning: The model has no chat template" in said("pairs.jsonl", sft=None)
    assert yaml.safe_load((recipes / "mine.yaml").read_text())["params"]["sft"] is None
    assert "base model" not in said("pairs.jsonl", tiny_base)


def unpaired(row: dict, is_good: bool) -> dict:
    return {"prompt": row["prompt"], "completion": row["chosen" if is_good else "rejected"], "label": is_good}


def facts(pairs: int, tokens: int) -> DataFacts:
    from collections import Counter

    column = np.full(100, tokens // 2)
    return DataFacts(pairs, pairs, "pairs", Counter(), column, column, column, {})


def chosen(folder: Path, machine: Machine, data: DataFacts, sizes: Sizes | None = None, full: bool = False):
    model = ModelFacts(folder, sizes or model_sizes(folder, None), "bfloat16", 4096, True)
    return choose(("pairs.jsonl", str(folder)), "mine", Facts(data, model, machine, "template"), full, {})


def test_values_follow_the_data(tiny_base: Path) -> None:
    few, many = (chosen(tiny_base, CPU, facts(pairs, 800)).params for pairs in (300, 50_000))
    assert few.prepare.max_tokens == many.prepare.max_tokens == 1024
    assert (few.prepare.eval_fraction, many.prepare.eval_fraction) == (0.2, 0.05)
    assert (few.train.epochs, many.train.epochs) == (3, 1)
    assert few.train.global_batch_size < many.train.global_batch_size
    assert chosen(tiny_base, CPU, facts(300, 9000)).params.prepare.max_tokens == 4096  # the model's context


def test_a_model_without_a_chat_template_learns_to_answer_first(tiny_base: Path) -> None:
    sizes = model_sizes(tiny_base, None)

    def plan(machine: Machine, full: bool = False, **given: object) -> Params:
        known = Facts(facts(300, 800), ModelFacts(tiny_base, sizes, "bfloat16", 4096, False), machine, "plain")
        return choose(("pairs.jsonl", "base"), "mine", known, full, given).params

    assert chosen(tiny_base, CPU, facts(300, 800)).params.sft is None
    assert (plan(CPU).sft.learning_rate, plan(CPU).sft.adapter.rank) == (5.0e-4, 16)
    assert (plan(GPU).sft.dtype, plan(GPU, full=True).sft.adapter) == ("bfloat16", None)
    assert plan(CPU, sft=None).sft is None
    assert plan(CPU, **{"sft.learning_rate": 1.0e-4}).sft.learning_rate == 1.0e-4


def test_moments_in_bfloat16_where_those_in_float32_do_not_fit(tmp_path: Path) -> None:
    qwen_config("7b").save_pretrained(tmp_path)
    seven = model_sizes(tmp_path, None)
    assert chosen(tmp_path, GPU, facts(5000, 800), seven, full=True).params.train.optimizer == "adamw_bf16"
    assert chosen(tmp_path, GPU, facts(5000, 800), seven).params.train.optimizer == "adamw"


def test_answers_for_sft_are_no_pairs(recipes: Path, tiny_base: Path, capsys) -> None:
    write_data(recipes / "pairs.jsonl", demo.rows(0)[:50])
    write_data(recipes / "answers.jsonl", [{"prompt": "Where?", "response": "Here."}] * 5)
    answers = {"source__sft": str(recipes / "answers.jsonl"), "sft": {"learning_rate": 1.0e-4}}
    init(recipes / "pairs.jsonl", tiny_base, **answers)
    assert "50 rows of the shape pairs, 50 usable pairs" in capsys.readouterr().out


def test_values_follow_what_is_given(recipes: Path, tiny_base: Path, capsys) -> None:
    write_data(recipes / "pairs.jsonl", demo.rows(0)[:150])
    init(recipes / "pairs.jsonl", tiny_base, prepare__max_tokens=300, prepare__max_pairs=100, train__epochs=1)
    text = (recipes / "mine.yaml").read_text()
    assert "--set prepare.max_tokens=300 --set prepare.max_pairs=100 --set train.epochs=1`" in text.splitlines()[0]
    assert "# about 20 held-out pairs" in text
    assert "# about 10 steps" in text  # 80 training pairs, one epoch, batches of 8
    assert "300: 100.0%, 512: 100.0%" in capsys.readouterr().out


def test_placement_follows_the_machine(tiny_base: Path) -> None:
    on_cpu, on_gpu = (chosen(tiny_base, machine, facts(300, 800)) for machine in (CPU, GPU))
    assert (on_cpu.params.train.dtype, on_cpu.cluster.actor_train.cpus_per_worker) == ("float32", 2)
    assert (on_gpu.params.train.dtype, on_gpu.cluster.actor_train.gpus_per_worker) == ("bfloat16", 1)
    assert (on_cpu.fits, on_gpu.fits) == (True, True)
    assert on_cpu.cluster.reference.shard_pairs < on_gpu.cluster.reference.shard_pairs  # progress on a slow machine
    full = chosen(tiny_base, GPU, facts(300, 800), full=True).params.train
    assert full.adapter is None
    assert full.learning_rate < on_gpu.params.train.learning_rate
    crowded = chosen(tiny_base, Machine([("small", GIB)], 4, GIB, True), facts(300, 800))
    assert not crowded.fits
    assert crowded.cluster.actor_train.activation_checkpointing


def test_the_estimated_time_follows_the_limits_of_a_run(tiny_base: Path) -> None:
    model = ModelFacts(tiny_base, model_sizes(tiny_base, None), "float32", 4096, True)
    known = Facts(facts(2000, 400), model, CPU, "template")
    speed = 2.0 * model.sizes.parameters * 100  # scores 45 tokens a second

    def seconds(**values: object) -> float:
        given = {key.replace("__", "."): value for key, value in values.items()}
        plan = choose(("pairs.jsonl", str(tiny_base)), "mine", known, False, given)
        return run_seconds(plan.params, plan.cluster, known, speed)

    fixed = {
        "evaluate__prompts": 0,
        "promote__limits": {},
        "prepare__eval_fraction": 0.1,
        "train__epochs": 1,
        "train__global_batch_size": 10,
    }
    # Tokens of a pair: 600. Passes over 500 pairs: one of the reference, two of training on 450, five of held-out 50.
    assert seconds(**fixed, prepare__max_pairs=500) == pytest.approx(90 + 600 * (500 + 900 + 250) / 45)
    assert seconds(**fixed, prepare__max_pairs=500, train__max_steps=20) == pytest.approx(
        90 + 600 * (500 + 2 * 20 * 10 + 250) / 45
    )


def test_plan_survives_a_model_whose_download_was_interrupted(recipes: Path, tiny_base: Path, tmp_path: Path) -> None:
    write_data(recipes / "pairs.jsonl", demo.rows(0)[:20])
    model = Path(shutil.copytree(tiny_base, tmp_path / "model"))
    changes = {"source.data": str(recipes / "pairs.jsonl"), "source.model": str(model)}
    params = validate(Params, overlay(read_yaml(PROJECT / "params.yaml"), dotted(changes)), Path("params.yaml"))
    cluster = load_cluster(PROJECT)

    def known() -> tuple[object, ...]:
        found = worker_memory(params, cluster, PROJECT, "train"), adapter_of(params, PROJECT)
        return *found, estimate_here(params, cluster)

    assert all(known())
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert known() == (None, None, None)
    (model / "model.safetensors.index.json").unlink()
    assert known() == (None, None, None)


def test_the_context_is_the_one_that_the_configuration_means(tiny_base: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_base)
    config = GPT2Config(vocab_size=64, n_embd=8, n_layer=1, n_head=1, n_positions=77)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert examine_model(tmp_path, tokenizer).context == 77


def test_plan_estimates_what_init_estimated_from_the_same_facts(
    recipes: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tasks.init.times.operations_per_second", lambda dtype, cpus: 1e9)  # else it is measured twice
    monkeypatch.setattr("tasks.config.params.RECIPES", recipes)
    long = {**demo.rows(0)[0], "chosen": "kind " * 800, "rejected": "rude " * 800}  # longer than a row of 1024 tokens
    write_data(recipes / "pairs.jsonl", [*demo.rows(0)[:150], long])
    init(recipes / "pairs.jsonl", tiny_base, prepare__max_tokens=4096)
    said = capsys.readouterr().out
    time, gib = re.search(r"\(about (.*) if nothing else runs here, (.*) GiB on each", said).groups()

    def planned(**overrides: object) -> tuple[Params, Cluster, Estimate | None]:
        config = run_config.resolve("mine", {key.replace("__", "."): value for key, value in overrides.items()})
        return config.params, config.cluster, estimate_here(config.params, config.cluster)

    params, cluster, (seconds, longest) = planned()
    assert longest > cluster.actor_train.row_tokens
    assert recipe._in_words(sum(seconds.values())) == time
    assert f"{worker_memory(params, cluster, PROJECT, 'train', longest):.1f}" == gib
    assert capsys.readouterr().out == ""  # no pairs and no progress
    fewer = planned(train__epochs=1)[2].seconds
    assert fewer == {**seconds, "train": fewer["train"]}
    assert fewer["train"] < seconds["train"]
    for key in ("source__data", "source__model"):
        assert planned(**{key: "hub:owner/name"})[2] is None  # not on this machine
    assert planned(prepare__format="scored")[2] is None  # the run refuses it


def test_a_short_trial_only_lowers_values(tiny_base: Path) -> None:
    plan, options = short_trial(chosen(tiny_base, CPU, facts(300, 800)))
    assert options == " --set prepare.max_pairs=100 --set train.epochs=1 --set evaluate.prompts=8"
    assert (plan.params.prepare.max_pairs, plan.params.train.epochs, plan.params.evaluate.prompts) == (100, 1, 8)
    assert short_trial(plan)[1] == ""


def test_languages_by_script_and_frequent_words() -> None:
    assert languages(["What is the time?", "Wie spät ist es, und wo ist die Uhr?"]) == {"English": 0.5, "German": 0.5}
    assert list(languages(["今日は何曜日ですか", "12 + 5 = ?"])) == ["Japanese"]
    assert list(languages(["Какой сегодня день?"])) == ["Cyrillic"]
