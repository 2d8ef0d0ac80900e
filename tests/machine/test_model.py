"""Model: presets against published sizes, TOML round trips, hand-computed FLOPs, refusals."""

import dataclasses
import tomllib
from importlib.resources import files

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foremoe
from foremoe.base.errors import InputError
from foremoe.machine.model import Model

NAMES = (
    "qwen3-30b-a3b", "qwen3-235b-a22b", "glm-4.5-air", "deepseek-v3", "gpt-oss-20b", "gpt-oss-120b", "deepseek-v2-lite",
    "mixtral-8x7b", "kimi-k2", "glm-4.5", "qwen3-next-80b-a3b",
)  # fmt: skip
SMALL = {
    "name": "small", "num_layers": 3, "first_moe_layer": 1, "num_experts": 8, "num_topk": 2, "hidden_size": 4, "ffn_size": 6,
    "attention_params": 50, "num_heads": 2, "qk_head_dim": 3, "v_head_dim": 5, "source": "by hand",
}  # fmt: skip
WHOLE = [f.name for f in dataclasses.fields(Model) if f.type in (int, "int")]
REAL = [f.name for f in dataclasses.fields(Model) if f.type in (float, "float")]
TEXT = [f.name for f in dataclasses.fields(Model) if f.type in (str, "str")]


@st.composite
def models(draw):
    num_experts = draw(st.integers(1, 32767))
    count = st.integers(1, 2**53)
    size = st.floats(0, 16, exclude_min=True)
    label = st.text(st.characters(exclude_categories="CZ", include_characters=" "), min_size=1).filter(str.strip)
    return Model(
        name=draw(label),
        num_layers=draw(st.integers(1, 32767)),
        first_moe_layer=draw(st.integers(0, 32767)),
        num_experts=num_experts,
        num_topk=draw(st.integers(1, num_experts)),
        hidden_size=draw(count),
        ffn_size=draw(count),
        shared_ffn_size=draw(st.integers(0, 2**53)),
        dense_ffn_size=draw(st.integers(0, 2**53)),
        num_matrices=draw(st.integers(1, 1024)),
        bytes_per_weight=draw(size),
        bytes_per_gradient=draw(size),
        bytes_per_activation=draw(size),
        attention_params=draw(count),
        num_heads=draw(count),
        qk_head_dim=draw(count),
        v_head_dim=draw(count),
        num_expert_groups=draw(st.sampled_from([d for d in range(1, 65) if num_experts % d == 0])),
        source=draw(label),
    )


def refusal(call, *args, **kwargs):
    with pytest.raises(InputError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".") and len(message) < 450
    return message


# --- presets


def test_preset_names():
    assert Model.preset_names() == NAMES
    for name in NAMES:
        assert Model.preset(name).name == name
        assert Model.preset(name) == Model.preset(f" {name.upper()}")


@pytest.mark.parametrize(
    ("hub", "name"),
    [
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"), ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("Qwen/Qwen3-Next-80B-A3B-Thinking", "qwen3-next-80b-a3b"), ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek-v2-lite"), ("moonshotai/Kimi-K2-Instruct-0905", "kimi-k2"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"), ("zai-org/GLM-4.5-Air-FP8", "glm-4.5-air"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"), ("zai-org/GLM-4.5V", None), ("deepseek-ai/DeepSeek-V3-Lite", None), ("", None),
    ],
)  # fmt: skip
def test_names_of_a_hub(hub, name):
    assert Model.preset_of(hub) == name


def test_a_trace_under_its_name_on_a_hub_is_planned():
    made = foremoe.synthetic_trace("gpt-oss-20b", num_sequences=4, seed=0, regime="mid")
    routed = np.split(made.topk_TLK, made.cuts[1:-1])
    trace, _ = foremoe.from_routed_experts(routed, model="openai/gpt-oss-20b")
    work = foremoe.Workload.from_trace(trace, num_ranks=2, tokens_per_rank=1024)
    assert foremoe.Problem.of(work, foremoe.Cluster.preset("8xh100", 2)).model.name == "gpt-oss-20b"


@pytest.mark.parametrize(
    ("name", "billions"),
    # Published totals; what is missing here is embeddings, shared experts, dense layers, router and norms.
    [
        ("qwen3-30b-a3b", 30.5),
        ("qwen3-235b-a22b", 235),
        ("glm-4.5-air", 106),
        ("deepseek-v3", 671),
        ("gpt-oss-20b", 20.9),
        ("gpt-oss-120b", 116.8),
        ("deepseek-v2-lite", 15.7),
        ("mixtral-8x7b", 46.7),
    ],
)
def test_experts_and_attention_are_nearly_the_whole_published_model(name, billions):
    model = Model.preset(name)
    layers = model.num_layers + model.first_moe_layer
    params = model.num_layers * model.num_experts * model.expert_params + layers * model.attention_params
    assert 0.93 * billions < params / 1e9 < billions


