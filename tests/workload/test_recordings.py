"""Files as engines and recorders leave them: small ones of the same structure, read as what went in or refused with the cure.

Where a structure was read is said in docs/recording.md.
"""

import dataclasses
import importlib.util
import json
import pathlib
import zipfile

import numpy as np
import pytest
from safetensors.numpy import save_file

import foremoe
from foremoe.base.errors import InputError
from foremoe.workload import open_recordings
from foremoe.workload.recordings import BY_RANK, SCALED, SPREAD

LAYERS, EXPERTS, TOPK, FIRST = 3, 8, 2, 1
TINY = dataclasses.replace(
    foremoe.Model.preset("mixtral-8x7b"),
    name="tiny",
    num_layers=LAYERS,
    first_moe_layer=FIRST,
    num_experts=EXPERTS,
    num_topk=TOPK,
)
ANSWERS = json.loads((pathlib.Path(__file__).parents[1] / "routing" / "engine_answers.json").read_text())
NO_TORCH = importlib.util.find_spec("torch") is None
needs_torch = pytest.mark.skipif(NO_TORCH, reason="torch is not installed")
needs_pyarrow = pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow: make test-transformers")


def ids(num_tokens, seed=0):
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((num_tokens, LAYERS, EXPERTS)), axis=2)[:, :, :TOPK].astype(np.int32)


def counts(steps, seed=0):
    """int64 [steps, layers, experts] of 40 tokens in each step."""
    return np.stack(
        [[np.bincount(layer.ravel(), minlength=EXPERTS) for layer in ids(40, seed + s).swapaxes(0, 1)] for s in range(steps)]
    )


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [path]


# Writers: each gives the paths of a recording, and what must be read.


def vllm_answers(folder):
    """Lines of what vLLM's own classes answered: two whole sequences of 9 tokens, without routing of the last."""
    found = [c["answer"] for c in ANSWERS if c["engine"] == "vllm" and c["what"].endswith("Response with token ids")]
    return lines(folder / "answers.jsonl", found), [9] * len(found)


def vllm_batch(folder):
    """Lines of `vllm run-batch`, an answer in the body of each."""
    found = [c["answer"] for c in ANSWERS if c["what"] == "ChatCompletionResponse with token ids" and c["engine"] == "vllm"]
    rows = [{"id": "1", "custom_id": "a", "response": {"status_code": 200, "body": one}, "error": None} for one in found]
    return lines(folder / "batch.jsonl", rows), [9] * len(found)


def sglang_answers(folder):
    found = [c["answer"] for c in ANSWERS if c["engine"] == "sglang" and c["what"] in ("generate", "ChatCompletionResponse")]
    return lines(folder / "answers.jsonl", found), [9] * len(found)


ENGINE_MODEL = dataclasses.replace(TINY, num_layers=2)


@pytest.mark.parametrize("write", [vllm_answers, vllm_batch, sglang_answers])
def test_lines_of_answers(write, tmp_path):
    paths, lengths = write(tmp_path)
    trace = open_recordings(paths, model=ENGINE_MODEL)
    assert trace.seq_len_Q.tolist() == lengths and trace.moe_layer_L.tolist() == [1, 2] and len(lengths)
    assert int((~trace.known_T).sum()) == len(lengths)
    with pytest.raises(InputError, match=r"'.*jsonl': give model, or num_experts"):
        open_recordings(paths)


def test_an_answer_that_names_a_preset_needs_no_model(tmp_path):
    preset = foremoe.Model.preset("mixtral-8x7b")
    experts = np.argsort(np.random.default_rng(0).random((5, preset.num_layers, 8)), axis=2)[:, :, :2]
    choice = {"token_ids": [1] * 3, "routed_experts": experts.tolist()}
    answer = {"model": "mistralai/Mixtral-8x7B", "prompt_token_ids": [1] * 3, "choices": [choice]}
    trace = open_recordings(lines(tmp_path / "one.jsonl", [answer]))
    assert trace.model == "mixtral-8x7b" and trace.T == 6


def rows_of(topk_TLK, sequence, layers=(1, 2, 3)):
    """Rows as in Mario928/speculative-moe: one for each token and layer."""
    return [
        {"dataset": "gsm8k", "problem_id": sequence, "layer": layers[at], "token_idx": t, "experts": topk_TLK[t, at].tolist()}
        for at in range(LAYERS)
        for t in range(len(topk_TLK))
    ]


def check_two(trace, num_unknown=0):
    assert trace.seq_len_Q.tolist() == [6, 4] and trace.moe_layer_L.tolist() == [1, 2, 3]
    known_T = np.ones(10, bool) if trace.known_T is None else trace.known_T
    assert int((~known_T).sum()) == num_unknown
    assert (trace.topk_TLK[known_T] == np.concatenate([ids(6), ids(4, 1)])[known_T]).all()


