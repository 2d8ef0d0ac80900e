"""Answers of rollout engines as their own protocol classes write them, read by foremoe: `make engine-answers`.

    python tests/routing/engine_answers.py                       # downloads the wheels of VERSIONS, without dependencies
    python tests/routing/engine_answers.py --write *.whl         # makes engine_answers.json, the test data of every run

Nothing of a wheel is installed or imported: a class runs from its own source, with Any for what other modules define. What the
classes are given is what the engines' servers give them, `serving*.py` beside each `protocol.py`. One line for each endpoint of
each version says how many answers were read as what went in, and how many refused with the cure.
"""

import argparse
import ast
import base64
import builtins
import io
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import typing
import zipfile

import numpy as np

# Letters: T tokens, L MoE layers, K top-k.

NUM_EXPERTS, MOE_LAYERS, NUM_TOPK = 8, (1, 2), 2
MODEL = {"num_experts": NUM_EXPERTS, "num_topk": NUM_TOPK, "moe_layer_L": MOE_LAYERS}
DATA = pathlib.Path(__file__).with_suffix(".json")
VERSIONS = ("vllm==0.33.0", "sglang==0.5.9", "sglang==0.5.23")


def routing_of(sequence, num_tokens, num_experts=NUM_EXPERTS):
    """int64 [T, L, K]: routing of which no row repeats its neighbours', with distinct experts."""
    t, layer, k = np.ogrid[:num_tokens, : len(MOE_LAYERS), :NUM_TOPK]
    return (3 * t + t // 5 + 5 * layer + 2 * sequence + k + 1) % num_experts


def ids(first, num):
    return list(range(100 * first, 100 * first + num))


class Engine:
    """The protocol classes of a wheel."""

    def __init__(self, path):
        name, self.version = re.match(r"(\w+)-([\d.]+)-", path.rpartition("/")[2]).groups()
        self.name = name
        with zipfile.ZipFile(path) as wheel:
            files = [f for f in wheel.namelist() if f.endswith("protocol.py")]
            self.trees = {f: ast.parse(wheel.read(f)) for f in sorted(files, key=lambda f: "/openai/" not in f)}

    def make(self, class_name, **values):
        """An answer of this class as JSON, without fields that are null and that no reader asks for."""
        scope = self._scope(class_name)
        return _shortened(json.loads(scope[class_name](**values, created=0).model_dump_json()))

    def _scope(self, class_name):
        import pydantic  # not needed to read the answers

        scope = {**vars(typing), **{name: getattr(pydantic, name) for name in pydantic.__all__ if name != "dataclasses"}}
        scope |= {"time": time, "OpenAIBaseModel": pydantic.BaseModel}  # vLLM's own logs fields that it does not know
        done = set()

        def define(name):
            if name in done or name in scope:
                return
            done.add(name)
            node = next((n for tree in self.trees.values() for n in tree.body if getattr(n, "name", None) == name), None)
            if not isinstance(node, ast.ClassDef):
                scope[name] = typing.Any
                return
            for other in ast.walk(node):
                if isinstance(other, ast.FunctionDef):
                    other.returns = None  # may name the class itself
                elif isinstance(other, ast.Name) and other.id != name and not hasattr(builtins, other.id):
                    define(other.id)
            exec(compile(ast.Module([node], []), name, "exec"), scope)

        define(class_name)
        return scope


def _shortened(value):
    if isinstance(value, list):
        return [_shortened(x) for x in value]
    if not isinstance(value, dict):
        return value
    return {key: _shortened(x) for key, x in value.items() if x is not None or "token_ids" in key or "routed" in key}


def usage(*pairs):
    prompt, completion = (sum(some) for some in zip(*pairs, strict=True))
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def vllm(engine):
    """(what it is, answer, sequences or refusal): a sequence is (number, tokens, first known token, end of the known)."""

    def npy(rows):
        buffer = io.BytesIO()
        np.save(buffer, rows)
        return base64.b64encode(buffer.getvalue()).decode()

    def rows(q, T, start=0, num_experts=NUM_EXPERTS):
        wide = routing_of(q, T, num_experts)
        return npy(wide[start : T - 1].astype(np.uint8 if num_experts <= 256 else np.uint16))

    def choice(kind, q, P, T, start=0, token_ids=True, **more):
        sent = {"routed_experts": rows(q, T, start), "finish_reason": "stop", "index": 0, **more}
        if token_ids:
            sent["token_ids"] = ids(2, T - P)
        if kind == "CompletionResponse":
            return {**sent, "text": "..", **({"prompt_token_ids": ids(1, P)} if token_ids else {})}
        return sent if kind.startswith("Generate") else {**sent, "message": {"role": "assistant", "content": ".."}}

    def answer(kind, choices, *pairs, **more):
        name = {"request_id": "1"} if kind.startswith("Generate") else {"id": "1"}
        return engine.make(kind, choices=choices, usage=usage(*pairs), model="m", **name, **more)

    chat, text, tokens = "ChatCompletionResponse", "CompletionResponse", "GenerateTokensResponse"
    whole, both = [[0, 9, 0, 8]], [[0, 9, 0, 8], [1, 7, 0, 6]]
    for kind, prompt in ((chat, {"prompt_token_ids": ids(1, 4)}), (text, {}), (tokens, {"prompt_token_ids": ids(1, 4)})):
        yield f"{kind} with token ids", answer(kind, [choice(kind, 0, 4, 9)], (4, 5), **prompt), whole
        yield f"{kind} without", answer(kind, [choice(kind, 0, 4, 9, token_ids=False)], (4, 5)), whole
        two = [choice(kind, 0, 4, 9), choice(kind, 1, 4, 7, index=1)]
        yield f"{kind} of two choices", answer(kind, two, (4, 5), (0, 3), **prompt), both
        two = [choice(kind, 0, 4, 9, token_ids=False), choice(kind, 1, 4, 7, index=1, token_ids=False)]
        refused = "neither token ids nor counts of tokens"
        yield f"{kind} of two choices without ids", answer(kind, two, (4, 5), (0, 3)), refused
        for start in (2, 3, 4) if kind == text else (3,):
            cut = answer(kind, [choice(kind, 0, 4, 9, start)], (4, 5), **prompt)
            yield f"{kind} from token {start} on, unsaid", cut, f"give start={start}"
            yield f"{kind} from token {start} on", {**cut, "routed_experts_prompt_start": start}, [[0, 9, start, 8]]
        lost = answer(kind, [choice(kind, 0, 4, 9, routed_experts=None, finish_reason="abort")], (4, 5), **prompt)
        yield f"{kind} aborted", lost, [[0, 9, 0, 0]]
        cut = answer(kind, [choice(kind, 0, 4, 9, routed_experts=rows(0, 9)[:-16])], (4, 5), **prompt)
        yield f"{kind} truncated", cut, "but 22 follow it; send the whole file"
    two = [choice(text, 0, 4, 9), choice(text, 1, 3, 7, index=1)]
    yield f"{text} of two prompts", answer(text, two, (4, 5), (3, 4)), both


def sglang(engine):
    """As `vllm`; rows are int32 of all layers."""

    def rows(q, T, start=0):
        all_TLK = np.zeros((T, MOE_LAYERS[-1] + 1, NUM_TOPK), np.int32)
        all_TLK[:, list(MOE_LAYERS)] = routing_of(q, T)
        return base64.b64encode(all_TLK[start : T - 1].tobytes()).decode()

    def choice(kind, index=0, **more):
        body = {"text": ".."} if kind.startswith("Completion") else {"message": {"role": "assistant", "content": ".."}}
        return {"index": index, "finish_reason": "stop", **body, **more}

    def answer(kind, choices, *pairs, sglext=None, **more):
        return engine.make(kind, id="1", model="m", choices=choices, usage=usage(*pairs), sglext=sglext, **more)

    def meta(q, P, T, **more):
        info = {"id": "1", "finish_reason": {"type": "stop"}, "prompt_tokens": P, "completion_tokens": T - P}
        return {**info, "routed_experts": rows(q, T), **more}

    whole, chat = [[0, 9, 0, 8]], "ChatCompletionResponse"
    yield "generate", {"text": "..", "output_ids": ids(2, 5), "meta_info": meta(0, 4, 9)}, whole
    aborted = {"text": "", "output_ids": [], "meta_info": meta(0, 1, 1, finish_reason={"type": "abort"}, routed_experts="")}
    yield "generate, aborted with no row", aborted, [[0, 1, 0, 0]]
    aborted = {"text": "", "output_ids": [], "meta_info": meta(0, 4, 4, finish_reason={"type": "abort"}, routed_experts=None)}
    yield "generate, aborted without routing", aborted, [[0, 4, 0, 0]]
    for kind in (chat, "CompletionResponse"):
        yield f"{kind}", answer(kind, [choice(kind)], (4, 5), sglext={"routed_experts": rows(0, 9)}), whole
        two = answer(kind, [choice(kind), choice(kind, 1)], (4, 5), (0, 3), sglext={"routed_experts": rows(0, 9)})
        yield f"{kind} of two choices", two, "neither token ids nor counts of tokens"
        cut = answer(kind, [choice(kind)], (4, 5), sglext={"routed_experts": rows(0, 9, 3)})
        yield f"{kind} from token 3 on, unsaid", cut, "do not make 9 or 8 rows .* start"
        yield f"{kind} from token 3 on", {**cut, "routed_experts_start_len": 3}, [[0, 9, 3, 8]]
        cut = answer(kind, [choice(kind)], (4, 5), sglext={"routed_experts": rows(0, 9)[:-16]})
        yield f"{kind} truncated", cut, "the payload is truncated"
        yield f"{kind} without routing", answer(kind, [choice(kind)], (4, 5)), "needs routed_experts"
    if engine.version == "0.5.9":
        return
    kind = "CompletionResponse"
    told = [choice(kind, 0, prompt_token_ids=ids(1, 4), token_ids=ids(2, 5))]
    told += [choice(kind, 1, prompt_token_ids=ids(1, 4), token_ids=ids(2, 3))]
    known = [[0, 9, 0, 8], [1, 7, 0, 0]]  # of a second choice no routing is sent
    yield f"{kind} with token ids", answer(kind, told, (4, 5), (0, 3), sglext={"routed_experts": rows(0, 9)}), known
    told = [choice(chat, 0, prompt_token_ids=ids(1, 4), response_token_ids=ids(2, 5))]
    told += [choice(chat, 1, prompt_token_ids=ids(1, 4), response_token_ids=ids(2, 3))]
    yield f"{chat} with token ids", answer(chat, told, (4, 5), (0, 3), sglext={"routed_experts": rows(0, 9)}), known
    ext = {"routed_experts": rows(0, 9), "input_ids": ids(1, 4), "output_ids": [ids(2, 5), ids(2, 3)]}
    yield f"{chat} with ids in sglext", answer(chat, [choice(chat), choice(chat, 1)], (4, 5), (0, 3), sglext=ext), known
    infos = [choice(chat, 0, meta_info=meta(0, 4, 9)), choice(chat, 1, meta_info=meta(1, 4, 7))]
    yield f"{chat} with meta_info", answer(chat, infos, (4, 5), (0, 3)), [[0, 9, 0, 8], [1, 7, 0, 6]]


def cases_of(path):
    engine = Engine(path)
    for what, answer, expected in {"vllm": vllm, "sglang": sglang}[engine.name](engine):
        yield {"engine": engine.name, "version": engine.version, "what": what, "expected": expected, "answer": answer}


def read(case, **options):
    """What foremoe reads of a case's answer."""
    from foremoe.routing.readers import sglang, vllm
    from foremoe.workload import from_routed_experts

    payloads = (vllm if case["engine"] == "vllm" else sglang).payloads(case["answer"])
    num_layers = None if case["engine"] == "vllm" else MOE_LAYERS[-1] + 1
    return from_routed_experts(payloads, **MODEL, num_layers=num_layers, **options)


def check(found, sequences):
    """Asserts that a trace and its report are of these sequences."""
    trace, report = found
    assert trace.seq_len_Q.tolist() == [T for _, T, _, _ in sequences]
    want_TLK = np.concatenate([routing_of(q, T) for q, T, _, _ in sequences])
    known_T = np.concatenate([(first <= np.arange(T)) & (np.arange(T) < end) for _, T, first, end in sequences])
    got_T = np.ones(trace.T, bool) if trace.known_T is None else trace.known_T
    assert got_T.tolist() == known_T.tolist() and report.num_padding_rows == 0
    assert (trace.topk_TLK[known_T] == want_TLK[known_T]).all()


def fault(case):
    """What is wrong with how a case is read; None: nothing."""
    from foremoe.base.errors import InputError

    expected = case["expected"]
    try:
        found = read(case)
        if isinstance(expected, str):
            return f"read, where {expected!r} should be refused"
        check(found, expected)
    except InputError as error:
        return None if isinstance(expected, str) and re.search(expected, str(error)) else f"refused: {error}"
    except AssertionError as error:
        return f"read as something else: {error}"
    return None


def download(folder):
    """Paths of the wheels; None where there is no index that has them."""
    for version in VERSIONS:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--dest",
            folder,
            version,
        ]
        if subprocess.run(command, stderr=subprocess.DEVNULL).returncode:
            return None
    return sorted(map(str, pathlib.Path(folder).glob("*.whl")), key=lambda path: ("sglang" in path, len(path)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="*", help="wheels of vLLM and SGLang; none: those of VERSIONS are downloaded")
    parser.add_argument("--write", action="store_true", help=f"write {DATA.name} instead of reading the answers")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheels = asked.wheels or download(folder)
        if wheels is None:
            print("engine-answers: skipped, the engines' wheels cannot be downloaded here")
            return 0
        cases = [case for path in wheels for case in cases_of(path)]
    if asked.write:
        DATA.write_text("[\n" + ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases) + "\n]\n")
        return 0
    endpoints, faults = {}, []
    for case in cases:
        wrong = fault(case)
        faults += [] if wrong is None else [f"{case['engine']} {case['version']} {case['what']}: {wrong}"]
        key = f"{case['engine']} {case['version']} {re.split('[ ,]', case['what'])[0]}"
        right = "refused" if isinstance(case["expected"], str) else "read"
        endpoints.setdefault(key, []).append(right if wrong is None else "wrong")
    for key, ends in endpoints.items():
        told = f"{key}: {ends.count('read')} answers read, {ends.count('refused')} refused with the cure"
        print(told + (f", {ends.count('wrong')} WRONG" if "wrong" in ends else ""))
    print("\n".join(faults) or "all as they should be")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