@pytest.mark.parametrize(
    ("name", "heads", "kv_heads", "head_dim"),
    [
        ("qwen3-30b-a3b", 32, 4, 128),
        ("qwen3-235b-a22b", 64, 4, 128),
        ("glm-4.5-air", 96, 8, 128),
        ("gpt-oss-20b", 64, 8, 64),
        ("gpt-oss-120b", 64, 8, 64),
        ("mixtral-8x7b", 32, 8, 128),
    ],
)
def test_grouped_query_attention_params(name, heads, kv_heads, head_dim):
    model = Model.preset(name)
    assert model.attention_params == model.hidden_size * head_dim * (2 * heads + 2 * kv_heads)
    assert (model.num_heads, model.qk_head_dim, model.v_head_dim) == (heads, head_dim, head_dim)


@pytest.mark.parametrize(("name", "heads", "q_lora"), [("deepseek-v3", 128, 1536), ("deepseek-v2-lite", 16, None)])
def test_latent_attention_params(name, heads, q_lora):
    model, kv_lora, nope, rope, v = Model.preset(name), 512, 128, 64, 128
    hidden = model.hidden_size
    query = hidden * heads * (nope + rope) if q_lora is None else q_lora * (hidden + heads * (nope + rope))
    key_value = hidden * (kv_lora + rope) + kv_lora * heads * (nope + v)
    assert model.attention_params == query + key_value + heads * v * hidden
    assert (model.num_heads, model.qk_head_dim, model.v_head_dim) == (heads, nope + rope, v)


def test_moe_layers_and_groups():
    assert Model.preset("deepseek-v3").moe_layer_L.tolist() == list(range(3, 61))
    assert Model.preset("glm-4.5-air").moe_layer_L.tolist() == list(range(1, 46))
    assert Model.preset("deepseek-v2-lite").moe_layer_L.tolist() == list(range(1, 27))
    assert Model.preset("mixtral-8x7b").moe_layer_L.dtype == np.int32
    assert {n for n in NAMES if Model.preset(n).num_expert_groups != 1} == {"deepseek-v3"}
    assert Model.preset("deepseek-v3").num_expert_groups == 8


def test_matching_finds_every_preset_by_its_shape():
    for name in NAMES:
        model = Model.preset(name)
        assert Model.matching(model.num_layers, model.num_experts, model.num_topk) == [model]
    assert Model.matching(24, 32, 5) == []


def test_every_preset_states_its_source_and_units():
    text = files("foremoe.machine").joinpath("presets", "models.toml").read_text()
    tables = tomllib.loads(text)
    assert all("config.json" in table["source"] for table in tables.values())
    keys = {key for table in tables.values() for key in table} - {"source"}
    assert all(f"# {key} " in text for key in keys)


def test_unknown_preset_lists_the_names():
    assert "did you mean 'qwen3-30b-a3b'? choose" in refusal(Model.preset, "qwen3-30b")
    message = refusal(Model.preset, "qwen4")
    assert "qwen4" in message and all(name in message for name in NAMES)
    refusal(Model.preset, None)


# --- arithmetic


def test_sizes_by_hand():
    model = Model(**SMALL)
    assert model.expert_params == 3 * 4 * 6
    assert (model.expert_bytes, model.gradient_bytes, model.token_bytes) == (144, 288, 8)
    assert model.flops_per_pair == 144
    assert model.moe_layer_L.tolist() == [1, 2, 3]
    # 4-bit weights: half a byte each, whole bytes in all.
    odd = dataclasses.replace(model, bytes_per_weight=0.5, hidden_size=1, ffn_size=1)
    assert odd.expert_bytes == 2 and isinstance(odd.expert_bytes, int)


def test_attention_flops_by_hand():
    # Sequences of 2 and 3 tokens: 5 tokens, squares 4 + 9. Projections 2*50*5; scores and values 2 heads * (3+5) * 13.
    model = Model(**SMALL)
    assert model.attention_flops(5, 13) == 500 + 208
    flops = model.attention_flops(np.array([[5], [0]], np.int32), np.array([[13.0], [0.0]]))
    assert flops.dtype == np.float64 and flops.tolist() == [[708.0], [0.0]]


def test_attention_flops_equal_a_count_over_positions():
    model, lengths = Model(**SMALL), [1, 7, 200]
    tokens, squares = sum(lengths), sum(n * n for n in lengths)
    # Token i of a sequence meets i of its tokens, itself counted in half: the diagonal's share of a halved square.
    pairs = sum(i + 0.5 for n in lengths for i in range(n))
    exact = 2 * 50 * tokens + 2 * 2 * (3 + 5) * pairs
    assert model.attention_flops(tokens, squares) == pytest.approx(exact)


def test_attention_flops_do_not_overflow_int32():
    model = Model.preset("qwen3-235b-a22b")
    flops = model.attention_flops(np.array([8192], np.int32), np.array([2**26], np.int32))
    assert flops[0] == 2 * 71_303_168 * 8192 + 64 * 256 * 2**26


@pytest.mark.parametrize(
    ("tokens", "squares"),
    [(-1, 4), (1, float("nan")), ("many", 4), ([[1], [1, 2]], 4), ([1, 2], [1, 2, 3])],
)
def test_attention_flops_refuses(tokens, squares):
    refusal(Model(**SMALL).attention_flops, tokens, squares)


