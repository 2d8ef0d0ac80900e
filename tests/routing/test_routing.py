"""RoutingTrace: strict checks, files that come back byte for byte, and every way a file can be wrong."""

import json
import pathlib
import pickle
import re
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from foremoe.base.arrays import frozen_array
from foremoe.base.errors import InputError
from foremoe.machine.model import Model
from foremoe.routing.checks import first_fault
from foremoe.routing.trace import RoutingTrace

DATA = pathlib.Path(__file__).resolve().parents[2].parent / "shared" / "data"
SUFFIXES = (".npz", ".safetensors")


def make_trace(seed=0, seq_len=(3, 1, 4), L=2, K=2, E=6, unknown=0.0, **fields):
    rng = np.random.default_rng(seed)
    T = sum(seq_len)
    topk = np.argsort(rng.random((T, L, E)), axis=2)[:, :, :K]
    if unknown:
        fields["known_T"] = rng.random(T) >= unknown
    return RoutingTrace(topk_TLK=topk, num_experts=E, seq_len_Q=seq_len, **fields)


@st.composite
def traces(draw):
    E = draw(st.sampled_from([1, 4, 7, 256, 300]))
    return make_trace(
        seed=draw(st.integers(0, 99)),
        seq_len=draw(st.lists(st.integers(1, 6), min_size=1, max_size=5)),
        L=draw(st.integers(1, 3)),
        K=draw(st.integers(1, min(E, 4))),
        E=E,
        unknown=draw(st.sampled_from([0.0, 0.4, 1.0])),
        model=draw(st.sampled_from([None, "my model"])),
        source=draw(st.sampled_from(["", "Zürich, \u201crun\u201d 3"])),
    )


def reference_fault(topk_TLK, known_T, num_experts):
    for t, token in enumerate(topk_TLK.tolist()):
        for layer, ids in enumerate(token):
            for k, e in enumerate(ids):
                if known_T[t] and (not 0 <= e < num_experts or e in ids[:k]):
                    return t, layer, k
    return -1, -1, -1


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6), st.sampled_from([np.uint8, np.int16]), st.booleans())
def test_the_first_fault_is_found(seed, E, dtype, all_known):
    rng = np.random.default_rng(seed)
    # Mostly valid rows, so that the first fault is often late or absent.
    topk_TLK = np.argsort(rng.random((6, 3, 6)), axis=2)[:, :, :3].astype(dtype)
    known_T = np.ones(6, bool) if all_known else rng.random(6) < 0.5
    known = frozen_array(np.empty(0, bool) if all_known else known_T, bool, "known")
    found = first_fault(frozen_array(topk_TLK, dtype, "topk"), known, E)
    assert tuple(found) == reference_fault(topk_TLK, known_T, E)


@pytest.mark.parametrize(("token", "layer", "ids"), [(0, 0, [1, 1]), (5, 1, [3, 6]), (7, 0, [2, 2]), (3, 1, [255, 0])])
def test_an_error_names_token_layer_and_cure(token, layer, ids):
    topk = np.array(make_trace().topk_TLK)
    topk[token, layer] = ids
    with pytest.raises(InputError, match=f"token {token}, layer {layer} lists expert .*known_T"):
        RoutingTrace(topk_TLK=topk, num_experts=6, seq_len_Q=[3, 1, 4])
    known = np.arange(8) != token
    assert RoutingTrace(topk_TLK=topk, num_experts=6, seq_len_Q=[3, 1, 4], known_T=known).T == 8


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("value", [-1, 6, 127, 300, 2**40])
def test_ids_outside_the_stored_type_are_named_too(dtype, value):
    if not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
        return
    topk = make_trace().topk_TLK.astype(dtype)
    topk[4, 1, 0] = value
    with pytest.raises(InputError, match=f"token 4, layer 1 lists expert {value}, outside 0 to 5"):
        RoutingTrace(topk_TLK=topk, num_experts=6, seq_len_Q=[8])
    topk[2, 0] = 3  # an earlier fault inside the range goes first
    with pytest.raises(InputError, match="token 2, layer 0 lists expert 3 twice"):
        RoutingTrace(topk_TLK=topk, num_experts=6, seq_len_Q=[8])


