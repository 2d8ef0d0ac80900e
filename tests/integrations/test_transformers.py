"""Routing recorded from Hugging Face models is what their own routers return, and a trace that `foremoe plan` reads."""

import numpy as np
import pytest

transformers = pytest.importorskip("transformers", reason="transformers: make test-transformers")
torch = pytest.importorskip("torch")

import foremoe  # noqa: E402
from foremoe.base.errors import InputError  # noqa: E402
from foremoe.integrations.transformers import record  # noqa: E402

LAYERS, EXPERTS, TOPK = 4, 8, 2
SMALL = {
    "num_hidden_layers": LAYERS, "hidden_size": 48, "intermediate_size": 40, "moe_intermediate_size": 24, "vocab_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": TOPK, "max_position_embeddings": 128,
    "pad_token_id": 0, "eos_token_id": 95,
}  # fmt: skip
FAMILIES = {
    "Qwen3Moe": {"num_experts": EXPERTS, "head_dim": 16},
    "Mixtral": {"num_local_experts": EXPERTS, "head_dim": 16},
    "DeepseekV3": {
        "n_routed_experts": EXPERTS, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8,
        "q_lora_rank": 12, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20, "num_key_value_heads": 4,
    },
    "GptOss": {"num_local_experts": EXPERTS, "head_dim": 16},
    "Olmoe": {"num_experts": EXPERTS},
    "Qwen3Next": {"num_experts": EXPERTS, "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2},
}  # fmt: skip


def built(family):
    config = getattr(transformers, f"{family}Config")(**(SMALL | FAMILIES[family]))
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)  # the routers' own start is too small to tell experts apart
    return model


def own_routing(model, input_ids):
    """[S, L, K]: what the routers return for a sequence by itself, in sets."""
    chosen, handles = [], []
    for name, module in model.named_modules():
        if name.endswith((".gate", ".router")):
            handles.append(module.register_forward_hook(lambda _, __, output: chosen.append(output[-1])))
    with torch.no_grad():
        model(input_ids=input_ids[None])
    for handle in handles:
        handle.remove()
    return np.sort(np.stack([ids.numpy() for ids in chosen], axis=1), axis=2)


def same(trace, sequences, model):
    assert trace.seq_len_Q.tolist() == [len(ids) for ids in sequences]
    want = np.concatenate([own_routing(model, torch.as_tensor(ids)) for ids in sequences])
    got = np.sort(trace.topk_TLK, axis=2)
    known = np.ones(trace.T, bool) if trace.known_T is None else trace.known_T
    # A score that two experts share to the last bit may fall either way in a batch.
    assert known.all() and (got == want).all(axis=2).mean() > 0.99


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_recorded_is_what_the_routers_returned(family, tmp_path):
    model = built(family)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 90, n) for n in (7, 4, 7)]
    padded = torch.zeros(3, 7, dtype=torch.long)
    mask = torch.zeros(3, 7, dtype=torch.long)
    for b, prompt in enumerate(prompts):
        padded[b, 7 - len(prompt) :], mask[b, 7 - len(prompt) :] = torch.as_tensor(prompt), 1
    with record(model) as recorded:
        out = model.generate(input_ids=padded, attention_mask=mask, max_new_tokens=9, do_sample=False)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    sequences = []
    for b, prompt in enumerate(prompts):
        answer = out[b, 7:-1].tolist()  # nobody has read the last one
        answer = answer[: answer.index(95) + 1] if 95 in answer else answer
        sequences.append([*prompt.tolist(), *answer])
    trace = recorded.trace()
    same(trace, sequences, model)
    assert trace.num_experts == EXPERTS and trace.K == TOPK
    model.config.save_pretrained(tmp_path)
    found = foremoe.Model.from_hf(tmp_path)
    assert trace.moe_layer_L.tolist() == found.moe_layer_L.tolist()
    longer = recorded.trace(lengths=[len(ids) + 1 for ids in sequences])
    assert longer.T == trace.T + 3 and int((~longer.known_T).sum()) == 3
    trace.save(tmp_path / "rollout.npz")
    work = foremoe.Workload.from_trace(foremoe.RoutingTrace.load(tmp_path / "rollout.npz"), num_ranks=2, tokens_per_rank=16)
    cluster = foremoe.Cluster.preset("8xh100", num_ranks=2)
    plan, _ = foremoe.Planner().plan(foremoe.Problem.of(work, cluster, model=found, redundant=1))
    assert plan.L == trace.L


