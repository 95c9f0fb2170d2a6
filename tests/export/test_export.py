"""Exports of tiny models: merged, sharded, tied, as GGUF, each read back; and the checks that stop an export."""

import json
import shutil
import urllib.request
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.processing_utils import ProcessorMixin

from tasks.export.lineage import licence
from tasks.export.modelfile import modelfile
from tasks.prepare.rows.preference import Preference
from tasks.prepare.templates import choose_template
from tasks.prepare.tokenization import tokenize
from tasks.promote.push import push
from training.exporting import gguf, merging
from training.models import adapters
from training.models.adapters import prompt_logits
from training.models.chat import chat_pieces, keep_template
from training.models.loading import load_model
from training.models.tokenizer import load_tokenizer

TEXTS = ("Where is the cup?", "<|user|>12345 äöü\n\n  x<|assistant|>")
PROMPTS = [[1, 4, 30, 31, 32], [1, 4, *range(60, 90)]]
SHAPE = {
    "hidden_size": 256,  # K types have blocks of 256
    "intermediate_size": 288,  # not a multiple of 256: llama.cpp takes another type
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def make(folder: Path, tiny_base: Path, kind: str, tied: bool) -> Path:
    """A random model of a family, with the demo's tokenizer and logits large enough to tell errors from rounding."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    config, model = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}[kind]
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    built = model(config(vocab_size=len(tokenizer), tie_word_embeddings=tied, initializer_range=0.08, **SHAPE, **ids))
    for name, parameter in built.named_parameters():
        if name.endswith("bias"):  # Qwen2's biases start at zero, which would hide a lost bias
            parameter.data.normal_()
    built.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def adapt(base: Path, folder: Path, scale: float = 0.05) -> Path:
    policy = adapters.add_adapter(load_model(base, "float32"), 4, 8, "all-linear", False, False, seed=0)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0.0, scale)
    adapters.save_adapter(policy, dict(policy.named_parameters()), folder, "base")
    return folder


@pytest.fixture(scope="module", params=[("llama", True), ("llama", False), ("qwen2", True)], ids=str)
def exported(request, tmp_path_factory, tiny_base: Path) -> tuple[Path, Path, dict, list[torch.Tensor]]:
    root = tmp_path_factory.mktemp("export")
    base = make(root / "base", tiny_base, *request.param)
    policy = adapt(base, root / "policy")
    (root / "out").mkdir()
    checks, logits = merging.export(base, policy, True, "float32", root / "out", "100KB", PROMPTS)
    return base, root / "out", {**checks, "tied": request.param[1]}, logits


def test_the_merged_model_equals_the_policy_and_keeps_tied_or_untied_embeddings(exported):
    base, out, checks, logits = exported
    assert checks["largest_logit_difference"] < 1e-4
    assert checks["same_greedy_text"]
    assert checks["embeddings"] == ("tied" if checks["tied"] else "apart")
    plain = prompt_logits(load_model(base, "float32").eval(), PROMPTS)
    assert adapters.largest_difference(plain, logits) > 0.1  # the adapter has an effect
    names = [name for path in out.glob("*.safetensors") for name in load_file(path)]
    assert ("lm_head.weight" in names) == (not checks["tied"])
    assert len(list(out.glob("model-*.safetensors"))) > 1  # sharded
    assert (out / "model.safetensors.index.json").exists()


# The others are exhaustive: llama.cpp reads them all in the next test.
@pytest.mark.parametrize(
    "kind", [kind if kind == "q4_k_m" else pytest.param(kind, marks=pytest.mark.exhaustive) for kind in gguf.MIXTURES]
)
def test_gguf_read_back_by_transformers_equals_the_model(exported, kind: str):
    _, out, _, logits = exported
    target = out / f"model-{kind}.gguf"
    gguf.write(out, target, kind)
    difference = gguf.difference(target, logits, PROMPTS)
    assert difference["kl"] <= gguf.MAX_KL[kind]
    other = [-value for value in logits]
    assert gguf.difference(target, other, PROMPTS)["kl"] > 10 * gguf.MAX_KL[kind]
    again = AutoTokenizer.from_pretrained(out, gguf_file=target.name)
    for text in TEXTS:
        assert again(text)["input_ids"] == load_tokenizer(out)(text)["input_ids"]


@pytest.mark.parametrize("kind", gguf.MIXTURES)
def test_gguf_read_by_llama_cpp_equals_the_model(exported, kind: str):
    import xllamacpp

    _, out, _, logits = exported
    target = out / f"model-{kind}.gguf"
    gguf.write(out, target, kind)
    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel, options.port = str(target), 128, 1, 0
    options.warmup, options.verbosity = False, -1
    server = xllamacpp.Server(options)

    def post(path: str, **body):
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(server.listening_address + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    for text in TEXTS:
        tokens = post("/tokenize", content=text, add_special=False, parse_special=True)["tokens"]
        assert tokens == load_tokenizer(out)(text)["input_ids"]
    vocabulary = logits[0].shape[-1]
    for prompt, expected in zip(PROMPTS, logits, strict=True):
        # The answer is always the token 70, a letter: the server reports no probabilities for half a character or an
        # end. They are those before the bias.
        options = {"n_predict": 1, "n_probs": vocabulary, "logit_bias": [[70, 1000]], "cache_prompt": False}
        answer = post("/completion", prompt=prompt, **options)
        log_probabilities = torch.empty(vocabulary)
        for entry in answer["completion_probabilities"][0]["top_logprobs"]:
            log_probabilities[entry["id"]] = entry["logprob"]
        true = expected[-1].log_softmax(-1)
        kl = (true.exp() * (true - log_probabilities)).sum()
        assert kl <= 2 * gguf.MAX_KL[kind] + 1e-3  # llama.cpp's KV cache is float16


def test_a_mixture_spends_more_bits_where_llama_cpp_does(exported):
    """The types in the file, for a model of 3 layers: no layer is in an eighth at the start, the last one in one."""
    from gguf import GGUFReader

    _, out, checks, _ = exported
    gguf.write(out, out / "types.gguf", "q4_k_m")
    types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(out / "types.gguf").tensors}
    assert types["token_embd.weight"] == ("Q6_K" if checks["tied"] else "Q4_K")
    assert types.get("output.weight", "Q6_K") == "Q6_K"
    assert [types[f"blk.{n}.attn_v.weight"] for n in range(3)] == ["Q4_K", "Q4_K", "Q6_K"]
    assert [types[f"blk.{n}.ffn_down.weight"] for n in range(3)] == ["Q5_0", "Q5_0", "Q8_0"]  # rows of 288 values
    assert types["blk.0.attn_q.weight"] == "Q4_K"
    assert types["blk.0.attn_norm.weight"] == "F32"
    (out / "types.gguf").unlink()


def test_the_gguf_check_detects_wrongly_permuted_weights(exported):
    """Without the permutation of the Llama family, or with another family's, the KL is far above rounding."""
    _, out, _, logits = exported
    permuted = gguf._permuted
    gguf._permuted = lambda name, tensor, config, family: permuted(
        name, tensor, config, "qwen2" if family == "llama" else "llama"
    )
    try:
        gguf.write(out, out / "wrong.gguf", "f16")
    finally:
        gguf._permuted = permuted
    assert gguf.difference(out / "wrong.gguf", logits, PROMPTS)["kl"] > gguf.MAX_KL["f16"]
    (out / "wrong.gguf").unlink()


def test_gguf_export_refuses_unsupported_models(tmp_path: Path, tiny_base: Path):
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=600, n_embd=32, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_base).save_pretrained(tmp_path)
    with pytest.raises(gguf.Unsupported, match="of type gpt2 cannot be written as GGUF; supported: llama, qwen2"):
        gguf.write(tmp_path, tmp_path / "model.gguf", "f16")
    scaled = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4}
    scaled |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    with pytest.raises(gguf.Unsupported, match="rotary embeddings of type llama3"):
        gguf._family(LlamaConfig(rope_parameters=scaled, **SHAPE))