def test_unknown_tokens_hold_what_the_type_holds():
    topk = make_trace().topk_TLK.astype(np.int64)
    topk[4] = 255
    known = np.arange(8) != 4
    assert RoutingTrace(topk_TLK=topk, num_experts=6, seq_len_Q=[8], known_T=known).topk_TLK.dtype == np.uint8
    topk[4] = -1
    with pytest.raises(InputError, match="marked unknown hold ids from -1 to 5, which uint8 cannot hold; write 0"):
        RoutingTrace(topk_TLK=topk, num_experts=6, seq_len_Q=[8], known_T=known)
    assert RoutingTrace(topk_TLK=topk, num_experts=257, seq_len_Q=[8], known_T=known).topk_TLK[4, 0, 0] == -1


def test_fields_are_canonical_and_read_only():
    trace = make_trace(known_T=np.ones(8, bool))
    assert trace.known_T is None and (trace.T, trace.L, trace.K, trace.Q) == (8, 2, 2, 3)
    assert trace.cuts.tolist() == [0, 3, 4, 8] and trace.moe_layer_L.tolist() == [0, 1]
    assert [a.dtype for a in (trace.topk_TLK, trace.seq_len_Q, trace.moe_layer_L)] == [np.uint8, np.int64, np.int32]
    assert make_trace(E=257).topk_TLK.dtype == np.int16
    assert not trace.topk_TLK.flags.writeable and "8 tokens in 3 sequences" in repr(trace)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_TLK": np.zeros((0, 2, 2), np.uint8)}, "at least 1 long"),
        ({"topk_TLK": np.zeros((8, 0, 2), np.uint8)}, "at least 1 long"),
        ({"topk_TLK": np.zeros((8, 2), np.uint8)}, "must hold integers"),
        ({"topk_TLK": np.zeros((8, 2, 2))}, "must hold integers"),
        ({"topk_TLK": "ids"}, "must hold integers"),
        ({"topk_TLK": None}, "must hold integers"),
        ({"topk_TLK": [[[1, 2]], [[1]]]}, "ragged"),
        ({"num_experts": 1}, "top-2 of 1 experts"),
        ({"num_experts": 0}, "num_experts must be"),
        ({"num_experts": 6.0}, "num_experts must be"),
        ({"num_experts": 2**15}, "num_experts must be"),
        ({"seq_len_Q": []}, "there is none"),
        ({"seq_len_Q": [8, 0]}, "sequence 1 has 0"),
        ({"seq_len_Q": [9, -1]}, "sequence 1 has -1"),
        ({"seq_len_Q": [3, 4]}, "sum to 7 but there are 8"),
        ({"seq_len_Q": [2**62, 2**62, 2**62, 2**62, 8]}, "but there are 8"),
        ({"seq_len_Q": [7.5, 0.5]}, "whole numbers"),
        ({"seq_len_Q": [np.nan, 8]}, "NaN"),
        ({"seq_len_Q": [[8]]}, "shape"),
        ({"known_T": np.ones(8)}, "known_T must be bool"),
        ({"known_T": np.ones(7, bool)}, "shape"),
        ({"moe_layer_L": [3]}, "shape"),
        ({"moe_layer_L": [3, 3]}, "distinct"),
        ({"moe_layer_L": [-1, 3]}, "distinct"),
        ({"model": 3}, "model must be text"),
        ({"source": None}, "source must be text"),
        ({"model": "gpt-oss-20b"}, "top-4 of 32 experts but the data is top-2 of 6"),
    ],
)
def test_bad_fields_are_refused(change, message):
    fields = {"topk_TLK": make_trace().topk_TLK, "num_experts": 6, "seq_len_Q": [8], **change}
    with pytest.raises(InputError, match=message) as caught:
        RoutingTrace(**fields)
    assert "\n" not in str(caught.value)


def test_a_preset_gives_layer_numbers():
    assert make_trace(L=32, E=8, model="Mixtral-8x7B").moe_layer_L.tolist() == list(range(32))
    assert make_trace(L=26, K=6, E=64, model="deepseek-v2-lite").moe_layer_L.tolist() == list(range(1, 27))
    assert make_trace(L=3, K=6, E=64, model="deepseek-v2-lite").moe_layer_L.tolist() == [0, 1, 2]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trace=traces(), suffix=st.sampled_from(SUFFIXES))
def test_save_then_load_is_identity_and_bytes_repeat(trace, suffix, tmp_path):
    path = tmp_path / f"trace{suffix}"
    trace.save(path)
    back = RoutingTrace.load(path)
    assert back.same_as(trace)
    back.save(tmp_path / f"again{suffix}")
    assert (tmp_path / f"again{suffix}").read_bytes() == path.read_bytes()
    assert not list(tmp_path.glob("*.part"))


