"""The lines of docs/recording.md run, with stand-ins for what engines and trainers give, and end with a trace that is read."""

import base64
import dataclasses
import importlib
import io
import json
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from page_blocks import ROOT, blocks_of

import foremoe
from foremoe.cli.main import main
from foremoe.integrations.settings import Settings

PAGE = (ROOT / "docs" / "recording.md").read_text()
MODEL = foremoe.Model.preset("qwen3-30b-a3b")
LENGTHS = (9, 7)
PYTHON = [text for kind, text in blocks_of("docs/recording.md") if kind == "python"]


def rows(q):
    """Routing of a sequence but for its last token, [tokens - 1, layers, top-k]."""
    rng = np.random.default_rng(q)
    shape = LENGTHS[q] - 1, len(MODEL.moe_layer_L), MODEL.num_experts
    return np.argsort(rng.random(shape), axis=2)[:, :, : MODEL.num_topk]


def padded(fill, left):
    batch = np.full((2, 12, len(MODEL.moe_layer_L), MODEL.num_topk), fill, np.int16)
    mask = np.zeros((2, 12), np.int64)
    for q, length in enumerate(LENGTHS):
        at = 12 - length if left else 0
        batch[q, at : at + length - 1] = rows(q)
        mask[q, at : at + length] = 1
    return batch, mask


def module(name, **names):
    found = ModuleType(name)
    found.__dict__.update(names)
    return found


def vllm_outputs():
    return [
        SimpleNamespace(
            prompt_token_ids=[1] * 3, outputs=[SimpleNamespace(token_ids=[2] * (n - 3), routed_experts=rows(q).astype(np.uint8))]
        )
        for q, n in enumerate(LENGTHS)
    ]


def vllm_answers():
    for q, n in enumerate(LENGTHS):
        blob = io.BytesIO()
        np.save(blob, rows(q).astype(np.uint8))
        choice = {"token_ids": [2] * (n - 3), "routed_experts": base64.b64encode(blob.getvalue()).decode()}
        yield json.dumps({"prompt_token_ids": [1] * 3, "choices": [choice]})


def sglang_outputs():
    for q, n in enumerate(LENGTHS):
        data = base64.b64encode(rows(q).astype(np.int32).tobytes()).decode()
        yield {"text": "..", "meta_info": {"routed_experts": data, "prompt_tokens": 3, "completion_tokens": n - 3}}


@pytest.fixture
def surroundings(monkeypatch, tmp_path):
    """Names that the page's lines find around them."""
    monkeypatch.chdir(tmp_path)
    Path("answers.jsonl").write_text("\n".join(vllm_answers()))

    def llm(model, *, enable_return_routed_experts):
        assert enable_return_routed_experts
        return SimpleNamespace(generate=lambda prompts, params: vllm_outputs())

    def engine(*, model_path, enable_return_routed_experts):
        assert enable_return_routed_experts
        return SimpleNamespace(generate=lambda prompts, params, return_routed_experts: list(sglang_outputs()))

    samples = [{"tokens": [1] * n, "rollout_routed_experts": rows(q).astype(np.int32)} for q, n in enumerate(LENGTHS)]
    loaded = {"rollout_0.pt": {"samples": samples}}
    monkeypatch.setitem(sys.modules, "vllm", module("vllm", LLM=llm, SamplingParams=dict))
    monkeypatch.setitem(sys.modules, "sglang", module("sglang", Engine=engine))
    monkeypatch.setitem(sys.modules, "torch", module("torch", load=lambda path, weights_only: loaded[path]))
    routing, mask = padded(0, left=True)
    train_data = {"routed_experts": padded(-1, left=False)[0], "input_lengths": np.array(LENGTHS)}
    batch = SimpleNamespace(batch={"routed_experts": routing, "attention_mask": mask})
    return {"prompts": ["a", "b"], "batch": batch, "train_data": train_data}