def test_rows_of_chosen_experts(tmp_path):
    rows = rows_of(ids(6), 0) + rows_of(ids(4, 1), 1)
    check_two(open_recordings(lines(tmp_path / "routing.jsonl", rows), model=TINY))
    (tmp_path / "routing.json").write_text(json.dumps(rows, indent=1))
    check_two(open_recordings([tmp_path / "routing.json"], model=TINY))
    # Numbers by position are those of the model's MoE layers; a row that is missing is a token that is not known.
    by_place = rows_of(ids(6), 0, (0, 1, 2)) + rows_of(ids(4, 1), 1, (0, 1, 2))
    check_two(open_recordings(lines(tmp_path / "routing.jsonl", by_place[1:]), model=TINY), num_unknown=1)
    rows[3]["token_idx"] = 10**7
    with pytest.raises(InputError, match=r"routing of shape .* take .* correct token_idx"):
        open_recordings(lines(tmp_path / "routing.jsonl", rows), model=TINY)


def test_sequences_of_chosen_experts(tmp_path):
    rows = [{"prompt": "..", "selected_experts": topk.tolist()} for topk in (ids(6), ids(4, 1))]
    check_two(open_recordings(lines(tmp_path / "routing.jsonl", rows), model=TINY))
    rows = [
        {"tokens": [1] * 6, "rollout_routed_experts": ids(6)[:5].tolist()},
        {"tokens": [1] * 4, "rollout_routed_experts": None},
    ]
    trace = open_recordings(lines(tmp_path / "samples.jsonl", rows), model=TINY)
    assert trace.seq_len_Q.tolist() == [6, 4] and int((~trace.known_T).sum()) == 5


@needs_torch
def test_sequences_of_tensors(tmp_path):
    import torch

    samples = [{"tokens": [1] * len(topk), "rollout_routed_experts": torch.tensor(topk)} for topk in (ids(6), ids(4, 1))]
    torch.save({"samples": samples}, tmp_path / "rollout_0.pt")
    check_two(open_recordings([tmp_path / "rollout_0.pt"], model=TINY))


@needs_pyarrow
def test_parquet(tmp_path):
    import pyarrow
    import pyarrow.parquet

    def write(rows):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "some.parquet")
        return [tmp_path / "some.parquet"]

    check_two(open_recordings(write(rows_of(ids(6), 0) + rows_of(ids(4, 1), 1)), model=TINY))
    sequences = [{"text": "..", "routed_experts": topk.tolist()} for topk in (ids(6), ids(4, 1))]
    check_two(open_recordings(write(sequences), model=TINY))
    check_counts(open_recordings(write(table_of(counts(3))), model=TINY, num_ranks=4, tokens_per_rank=20), counts(3))
    with pytest.raises(InputError, match="it has the columns text, none of which is routing; give answers"):
        open_recordings(write([{"text": ".."}]), model=TINY)
    (tmp_path / "some.parquet").write_bytes(b"PAR1" + bytes(40) + b"PAR1")
    with pytest.raises(InputError, match=r"'.*parquet': it is not a parquet file, or is truncated or damaged"):
        open_recordings([tmp_path / "some.parquet"], model=TINY)


def table_of(load_SLE):
    """Rows of a table of counts, without those that are 0."""
    return [{"step": s, "layer": at + FIRST, "expert": e, "count": int(n)} for (s, at, e), n in np.ndenumerate(load_SLE) if n]


def check_counts(work, load_SLE, micro_steps=2):
    """Steps of 40 tokens in micro-steps of 4 x 20: two of the recorded ones in each, spread over four ranks."""
    assert (work.M, work.G, work.num_topk) == (micro_steps, 4, TOPK) and work.moe_layer_L.tolist() == [1, 2, 3]
    joined = np.stack([part.sum(axis=0) for part in np.split(load_SLE, range(2, len(load_SLE), 2))])
    assert (work.load_MLE == joined).all()
    assert np.ptp(work.load_MLGE, axis=2).max() <= 1 and np.ptp(work.load_MLGE.sum(axis=3), axis=2).max() <= 1
    assert work.dealt.packer == SPREAD and work.dealt.tokens_per_rank == 20


def with_dense(load_SLE):
    """As SGLang counts: every layer of the model, and steps of a buffer that nothing filled."""
    return np.pad(load_SLE, ((0, 5), (FIRST, 0), (0, 0)))


def as_json(folder, load_SLE):
    (folder / "logical_count.json").write_text(json.dumps({"logical_count": with_dense(load_SLE).tolist()}))
    return [folder / "logical_count.json"]