def test_an_adapter_that_is_not_finite_stops_the_export(tmp_path: Path, tiny_base: Path):
    policy = adapt(tiny_base, tmp_path / "policy")
    tensors = load_file(policy / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, policy / "adapter_model.safetensors", metadata={"format": "pt"})
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=r"NaNs detected|not the trained policy"):
        merging.export(tiny_base, policy, True, "float32", tmp_path / "out", "1GB", PROMPTS)


def test_a_wrong_merge_is_detected(tmp_path: Path, tiny_base: Path, monkeypatch):
    policy, real = adapt(tiny_base, tmp_path / "policy"), adapters._merged
    monkeypatch.setattr(adapters, "_merged", lambda *given: real(*given) * 0.5)
    (tmp_path / "out").mkdir()
    with pytest.raises(merging.ModelChanged, match="the merged model is not the trained policy: its logits differ by"):
        merging.export(tiny_base, policy, True, "float32", tmp_path / "out", "1GB", PROMPTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rslora", "dora"), [(False, False), (True, False), (False, True)])
def test_the_tensor_by_tensor_merge_equals_pefts_merge(
    exported, tmp_path: Path, dtype: torch.dtype, rslora: bool, dora: bool
):
    base, *_ = exported
    policy = adapters.add_adapter(load_model(base, "float32"), 4, 8, "all-linear", rslora, dora, seed=0)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name or "magnitude" in name:
            parameter.data.add_(torch.rand_like(parameter))
    adapters.save_adapter(policy, dict(policy.named_parameters()), tmp_path / "policy", "base")
    whole = load_model(base, str(dtype).removeprefix("torch.")).float()  # rounded once more at the end
    expected = adapters.load_adapter(whole, tmp_path / "policy").merge_and_unload().to(dtype).state_dict()
    found = dict(adapters.merged_tensors(base, tmp_path / "policy", dtype))
    assert found
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert set(expected) - set(found) <= {"lm_head.weight"}  # tied


def test_an_adapter_with_whole_modules_is_merged_in_memory(tiny_base: Path, tmp_path: Path):
    """Adapters of other trainers may have `modules_to_save`."""
    model = load_model(tiny_base, "float32")
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"], task_type="CAUSAL_LM")
    policy = get_peft_model(model, config)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.rand_like(parameter))
    policy.save_pretrained(tmp_path / "policy")
    with pytest.raises(adapters.NotMergeableByTensor):
        list(adapters.merged_tensors(tiny_base, tmp_path / "policy", None))
    (tmp_path / "out").mkdir()
    adapters.write_merged(tiny_base, tmp_path / "policy", tmp_path / "out", torch.float32, "1GB")
    written = load_file(tmp_path / "out/model.safetensors")
    trained = policy.base_model.model.model.embed_tokens.modules_to_save["default"].weight
    assert torch.equal(written["model.embed_tokens.weight"], trained)