def test_the_id_is_a_hash_of_what_decides_loads():
    trace = make_trace()
    assert trace.id == make_trace(source="elsewhere").id == trace.content_hash() and len(trace.id) == 32
    others = [make_trace(seed=1), make_trace(E=7), make_trace(seq_len=(4, 4)), make_trace(moe_layer_L=[4, 5])]
    others.append(make_trace(known_T=np.arange(8) > 0))
    assert len({t.id for t in [trace, *others]}) == 6
    assert make_trace(id="step 7").id == "step 7"


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_public_array_names(tmp_path, suffix):
    trace = make_trace()
    arrays = {
        "topk_ids": np.array(trace.topk_TLK),
        "seq_len": np.array([3, 1, 4], np.int32),
        "topk_weights": np.full(trace.topk_TLK.shape, 0.5, np.float16),  # not read
    }
    write = np.savez_compressed if suffix == ".npz" else lambda p, **a: save_file(a, p)
    extra = {"dataset": np.array(["a", "b"])} if suffix == ".npz" else {}
    path = tmp_path / f"public{suffix}"
    write(path, **arrays, **extra)
    with pytest.raises(InputError, match=r"does not state the number of experts; pass num_experts="):
        RoutingTrace.load(path)
    back = RoutingTrace.load(path, num_experts=6)
    assert back.source == path.name and back.id == trace.id
    write(path, **arrays, num_experts=np.array([6]))
    assert RoutingTrace.load(str(path), model="mine").model == "mine"
    with pytest.raises(InputError, match=r"given twice and differs .*; correct the num_experts\."):
        RoutingTrace.load(path, num_experts=7)
    with pytest.raises(InputError, match=r"given twice and differs .*; correct the model, mixtral-8x7b here\."):
        RoutingTrace.load(path, model="mixtral-8x7b")
    write(path, **arrays, num_experts=np.array([5]))
    with pytest.raises(InputError, match=r"lists expert 5, outside 0 to 4"):
        RoutingTrace.load(path)
    for bad in (np.array([6, 6]), np.array(6.0)):
        write(path, **arrays, num_experts=bad)
        given = f"gives {bad.dtype} of shape {list(bad.shape)} for num_experts; it must be one whole number"
        with pytest.raises(InputError, match=re.escape(given)):
            RoutingTrace.load(path)
    del arrays["seq_len"]
    write(path, **arrays)
    with pytest.raises(InputError, match="lacks the array seq_len_Q or seq_len"):
        RoutingTrace.load(path, num_experts=6)


def test_a_model_tells_experts_and_layer_numbers(tmp_path):
    topk = make_trace(L=26, K=6, E=64).topk_TLK
    np.savez(tmp_path / "t.npz", topk_ids=topk, seq_len=np.array([8]))
    for model in ("deepseek-v2-lite", Model.preset("deepseek-v2-lite")):
        trace = RoutingTrace.load(tmp_path / "t.npz", model=model)
        assert trace.num_experts == 64 and trace.model == "deepseek-v2-lite" and trace.moe_layer_L[0] == 1
    with pytest.raises(InputError, match="routes top-8 of 128 experts but"):
        RoutingTrace.load(tmp_path / "t.npz", model="qwen3-30b-a3b")
    with pytest.raises(InputError, match="model must be"):
        RoutingTrace.load(tmp_path / "t.npz", model=3)


