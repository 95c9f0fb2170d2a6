"""The policy as it is made ready for training."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from tests.support.scoring import make_scorer
from tests.support.settings import make_settings
from training.models.dtypes import DTYPES
from training.objectives.metrics import row_loss
from training.objectives.objective import Objective
from training.pairs.packing import build_row
from training.pairs.pair import Pair
from training.trainer.policy import build_policy

CPU = torch.device("cpu")
LAYERS = 3
LORA = {"rank": 2, "alpha": 4.0, "targets": "all-linear", "use_rslora": False, "use_dora": False}


@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_activation_checkpointing_computes_every_layer_again_in_the_backward_pass(tmp_path, adapter, recomputes):
    torch.manual_seed(0)
    shape = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, **shape)).save_pretrained(tmp_path)
    settings = make_settings(
        model=str(tmp_path), folder=str(tmp_path), adapter=adapter, activation_checkpointing=recomputes
    )
    pair = Pair(
        "a", [1, 2, 3], [4, 5, 6], [7, 8], [1, 1, 1], [1, 1], ref_chosen_logps=[-1.0] * 3, ref_rejected_logps=[-1.0] * 2
    )
    policy = make_scorer(build_policy(settings, CPU), [pair], CPU)
    assert policy.path == "fused"
    computed = []
    for module in policy.modules():
        if isinstance(module, LlamaMLP):
            # Before it and not after: torch stops computing again as soon as it has all that it needs.
            module.register_forward_pre_hook(lambda *_: computed.append(1))
    loss, *_ = row_loss(policy, Objective({"sigmoid": 1.0}, {"beta": 0.1}), build_row([pair], [0]))
    assert len(computed) == LAYERS
    loss.sum().backward()
    assert len(computed) == (2 * LAYERS if recomputes else LAYERS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pissa_starts_as_the_reference_and_trains_the_principal_part(tmp_path, dtype):
    torch.manual_seed(0)
    shape = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, **shape)).to(DTYPES[dtype])
    model.save_pretrained(tmp_path)
    settings = make_settings(model=str(tmp_path), folder=str(tmp_path), adapter={**LORA, "init": "pissa"}, dtype=dtype)
    policy, ids = build_policy(settings, CPU), torch.tensor([[1, 2, 3, 4]])
    difference = (policy(ids).logits - model(ids).logits).abs().max().item()
    assert difference < (1e-6 if dtype == "float32" else 2e-2)
    layer = policy.get_base_model().model.layers[0].self_attn.q_proj
    principal = layer.get_delta_weight("default").float()
    weight = model.model.layers[0].self_attn.q_proj.weight.float()
    values = torch.linalg.svdvals(weight)
    rest = torch.linalg.matrix_norm(weight - principal, 2).item()
    assert rest == pytest.approx(values[LORA["rank"]].item(), rel=0.02)


def test_a_module_that_does_not_exist_is_named(tmp_path):
    torch.manual_seed(0)
    shape = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, **shape)).save_pretrained(tmp_path)
    adapter = {**LORA, "modules_to_save": ["embeddings"]}
    with pytest.raises(ValueError, match=r"the model has no module embeddings; it has .*embed_tokens.*lm_head"):
        build_policy(make_settings(model=str(tmp_path), folder=str(tmp_path), adapter=adapter), CPU)


def test_an_adapters_dropout_acts_in_training_alone_and_not_at_the_start(tmp_path):
    """B is zero at the start, so what A sees does not matter: the policy in training mode equals the reference."""
    torch.manual_seed(0)
    shape = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, **shape)).save_pretrained(tmp_path)
    settings = make_settings(model=str(tmp_path), folder=str(tmp_path), adapter={**LORA, "dropout": 0.5})
    policy, ids = build_policy(settings, CPU), torch.tensor([[1, 2, 3, 4]])
    reference = LlamaForCausalLM.from_pretrained(tmp_path)(ids).logits
    assert policy.training
    assert torch.equal(policy(ids).logits, reference)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    torch.manual_seed(7)
    first, second = policy(ids).logits, policy(ids).logits
    assert not torch.equal(first, second)
    torch.manual_seed(7)  # what training sets from seed, step and rank before each step
    assert torch.equal(policy(ids).logits, first)
    policy.eval()
    assert torch.equal(policy(ids).logits, policy(ids).logits)