def test_scoring_and_several_batches():
    model = built("Qwen3Moe")
    rng = np.random.default_rng(1)
    sequences = [rng.integers(1, 90, n).tolist() for n in (5, 9, 6)]
    with record(model) as recorded, torch.no_grad():
        padded = torch.zeros(2, 9, dtype=torch.long)
        for b, ids in enumerate(sequences[:2]):
            padded[b, : len(ids)] = torch.as_tensor(ids)
        model(input_ids=padded, attention_mask=(padded > 0).long())
        model(torch.as_tensor(sequences[2])[None])
    same(recorded.trace(), sequences, model)
    with torch.no_grad():
        model(torch.as_tensor(sequences[2])[None])
    assert recorded.trace().Q == 3


def test_a_sequence_ends_with_its_first_end_of_sequence_token():
    model = built("Mixtral")
    prompt = torch.as_tensor([[3, 95, 4], [5, 6, 7]])
    with record(model) as recorded, torch.no_grad():
        cache = model(input_ids=prompt, use_cache=True).past_key_values
        for step in ([95, 8], [0, 9], [0, 95]):
            model(input_ids=torch.as_tensor(step)[:, None], cache=cache, use_cache=True)
    same(recorded.trace(), [[3, 95, 4, 95], [5, 6, 7, 8, 9, 95]], model)


def test_drafts_that_were_not_accepted_are_not_recorded():
    model = built("Olmoe")
    with record(model) as recorded, torch.no_grad():
        cache = model(input_ids=torch.as_tensor([[3, 4, 5]]), use_cache=True).past_key_values
        model(input_ids=torch.as_tensor([[6, 7, 8]]), cache=cache, use_cache=True)
        cache.crop(-2)
        model(input_ids=torch.as_tensor([[9]]), cache=cache, use_cache=True)
    same(recorded.trace(), [[3, 4, 5, 6, 9]], model)


def test_training_with_recomputed_activations_is_recorded_once():
    model = built("Qwen3Moe").train()
    model.activation_checkpointing_enable()
    ids = torch.as_tensor([[3, 4, 5, 6]])
    with record(model) as recorded:
        model(input_ids=ids, labels=ids).loss.backward()
    same(recorded.trace(), ids.tolist(), model.eval())


def test_what_cannot_be_recorded_is_refused():
    dense = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    )
    with pytest.raises(InputError, match="LlamaForCausalLM has 0 routers"), record(dense):
        pass
    model = built("Qwen3Moe")
    with record(model) as recorded:
        pass
    with pytest.raises(InputError, match="no forward pass was recorded"):
        recorded.trace()
    ids = torch.as_tensor([[3, 4, 5]])
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
        with record(model), pytest.raises(InputError, match="a cache that was filled before"):
            model(input_ids=ids, cache=cache)
        with record(model), pytest.raises(InputError, match="generate with num_beams=1"):
            model.generate(input_ids=ids, num_beams=2, max_new_tokens=4, do_sample=False)
        with record(model) as recorded, pytest.raises(InputError, match="2 sequences from token 3 on, after 3 tokens of 1"):
            cache = model(input_ids=ids, use_cache=True).past_key_values
            cache.batch_repeat_interleave(2)
            model(input_ids=torch.as_tensor([[3], [4]]), cache=cache)
        with record(model), pytest.raises(InputError, match="only be read from an attention_mask of two axes"):
            model(input_ids=ids, attention_mask=torch.ones(1, 1, 3, 3, dtype=torch.bool))