# --- round trips


@settings(deadline=None)
@given(model=models())
def test_toml_round_trip_is_identity(tmp_path_factory, model):
    path = tmp_path_factory.getbasetemp() / "model.toml"
    model.to_toml(path)
    assert Model.from_toml(path) == model
    assert Model.from_dict(model.to_dict()) == model
    first = path.read_bytes()
    Model.from_toml(path).to_toml(path)
    assert path.read_bytes() == first


def test_defaults_may_be_left_out_and_numpy_numbers_become_plain():
    model = Model.from_dict(SMALL)
    assert (model.num_matrices, model.bytes_per_weight, model.bytes_per_gradient) == (3, 2.0, 4.0)
    same = Model(**{**SMALL, "num_layers": np.int32(3), "bytes_per_weight": np.float32(2)})
    assert same == model and hash(same) == hash(model)
    assert type(same.num_layers) is int and type(same.bytes_per_weight) is float
    assert type(Model(**SMALL, bytes_per_gradient=4).bytes_per_gradient) is float


# --- refusals


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", [-1, 2**53 + 1, pytest.param(10**5000, id="huge"), 2.0, "2", None, True, [2]])
def test_whole_number_fields_refuse(name, value):
    assert name in refusal(Model, **{**SMALL, name: value})


@pytest.mark.parametrize(
    "name", [name for name in WHOLE if name not in ("first_moe_layer", "vocab_size", "shared_ffn_size", "dense_ffn_size")]
)
def test_counts_refuse_zero(name):
    assert name in refusal(Model, **{**SMALL, name: 0})


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), 17.0, pytest.param(10**400, id="huge"), "2", None, False])
def test_real_number_fields_refuse(name, value):
    assert name in refusal(Model, **{**SMALL, name: value})


@pytest.mark.parametrize("name", TEXT)
@pytest.mark.parametrize("value", ["", "  ", "two\nlines", "\ud800", 7, None, "x" * 1000 + "\0"])
def test_text_fields_refuse(name, value):
    assert name in refusal(Model, **{**SMALL, name: value})


def test_relations_refuse():
    assert "9" in refusal(Model, **{**SMALL, "num_topk": 9})
    assert "num_expert_groups 3" in refusal(Model, **{**SMALL, "num_expert_groups": 3})


SIX = {"name": "mine", "num_layers": 24, "num_experts": 64, "num_topk": 6, "hidden_size": 2048, "ffn_size": 1024}


def test_six_keys_of_a_file_suffice(tmp_path):
    path = tmp_path / "model.toml"
    path.write_text("".join(f"{k} = {v!r}\n" for k, v in SIX.items()))
    assert Model.from_toml(path) == Model.of(**SIX)


@pytest.mark.parametrize("missing", ["num_layers", "num_experts", "num_topk", "hidden_size", "ffn_size"])
def test_missing_key(tmp_path, missing):
    path = tmp_path / "model.toml"
    full = Model(**SMALL).to_dict()
    path.write_text("".join(f"{k} = {v!r}\n" for k, v in full.items() if k != missing))
    message = refusal(Model.from_toml, path)
    assert "lacks" in message and missing in message and "model.toml" in message


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"name = ", "not valid TOML"),
        (b"name = 'a'\nname = 'b'", "not valid TOML"),
        (b"\xff\xfe", "UTF-8"),
        (b"x = " + b"[" * 5000, "not valid TOML"),
        (b"layers = 3", "'layers'"),
        (b"", "lacks"),
    ],
)
def test_broken_file(tmp_path, content, word):
    path = tmp_path / "model.toml"
    path.write_bytes(content)
    message = refusal(Model.from_toml, path)
    assert word in message and "model.toml" in message


def test_bad_field_in_a_file_names_file_and_field(tmp_path):
    path = tmp_path / "model.toml"
    Model(**SMALL).to_toml(path)
    path.write_text(path.read_text().replace("num_layers = 3", "num_layers = '3'"))
    message = refusal(Model.from_toml, path)
    assert "model.toml" in message and "num_layers" in message


def test_unreadable_and_unwritable_paths(tmp_path):
    assert "no file" in refusal(Model.from_toml, tmp_path / "none.toml")
    refusal(Model.from_toml, tmp_path)
    refusal(Model.from_toml, "a\0b")
    refusal(Model(**SMALL).to_toml, tmp_path / "none" / "model.toml")
    refusal(Model(**SMALL).to_toml, tmp_path)


def test_five_sizes_make_a_model_and_more_can_be_said():
    sizes = {"num_layers": 24, "num_experts": 64, "num_topk": 6, "hidden_size": 2048, "ffn_size": 1024}
    model = Model.of(**sizes)
    assert model.expert_params == 3 * 2048 * 1024 and model.attention_params == 4 * 2048**2
    assert Model.of(**sizes, name="mine", num_heads=8).name == "mine" and Model.of(**(sizes | {"hidden_size": 64})).num_heads == 1
    for wrong in ("2048", 2.5, 0, -1, None, 10**30):
        with pytest.raises(InputError, match="hidden_size must be"):
            Model.of(**(sizes | {"hidden_size": wrong}))