def test_one_model_at_a_time_is_in_memory(exported, tmp_path: Path, monkeypatch):
    base, *_ = exported
    policy, real, alive = adapt(base, tmp_path / "policy"), merging.load_model, weakref.WeakSet()
    before: list[int] = []

    def counted(*given):
        before.append(len(alive))
        model = real(*given)
        alive.add(model)
        return model

    monkeypatch.setattr(merging, "load_model", counted)
    (tmp_path / "out").mkdir()
    merging.export(base, policy, True, "float32", tmp_path / "out", "1GB", PROMPTS)
    assert before == [0, 0]


def test_full_fine_tuning_exports_without_a_merge(tmp_path: Path, tiny_base: Path):
    policy = load_model(tiny_base, "float32")
    policy.get_input_embeddings().weight.data.mul_(1.1)
    policy.save_pretrained(tmp_path / "policy")
    (tmp_path / "out").mkdir()
    checks, _ = merging.export(tiny_base, tmp_path / "policy", False, "float32", tmp_path / "out", "1GB", PROMPTS)
    assert checks["largest_logit_difference"] == 0.0
    assert torch.equal(
        load_model(tmp_path / "out", "float32").get_input_embeddings().weight, policy.get_input_embeddings().weight
    )


def test_the_modelfile_writes_what_the_chat_template_writes(tiny_base: Path, tmp_path: Path):
    tokenizer = load_tokenizer(tiny_base)
    text = modelfile("model-q8_0.gguf", chat_pieces(tiny_base))
    assert text.startswith("FROM ./model-q8_0.gguf\n")
    template = text.split('"""')[1]
    asked = template.replace("{{ .Prompt }}", "Hi").replace("{{ .Response }}", "")
    with_system = asked.replace("{{ if .System }}", "").split("{{ else }}")[0].replace("{{ .System }}", "Be kind")
    tail = asked.split("{{ end }}")[1]
    messages = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hi"}]
    assert with_system + tail == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    without = asked.split("{{ else }}")[1].replace("{{ end }}", "")
    assert without == tokenizer.apply_chat_template(messages[1:], tokenize=False, add_generation_prompt=True)
    assert 'PARAMETER stop "<|eos|>"' in text
    shutil.copytree(tiny_base, folder := tmp_path / "model")
    more = [tokenizer.eos_token_id, tokenizer.bos_token_id]  # such as <|eot_id|> and <|end_of_text|>
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": more}))
    text = modelfile("m.gguf", chat_pieces(folder))
    assert all(f'PARAMETER stop "{end}"' in text for end in (tokenizer.eos_token, tokenizer.bos_token))
    assert "could not be put" in modelfile("m.gguf", None)


