"""Text models of checkpoints with a vision part, which transformers has no class for alone."""

import pytest
import torch

from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from tests.engine import greedy
from tests.engine.driving import collect, config, drive, prompts, requests
from tests.engine.local_cluster import LocalCluster
from tests.families.conftest import NEW

STEP = {
    "vocab_size": 211, "hidden_size": 40, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 24, "n_routed_experts": 7,
    "num_experts_per_tok": 3, "max_position_embeddings": 256, "share_expert_dim": 32, "initializer_range": 0.15,
    "sliding_window": 5, "pad_token_id": 0,
}  # fmt: skip
STEPS = {
    "lists": {
        **STEP, "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "num_sliding_attention_heads": 6, "rope_theta": [5e6, 1e4, 1e4, 5e6], "moe_router_scaling_factor": 2.5,
        "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5], "moe_layers_enum": "1,2,3",
        "swiglu_limits": [0, 0, 0.02, 0.02], "swiglu_limits_shared": [0, 0.02, 0, 0.05],
    },
    "one-group": {
        **STEP, "num_key_value_heads": 1, "num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"],
        "num_attention_heads": 5, "attention_bias": True, "layer_types": ["sliding_attention"] * 3,
    },
}  # fmt: skip
STEP_VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 14,
    "image_size": 28,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_step3p7(name, tmp_path):
    import transformers

    torch.manual_seed(5)
    made = transformers.Step3p7Config(text_config=STEPS[name], vision_config=STEP_VISION)
    model = transformers.Step3p7ForConditionalGeneration(made).eval()
    with torch.no_grad():
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            if key.endswith(("norm.weight", "bias")):
                tensor.add_(torch.randn_like(tensor) * 0.2)
    check(model, tmp_path)


def check(model, folder):
    """Tokens of two topologies, and log-probabilities."""
    model.set_attn_implementation("eager")
    model.save_pretrained(folder)
    params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    source = ModelSource(str(folder), "beside")
    asked = requests(prompts(), params)
    guessed = collect(drive(colocated(source, config()), asked))
    wanted = [greedy.continued(model, p, NEW, g) for p, g in zip(prompts(), guessed, strict=True)]
    cluster = LocalCluster.build(source, config(micro_batches=2, max_batch_tokens=12), attention=2, experts=3)
    assert collect(cluster.run(asked)) == wanted
    scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
    (event,) = drive(colocated(source, config()), [GenerationRequest(0, prompts()[2], scored)])
    with torch.no_grad():
        logits_TV = model(torch.tensor([prompts()[2]])).logits[0].log_softmax(-1)
    likely = logits_TV[:-1].gather(1, torch.tensor(prompts()[2][1:])[:, None])[:, 0]
    got = torch.tensor([entry.logprob for entry in event.prompt_logprobs[1:]])
    torch.testing.assert_close(got, likely, atol=1e-4, rtol=0)