def as_pt(folder, load_SLE):
    import torch

    load = torch.tensor(with_dense(load_SLE))
    record = {"rank": 0, "logical_count": load, "average_utilization_rate_over_window": None}
    torch.save(record, folder / "expert_distribution_recorder_1.5.pt")
    return [folder / "expert_distribution_recorder_1.5.pt"]


def as_table(folder, load_SLE):
    return lines(folder / "counts.jsonl", table_of(load_SLE))


def as_npz(folder, load_SLE):
    np.savez(folder / "counts.npz", **{f"step_{s}": load for s, load in enumerate(load_SLE)})
    return [folder / "counts.npz"]


def as_tensor(folder, load_SLE):
    import torch

    torch.save(torch.tensor(load_SLE, dtype=torch.float32), folder / "counts.pt")
    return [folder / "counts.pt"]


def as_statistics(folder, load_SLE, rank=0):
    """As TensorRT-LLM: int64 [experts] of each iteration and layer."""
    arrays = {f"{100 + s}_{at + FIRST}": load_SLE[s, at] for s, at in np.ndindex(load_SLE.shape[:2])}
    save_file({name: np.ascontiguousarray(x) for name, x in arrays.items()}, folder / f"rank{rank}.safetensors")
    (folder / "meta_info.json").write_text(json.dumps({"num_experts": EXPERTS, "num_experts_per_token": TOPK}))
    return [folder / f"rank{rank}.safetensors"]


@pytest.mark.parametrize("write", [as_json, as_pt, as_table, as_npz, as_tensor, as_statistics])
def test_counts_of_steps(write, tmp_path):
    if NO_TORCH and write in (as_pt, as_tensor):
        pytest.skip("torch is not installed")
    paths = write(tmp_path, counts(3))
    check_counts(open_recordings(paths, model=TINY, num_ranks=4, tokens_per_rank=20), counts(3))
    if write is as_statistics:
        work = open_recordings(paths, num_ranks=4, tokens_per_rank=20)
        assert work.moe_layer_L.tolist() == [1, 2, 3] and work.num_topk == TOPK
    else:
        with pytest.raises(InputError, match="top-k; give model, the one that was recorded"):
            open_recordings(paths)


def test_counts_of_several_ranks_keep_their_sources(tmp_path):
    per_rank = [counts(3, seed) for seed in (10, 20)]
    paths = [as_statistics(tmp_path, load, rank)[0] for rank, load in enumerate(per_rank)]
    work = open_recordings(paths[::-1], num_ranks=2, tokens_per_rank=40)
    assert (work.load_MLGE == np.stack(per_rank, axis=2)).all() and work.dealt.packer == BY_RANK
    with pytest.raises(InputError, match="counted by 2 ranks, in 3 steps; give num_ranks=2"):
        open_recordings(paths, num_ranks=4)