def check_trace():
    trace = foremoe.RoutingTrace.load("rollout.npz")
    assert trace.model == "qwen3-30b-a3b" and trace.seq_len_Q.tolist() == list(LENGTHS)
    known_T = np.concatenate([np.arange(n) < n - 1 for n in LENGTHS])
    assert trace.known_T.tolist() == known_T.tolist()
    assert (trace.topk_TLK[known_T] == np.concatenate([rows(0), rows(1)])).all()


@pytest.mark.parametrize("at", [at for at, text in enumerate(PYTHON) if "integrations.transformers" not in text])
def test_the_lines_of_the_page_save_a_trace(at, surroundings):
    exec(PYTHON[at], surroundings)
    check_trace()


def test_the_commands_of_the_page_save_a_trace(tmp_path, monkeypatch):
    """Those of foremoe itself, on the answers of the server; the first one is of every section's file."""
    texts = [text for kind, text in blocks_of("docs/recording.md") if kind == "bash" and text.startswith("foremoe")]
    assert {text.split()[1] for text in texts} == {"import", "plan"} and len(texts) == 3
    monkeypatch.chdir(tmp_path)
    Path("answers.jsonl").write_text("\n".join(vllm_answers()))
    for text in sorted(texts, key=lambda text: "import" not in text):
        if ".pt" in text:
            torch = pytest.importorskip("torch")
            counts = torch.randint(1, 9, (2, len(MODEL.moe_layer_L), MODEL.num_experts))
            torch.save({"rank": 0, "logical_count": counts}, "expert_distribution_recorder_1.5.pt")
        result = CliRunner().invoke(main, shlex.split(text)[1:])
        assert result.exit_code == 0, result.output
        check_trace()
        assert "import" in text or foremoe.Plan.load("plan.safetensors").G == 16


def test_a_model_of_transformers_is_recorded_by_the_lines_of_the_page(tmp_path, monkeypatch):
    """With a stand-in of one MoE layer; tests/integrations/test_transformers.py has the real models."""
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)

    class Router(torch.nn.Module):
        num_experts = 4

        def forward(self, x):
            return x, x[:, :2], x.topk(2)[1]

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.experts = Router(), torch.nn.Identity()

        def forward(self, x):
            return self.router(x)

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.config = torch.nn.ModuleList([Block()]), SimpleNamespace(model_type="own")

        def forward(self, input_ids, attention_mask):
            return self.layers[0](torch.nn.functional.one_hot(input_ids.reshape(-1), 4).float())

        def generate(self, max_new_tokens, **inputs):
            return self(**inputs)

    ids = torch.tensor([[0, 2, 3], [1, 3, 0]])
    text = next(text for text in PYTHON if "integrations.transformers" in text)
    exec(text, {"model": Own(), "inputs": {"input_ids": ids, "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}})
    trace = foremoe.RoutingTrace.load("rollout.npz")
    assert trace.seq_len_Q.tolist() == [2, 3] and trace.topk_TLK[:, 0, 0].tolist() == [2, 3, 1, 3, 0]


def test_every_engine_has_lines():
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
    assert all("```" in sections[name] for name in ("veRL", "vLLM", "SGLang", "slime", "NeMo-RL", "Transformers"))
    assert len(PYTHON) == 6


def test_options_of_foremoe_in_the_command_of_verl_exist():
    (text,) = [text for kind, text in blocks_of("docs/recording.md") if "verl.trainer" in text]
    words = shlex.split(text.replace("\\\n", " "))
    keys = [word.partition("=")[0] for word in words]
    assert [key.rpartition(".")[2] for key in keys if ".foremoe." in key] == ["redundant", "dump"]
    assert "dump" in {field.name for field in dataclasses.fields(Settings)}
    (target,) = [word.partition("=")[2] for word in words if "_target_" in word]
    package, _, name = target.rpartition(".")
    assert name in importlib.import_module(package).__all__