def test_an_exported_model_renders_the_prompts_of_training(tiny_base: Path, tmp_path: Path):
    shutil.copytree(tiny_base, folder := tmp_path / "model")
    own = load_tokenizer(folder).chat_template
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    keep_template(folder, own, {})
    keep_template(folder, {"default": own, "tool_use": own}, {})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before  # nothing to change
    arguments = {"thinking": False, "effort": 'a "low"', "levels": [1, None, {"deep": 2.5}]}
    text = "{{ thinking }} {{ effort }} {{ levels }}: {% for m in messages %}{{ m.content }}{% endfor %}"
    keep_template(folder, text, arguments)
    told = [{"role": "user", "content": "Hi"}]
    answers = [[{"role": "assistant", "content": word}] for word in ("yes", "no")]
    tokenizer = load_tokenizer(folder)
    expected = tokenizer.apply_chat_template(told, tokenize=False, chat_template=text, **arguments)
    assert tokenizer.apply_chat_template(told, tokenize=False) == expected
    assert tokenizer.apply_chat_template(told, tokenize=False, thinking=True).startswith("True a")
    (prompt,) = tokenize(choose_template(load_tokenizer(tiny_base), text, arguments), [Preference(told, *answers)])
    assert tokenizer(expected, add_special_tokens=False)["input_ids"] == prompt.prompt_ids


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}", {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}])
def test_a_processor_renders_what_the_exports_tokenizer_renders(template: Any, tiny_base: Path, tmp_path: Path):
    """Servers load the processor where there is one, and its own template would come before that of training."""
    shutil.copytree(tiny_base, folder := tmp_path / "model")
    tokenizer = load_tokenizer(folder)
    template = template or tokenizer.chat_template
    if isinstance(template, dict):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "of the base's processor"}))
    (folder / "processor_config.json").write_text(json.dumps({"chat_template": "older", "image_seq_length": 4}))
    keep_template(folder, template, {})
    kept, _ = ProcessorMixin.get_processor_dict(folder)
    assert kept == {"chat_template": template, "image_seq_length": 4}
    assert load_tokenizer(folder).chat_template == template


def test_the_licence_comes_from_the_model_card_or_a_licence_file(tmp_path: Path):
    assert licence(tmp_path) is None
    (tmp_path / "LICENSE.txt").write_text("\n   Apache License\n   Version 2.0\n")
    assert licence(tmp_path) == "Apache License"
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Model\n")
    assert licence(tmp_path) == "apache-2.0"


def test_a_pushed_copy_passes_verification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from tasks.errors import UserError
    from tasks.system.files import hash_files, sha256, write_json
    from tasks.tracking.verify import problems, seal

    monkeypatch.setenv("DPO_HOME", str(tmp_path))
    model = tmp_path / "model"
    (model / "adapter").mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "adapter" / "adapter_config.json").write_text("{}")
    write_json(model / "manifest.json", {"files": hash_files(model)})
    seal(model)
    address = push(model, f"file://{tmp_path}/elsewhere/")
    assert address == f"file://{tmp_path}/elsewhere/{sha256(model / 'manifest.json')[:12]}"
    assert problems(Path(address.removeprefix("file://"))) == []
    with pytest.raises(UserError, match=r"could not be copied to nonsense://x: .*dpo push nonsense://x"):
        push(model, "nonsense://x")