def test_a_statistic_of_many_micro_steps_becomes_one_with_the_same_shares(tmp_path):
    """Beside a step that is not longer than two micro-steps, which stays as it is."""
    load_SLE = np.stack([1000 * counts(1)[0], counts(1, 5)[0]])
    tokens = int(load_SLE[0].sum(axis=1).max()) // TOPK
    np.savez(tmp_path / "counts.npz", load=load_SLE)
    work = open_recordings([tmp_path / "counts.npz"], model=TINY, num_ranks=2, tokens_per_rank=tokens // 1000)
    assert work.dealt.packer == SPREAD + SCALED and work.M == 2 and work.tokens_MG.max() <= 2 * (tokens // 1000)
    wanted_LE = load_SLE[0] * (2 * (tokens // 1000) / tokens)
    assert np.abs(work.load_MLE[0] - wanted_LE).max() < 1.0
    assert (work.load_MLE[0].sum(axis=1) == np.rint(wanted_LE.sum(axis=1))).all()
    assert (work.load_MLE[1] == load_SLE[1]).all()


def test_pairs_are_dealt_in_turn():
    """The rule in a few lines of plain Python."""
    load, G = np.array([5, 0, 3, 9, 1]), 3
    line = np.repeat(np.arange(5), load)
    want = [np.bincount(line[g::G], minlength=5).tolist() for g in range(G)]
    from foremoe.workload.recordings import _spread

    assert _spread(load[None, None], G)[0, 0].tolist() == want


def test_a_recording_with_unknown_tokens_is_strict_or_not(tmp_path):
    topk = ids(6)
    topk[2, 1, 1] = topk[2, 1, 0]
    topk[4, 0, 0] = -1
    np.savez(tmp_path / "some.npz", topk_ids=topk, seq_len=np.array([4, 2]), num_experts=EXPERTS)
    with pytest.raises(InputError, match="twice"):
        open_recordings([tmp_path / "some.npz"])
    trace = open_recordings([tmp_path / "some.npz"], strict=False)
    assert trace.known_T.tolist() == [True, True, False, True, False, True]


class Evil:
    def __reduce__(self):
        return (print, ("code of a file has run",))


def refusals(folder):
    """(name of the file, bytes or writer, message)."""
    good = counts(2)
    yield "some.txt", b"..", "'some.txt' is of no known kind; routing is read from .json, .jsonl"
    yield "some.jsonl", b'{"a": 1}\n{"a": \n', "line 2 is not JSON"
    yield "some.json", b"[" * 100_000, "nested too deep"
    yield "some.jsonl", b'{"text": "a"}\n{"text": "b"}\n', "its first row has text, which is not routing; give answers"
    yield "some.jsonl", b'\n{"a": 1}\n\n{"a": \n', "line 4 is not JSON"
    yield "some.jsonl", b"\n \n", "it has only blank lines; write it again"
    yield "some.json", b"[]", "it has one array, but no counts"
    yield "some.json", b"[[1, 2], [3, 4]]", r"it has one array \[2, 2\], but no counts"
    yield "some.json", b"17", "it has nothing, but no counts"
    yield "some.json", json.dumps({"logical_count": (good - 50).tolist()}).encode(), "whole numbers from 0 to"
    yield "some.json", json.dumps({"logical_count": (good + 2**60).tolist()}).encode(), "from 0 to 9,007,199,254,740,991"
    yield "some.json", json.dumps({"logical_count": (good / 7).tolist()}).encode(), "give counts of pairs, not shares"
    yield "some.json", json.dumps({"logical_count": [[1, 2], [3]]}).encode(), "make no array"
    yield "some.json", json.dumps({"logical_count": good[:, :, :5].tolist()}).encode(), "no counts .layers, 8 experts."
    yield (
        "some.json",
        json.dumps({"logical_count": with_dense(good)[:, ::-1].tolist()}).encode(),
        "layer 0 has pairs, but is not an MoE",
    )
    for none in (0 * with_dense(good), 0 * good):
        yield "some.json", json.dumps({"logical_count": none.tolist()}).encode(), "the counts contain no pair"
    by_rank = {"logical_count": good.tolist(), "logical_count_layout": "rank_layer_expert"}
    yield "some.json", json.dumps(by_rank).encode(), "laid out as 'rank_layer_expert', not by step"
    yield "some.json", json.dumps({"records": [], "last_physical_to_logical_map": []}).encode(), "recorder-mode stat"
    yield "some.jsonl", json.dumps({"layer": 1, "expert": 2**14, "count": 2**32}).encode(), "count must be a whole number"
    yield "some.jsonl", json.dumps({"layer": 1, "expert": 9, "count": 2}).encode(), "they count 10 experts but tiny has 8"
    yield "some.jsonl", json.dumps({"layer": 1, "token_idx": 0, "experts": 3}).encode(), "lists of one length"
    yield "some.jsonl", b'{"layer": 1, "token_idx": 0, "experts": [3, 1]}\n{"layer": 1}', "a row lacks token_idx"
    if NO_TORCH:
        return
    import torch

    for name, value, message in (
        ("evil.pt", {"logical_count": Evil()}, "objects that only running code would make"),
        ("views.pt", {"logical_count": torch.ones(1).expand(2**12, 2**12, EXPERTS)}, "save it without views"),
        ("pass.pt", {"records": [{"forward_pass_id": 1}]}, "recorder-mode stat"),
    ):
        torch.save(value, folder / "made.pt")
        yield name, (folder / "made.pt").read_bytes(), message
    with zipfile.ZipFile(folder / "made.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(2**20))
    yield "bomb.pt", (folder / "made.pt").read_bytes(), "not what torch.save writes"
    yield "noise.pt", bytes(range(256)), "not what torch.save writes"


def test_what_is_no_recording_is_refused_with_the_cure(tmp_path, capsys):
    for name, data, message in refusals(tmp_path):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError, match=message) as error:
            open_recordings([tmp_path / name], model=TINY, num_ranks=4)
        assert name in str(error.value) and str(error.value).endswith(".")
    assert "has run" not in capsys.readouterr().out


def test_files_of_two_kinds_are_refused(tmp_path):
    rows = lines(tmp_path / "routing.jsonl", rows_of(ids(6), 0))
    with pytest.raises(InputError, match="some files hold counts and others the experts of single tokens"):
        open_recordings([*rows, *as_json(tmp_path, counts(2))], model=TINY)
    other = counts(2)[:, :2]
    (tmp_path / "other.json").write_text(json.dumps({"logical_count": other.tolist()}))
    with pytest.raises(InputError, match="the files count different layers"):
        open_recordings([*as_json(tmp_path, counts(2)), tmp_path / "other.json"], model=TINY)