def test_files_that_are_no_trace(tmp_path):
    def refused(name, message, content=None, **options):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=message) as caught:
            RoutingTrace.load(tmp_path / name, **options)
        assert "\n" not in str(caught.value) and caught.value.__cause__ is None

    refused("none.npz", "there is no file")
    refused("bad\0.npz", "no file|cannot read")
    (tmp_path / "folder.npz").mkdir()
    refused("folder.npz", "is not a file")
    refused("trace.csv", r"must end in \.npz or \.safetensors", b"1,2")
    for suffix in SUFFIXES:
        refused(f"empty{suffix}", "is empty", b"")
        refused(f"text{suffix}", "truncated or damaged", b"not a trace at all, just text")
    refused("pickled.npz", "not a zip archive", pickle.dumps([1, 2]))
    np.savez(tmp_path / "objects.npz", topk_ids=np.array([None]), seq_len=np.array([1]), num_experts=2)
    refused("objects.npz", "Python objects")
    with open(tmp_path / "array.npz", "wb") as file:
        np.save(file, np.zeros(3))
    refused("array.npz", "not a zip archive")
    with zipfile.ZipFile(tmp_path / "zip.npz", "w") as archive:
        archive.writestr("readme.txt", "hello")
    refused("zip.npz", "lacks the array topk_TLK or topk_ids")
    save_file(
        {"topk_ids": np.zeros((2, 1, 1), np.uint8)},
        tmp_path / "one.safetensors",
        {"foremoe": '{"kind": "workload", "format": 1}'},
    )
    refused("one.safetensors", "is not a trace")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_truncated_and_changed_files(tmp_path, suffix):
    trace = make_trace(seq_len=(30, 20), source="a run")
    path = tmp_path / f"t{suffix}"
    trace.save(path)
    whole = path.read_bytes()
    for size in range(1, len(whole), max(1, len(whole) // 60)):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match="truncated or damaged"):
            RoutingTrace.load(path)
    first, second = trace.topk_TLK[:1].tobytes(), trace.topk_TLK[1:2].tobytes()
    text = "utf-32-le" if suffix == ".npz" else "ascii"
    changes = {
        "two tokens swapped, still valid routing": (first + second, second + first),
        "the source": ("a run".encode(text), "a fun".encode(text)),
    }
    for what, (old, new) in changes.items():
        assert old != new and old in whole, what
        path.write_bytes(whole.replace(old, new, 1))
        with pytest.raises(InputError, match=r"was changed after it was written|truncated or damaged"):
            RoutingTrace.load(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_newer_format_is_named(tmp_path, suffix):
    trace, path = make_trace(), tmp_path / f"t{suffix}"
    arrays = {"topk_TLK": np.array(trace.topk_TLK), "seq_len_Q": np.array(trace.seq_len_Q)}
    header = json.dumps({"kind": "trace", "format": 99})
    if suffix == ".npz":
        np.savez(path, **arrays, foremoe=np.array(header))
    else:
        save_file(arrays, path, {"foremoe": header})
    with pytest.raises(InputError, match="has trace format 99, this foremoe reads only format 1; install a newer foremoe"):
        RoutingTrace.load(path)


def test_saving_where_nothing_can_be_saved(tmp_path):
    with pytest.raises(InputError, match="must end in"):
        make_trace().save(tmp_path / "t.pt")
    with pytest.raises(InputError, match="cannot write"):
        make_trace().save(tmp_path / "no" / "t.npz")


@settings(deadline=None)
@given(trace=traces())
def test_single_sequences_concatenate_to_the_whole(trace):
    parts = [trace.sequences([q]) for q in range(trace.Q)]
    whole = RoutingTrace.concat(parts)
    assert whole.same_as(trace) and [p.T for p in parts] == trace.seq_len_Q.tolist()
    back = trace.sequences(np.arange(trace.Q)[::-1]).sequences(np.arange(trace.Q)[::-1])
    assert back.same_as(trace)
    assert trace.sequences(np.ones(trace.Q, bool)).same_as(trace)


def test_concat_and_sequences_refuse_what_does_not_fit():
    trace = make_trace(model="a")
    both = RoutingTrace.concat([trace, make_trace(seed=1, model="b", source="x")])
    assert both.Q == 6 and both.model is None and both.source == "x"
    for other in (make_trace(L=3), make_trace(K=1), make_trace(E=7)):
        with pytest.raises(InputError, match="concatenate traces of one model"):
            RoutingTrace.concat([trace, other])
    with pytest.raises(InputError, match="different layer numbers"):
        RoutingTrace.concat([trace, make_trace(moe_layer_L=[1, 2])])
    with pytest.raises(InputError, match="at least one trace"):
        RoutingTrace.concat([])
    for bad in ([], [3], [-1], [0.5], [True, False], np.zeros(3, bool), [[0]]):
        with pytest.raises(InputError, match="numbers from 0 to 2"):
            trace.sequences(bad)


@pytest.mark.shared
@pytest.mark.skipif(not DATA.is_dir(), reason=f"no recorded traces at {DATA}")
def test_recorded_traces_load():
    gpt = RoutingTrace.load(DATA / "gpt_oss_20b_decode.npz", model="gpt-oss-20b")
    assert (gpt.T, gpt.L, gpt.K, gpt.Q, gpt.num_experts) == (215438, 24, 4, 703, 32)
    tasks = [RoutingTrace.load(p, model="deepseek-v2-lite") for p in sorted(DATA.glob("esft_*.npz"))]
    assert RoutingTrace.concat(tasks).Q == 213 and tasks[0].moe_layer_L[0] == 1
