"""What a file may not do: take more memory than its size allows, hang, run code, or end in anything but an `InputError`."""

from __future__ import annotations

import base64
import io
import json
import os
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from limits import limited
from safetensors.numpy import save

import foremoe
from foremoe.base import stored as stored_arrays
from foremoe.base.errors import InputError, PlanError
from foremoe.base.tensor_file import read_tensors, write_tensors
from foremoe.cli.main import main
from foremoe.plan.header import FORMAT_VERSION
from foremoe.plan.plan import Plan
from foremoe.routing.trace import RoutingTrace
from foremoe.workload import Workload, from_routed_experts

COST = foremoe.CostModel(objective="balance")
MODEL = foremoe.Model.preset("mixtral-8x7b")
LOADERS = {
    ".safetensors": [Plan.load, Workload.load, RoutingTrace.load], ".npz": [RoutingTrace.load],
    ".toml": [foremoe.Model.from_toml, foremoe.Cluster.from_toml],
}  # fmt: skip
EACH_LOADER = [(suffix, load) for suffix, loads in LOADERS.items() for load in loads]


@pytest.fixture(scope="module")
def plan() -> Plan:
    rng = np.random.default_rng(0)
    load_MLGE = rng.integers(0, 9, (2, 2, 4, 8), dtype=np.int32)
    work = foremoe.Workload.from_counts(load_MLGE, num_topk=2, model=MODEL.name)
    problem = foremoe.Problem.of(work, foremoe.Cluster.preset("8xh100", num_ranks=4), redundant=1, cost=COST)
    return foremoe.Planner().plan(problem)[0]


def changed(plan: Plan, path: Path, **values: object) -> Path:
    """The plan's file with header keys (``schedule__num_chunks``) or tensors (arrays) changed and the checksum made again."""
    plan.save(path)
    header, tensors = read_tensors(path, "plan", FORMAT_VERSION)
    tensors = dict(tensors)
    for key, value in values.items():
        *folders, name = key.split("__")
        if isinstance(value, np.ndarray):
            tensors[".".join([*folders, name])] = value
            continue
        table = header
        for folder in folders:
            table = table[folder]
        table[name] = value
    for key in ("kind", "format", "checksum"):
        header.pop(key)
    write_tensors(path, "plan", FORMAT_VERSION, header, tensors)
    return path


def refused(load, *arguments, match: str = ".", megabytes: float = 256) -> str:
    with limited(megabytes), pytest.raises(InputError, match=match) as caught:
        load(*arguments)
    text = str(caught.value)
    assert text.isprintable() and len(text) < 2500
    return text


@pytest.mark.parametrize(("suffix", "load"), EACH_LOADER)
@pytest.mark.parametrize("kind", ["fifo", "directory", "device", "link to a device", "socket"])
def test_only_regular_files_are_opened(kind, suffix, load, tmp_path):
    path = tmp_path / f"odd{suffix}"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        os.mknod(path, 0o140644)
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    elif suffix == ".toml":
        path = Path("/dev/zero")
    else:
        pytest.skip("no device has this suffix")
    refused(load, path, match="is not a file")


@pytest.mark.parametrize("command", [["inspect"], ["check"], ["compare"], ["report", "-o", "page.html"]])
def test_commands_do_not_wait_for_a_fifo(command, tmp_path):
    os.mkfifo(tmp_path / "fifo.npz")
    with limited():
        found = CliRunner().invoke(main, [*command, str(tmp_path / "fifo.npz")])
    assert found.exit_code == 2 and "is not a file" in found.stderr


@pytest.mark.parametrize(
    "values",
    [
        {"schedule__num_chunks": 10**12},
        {"schedule__micro_step_X": np.array([0, 0, 2**31 - 1, 2**31 - 1], np.int32)},
        {"schedule__chunk_X": np.array([0, 0, 2**31 - 1, 0], np.int32), "schedule__num_chunks": 2**31},
        {"slot_depth": 10**9},
        {"redundant": 10**9},
        {"cluster__ranks_per_node": 10**12},
        {"model__num_layers": 10**12},
    ],
    ids=str,
)
def test_numbers_of_a_small_plan_allocate_nothing(plan, tmp_path, values):
    path = changed(plan, tmp_path / "p.safetensors", **values)
    refused(lambda: Plan.load(path).check())


@pytest.mark.parametrize(
    "values",
    [
        {"redundant": "1"}, {"redundant": None}, {"redundant": True}, {"redundant": 1.0}, {"replicas": "nodes"},
        {"replicas": None},
        {"key__stage": "train"}, {"key__step": "0"}, {"key": []}, {"key": None}, {"planner": 3}, {"trace_id": None},
        {"dealt": {}},
        {"keeps_homes": 1}, {"cost__objective": "speed"}, {"cost__overlap": 2.0}, {"cost__overlap": float("inf")},
        {"cost__overlap": float("nan")}, {"slot_depth": "3"}, {"slot_depth": 0}, {"schedule__reforward": "no"},
        {"schedule__num_chunks": 1.5}, {"cluster__dispatch": ["pairs"]}, {"cluster__dispatch": "tokens"}, {"model": 3},
        {"transfers__link_C": 7}, {"transfers__phase_C": 9}, {"schedule__phase_X": 2}, {"stop_ML": 200}, {"moe_layer_L": 2},
        {"home_LE": -1}, {"expert_MLGS": 8}, {"transfers__dst_C": -1}, {"transfers__layer_C": 2},
    ],
    ids=str,
)  # fmt: skip
def test_types_and_codes_are_those_of_the_format(plan, tmp_path, values):
    held = {
        "transfers__link_C": plan.transfers.link_C, "transfers__phase_C": plan.transfers.phase_C, "stop_ML": plan.stop_ML,
        "schedule__phase_X": plan.header.schedule.phase_X, "home_LE": plan.home_LE,
        "expert_MLGS": plan.expert_MLGS, "transfers__dst_C": plan.transfers.dst_C, "transfers__layer_C": plan.transfers.layer_C,
    }  # fmt: skip
    ((key, value),) = values.items()
    if key in held:
        array = np.array(held[key])
        assert array.size
        array.flat[0] = value
        values = {key: array}
    elif key == "moe_layer_L":
        values = {key: np.arange(3, dtype=np.int32)}
    text = refused(Plan.load, changed(plan, tmp_path / "p.safetensors", **values))
    assert "p.safetensors" in text


@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.uint32])
def test_tensors_of_a_plan_have_the_dtypes_of_the_format(plan, tmp_path, dtype):
    path = changed(plan, tmp_path / "p.safetensors", load_MLE=plan.load_MLE.astype(dtype))
    refused(Plan.load, path, match=r"load_MLE.*int32")


def zipped(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return path


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def npy_header(text: str, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text.encode() + data


def test_a_small_archive_does_not_become_a_large_trace(tmp_path):
    arrays = {
        "topk_ids": npy(np.zeros((2**26, 2, 1), np.uint8)),
        "seq_len": npy(np.array([2**26])),
        "num_experts": npy(np.int64(8)),
    }
    path = zipped(tmp_path / "bomb.npz", **arrays)
    assert path.stat().st_size < 2**18
    refused(RoutingTrace.load, path, match="max_bytes=", megabytes=100)
    assert RoutingTrace.load(path, max_bytes=2**28).T == 2**26


@pytest.mark.parametrize(
    "shape", ["(1000000000000, 2, 1)", "(0, 1000000000000, 1000000000000)", "(2, 2, 1)", "(" + "1," * 99 + ")"]
)
def test_headers_of_an_archive_are_compared_with_the_bytes(tmp_path, shape):
    claim = npy_header(f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}\n", b"\0" * 8)
    path = zipped(tmp_path / "t.npz", topk_ids=claim, seq_len=npy(np.array([1])), num_experts=npy(np.int64(8)))
    refused(RoutingTrace.load, path)


@pytest.mark.parametrize("width", [0, 1, 7, 2**20, 2**29 - 1, 2**29, 2**31, 10**8, 10**12])
@pytest.mark.parametrize("data", [b"", bytes(4)])
def test_a_text_of_any_width_is_read_or_refused(tmp_path, width, data):
    blob = npy_header(f"{{'descr': '<U{width}', 'fortran_order': False, 'shape': (), }}\n", data)
    good = {"topk_ids": npy(np.zeros((1, 2, 1), np.uint8)), "seq_len": npy(np.array([1])), "num_experts": npy(np.int64(8))}
    for member in ("topk_ids", "num_experts", "foremoe"):
        refused(RoutingTrace.load, zipped(tmp_path / "t.npz", **good | {member: blob}))
    for payload in (blob, base64.b64encode(blob).decode(), {"routed_experts": base64.b64encode(blob).decode()}):
        refused(lambda given=payload: from_routed_experts([given], num_experts=8))


@pytest.mark.parametrize("name", sorted(stored_arrays._NPY_DTYPES))
def test_a_dtype_of_an_npy_file_is_numpys_own(name):
    array = np.arange(3).astype(name)
    found = stored_arrays.npy_array(
        memoryview(npy_header(f"{{'descr': '{name}', 'fortran_order': False, 'shape': (3,), }}\n", array.tobytes()))
    )
    assert found.dtype == array.dtype and (found == array).all()


def test_a_key_of_dots_is_not_a_tree(tmp_path):
    for text in ("a" + ".a" * 20_000 + " = 1", "x = {" + "a" + ".a" * 20_000 + " = 1}", "[" + "a." * 20_000 + "a]"):
        (tmp_path / "m.toml").write_text(text)
        refused(foremoe.Model.from_toml, tmp_path / "m.toml")
    (tmp_path / "m.toml").write_text("#" * 2_000_000)
    refused(foremoe.Model.from_toml, tmp_path / "m.toml", match="bytes")


def test_base64_of_a_long_shape_is_read_at_once():
    header = "{'descr': '<i4', 'fortran_order': False, 'shape': (" + "1" * 40 + "x"
    payload = base64.b64encode(npy_header(header)).decode()
    for more in ("", "A" * 100, "1" * 1000):
        with limited(seconds=20), pytest.raises(InputError):
            from_routed_experts(payload + more, num_experts=8, num_topk=2, num_layers=3)


def test_a_payload_of_another_topk_is_refused():
    payload = {"data": base64.b64encode(bytes(24)).decode(), "shape": [8, 3, 1], "dtype": "uint8"}
    with pytest.raises(InputError, match="top-2"):
        from_routed_experts(payload, num_experts=8, num_topk=2, num_layers=3)


@pytest.mark.parametrize(
    "payload",
    [
        {"data": "", "shape": [0, 10**12, 2], "dtype": "uint8"},
        {"routed_experts": None, "prompt_tokens": 10**12, "completion_tokens": 1},
        {"routed_experts": None, "prompt_tokens": 2**62, "completion_tokens": 2**62},
        {"data": "AAAA", "shape": [1, 3, 1], "dtype": "uint8", "start": 10**12},
        {"data": "AAAA", "shape": [1, 3, 1], "dtype": "u1,u1,u1"},
        {"data": "AAAA", "shape": [1, 3, 1], "dtype": "9" * 100},
    ],
    ids=str,
)
def test_counts_of_a_payload_allocate_nothing(payload):
    refused(lambda: from_routed_experts([payload], num_experts=8))


def test_payloads_in_payloads_in_payloads():
    for key in ("routed_experts", "data", "meta_info"):
        payload: object = "AAAA"
        for _ in range(5000):
            payload = {key: payload}
        refused(lambda given=payload: from_routed_experts([given], num_experts=8, num_topk=1, num_layers=3))


def stored(path: Path, dtype: str, data: bytes, shape: list[int], name: str = "topk_ids") -> Path:
    """A trace in safetensors with one tensor of any dtype; the file is right otherwise."""
    good = {"seq_len": np.array([2]), "num_experts": np.array([8]), "topk_ids": np.zeros((2, 2, 1), np.uint8)}
    good.pop(name, None)
    payload = save(good)
    length = int.from_bytes(payload[:8], "little")
    header, body = json.loads(payload[8 : 8 + length]), payload[8 + length :]
    header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body + data)
    return path


@pytest.mark.parametrize(("dtype", "size"), [("BF16", 2), ("F8_E4M3", 1), ("F8_E5M2", 1), ("F8_E8M0", 1)])
def test_formats_that_numpy_lacks_are_named(tmp_path, dtype, size):
    path = stored(tmp_path / "t.safetensors", dtype, bytes(4 * size), [2, 2, 1])
    refused(RoutingTrace.load, path, match=f"topk_ids.*{dtype}")
    path = stored(tmp_path / "t.safetensors", dtype, bytes(4 * size), [2, 2, 1], "topk_weights")
    assert RoutingTrace.load(path).T == 2  # arrays with other names are not read


@pytest.mark.parametrize(
    ("dtype", "shape"), [("U8", [4]), ("U8", [2**62, 2**62]), ("U8", [-1, -8]), ("NO", [8]), ("U8", [8.0]), (3, [8])]
)
def test_a_layout_that_does_not_fit_its_bytes(tmp_path, dtype, shape):
    refused(RoutingTrace.load, stored(tmp_path / "t.safetensors", dtype, bytes(8), shape))


def test_a_header_is_not_larger_than_headers_are(tmp_path):
    text = b"[" * 50 + b"{}," * 10_000_000
    (tmp_path / "t.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    for load in LOADERS[".safetensors"]:
        refused(load, tmp_path / "t.safetensors")
    nested = b'{"a":' * 20_000 + b"1" + b"}" * 20_000
    (tmp_path / "t.safetensors").write_bytes(len(nested).to_bytes(8, "little") + nested)
    for load in LOADERS[".safetensors"]:
        refused(load, tmp_path / "t.safetensors")


def test_control_characters_of_a_file_reach_no_terminal(plan, tmp_path):
    red = "\x1b[31m\x1b]0;x\x07\u202e\n"
    trace = tmp_path / "t.npz"
    np.savez(trace, **{f"a{red}": np.zeros(1)})
    assert "\\x1b" in refused(RoutingTrace.load, trace)
    RoutingTrace(topk_TLK=np.zeros((4, 2, 1), np.uint8), num_experts=8, seq_len_Q=[4], source=red, id=red, model=red).save(trace)
    work = tmp_path / "w.safetensors"
    counts = Workload.from_counts(np.ones((1, 2, 4, 8), np.int32), num_topk=1, model=red, trace_id=red)
    counts.save(work)
    dealt = {"tokens_per_rank": 1, "packer": red, "seed": 0, "over_budget": [], "dropped_micro_steps": 0}
    path = changed(plan, tmp_path / "p.safetensors", planner=red, trace_id=red, dealt=dealt)
    for words in ([str(trace)], [str(work)], [str(path)]):
        found = CliRunner().invoke(main, ["inspect", *words])
        assert found.exit_code == 0, found.stderr
        assert all(line.isprintable() for line in found.stdout.splitlines()), words
        assert "\\x1b" in found.stdout
    assert str(InputError(red)).isprintable() and str(PlanError("x", red, red)).isprintable()


def test_a_plan_file_names_no_code(plan, tmp_path, monkeypatch):
    """Neither a place in a module, nor an entry point, nor a strange argument of a class of ours runs anything."""
    (tmp_path / "evil_plugin.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("foremoe.planner.parsing.entry_point_of", lambda group, name: pytest.fail("plug-ins were looked up"))
    monkeypatch.setattr("foremoe.planner.parsing.load_entry_point", lambda group, name: pytest.fail("a plug-in was imported"))
    trace = tmp_path / "t.npz"
    topk = np.random.default_rng(0).permuted(np.tile(np.arange(8), (16, 2, 1)), axis=2)[:, :, :2]
    np.savez(trace, topk_ids=topk, seq_len=np.full(4, 4), num_experts=8)
    for packer in ("Evil(cmd='x')", "evil_plugin:Evil", "'evil_plugin:Evil'", "Search()", "AsGiven(1, 2, 3)", "(", "AsGiven"):
        dealt = {"tokens_per_rank": 4, "packer": packer, "seed": 0, "over_budget": [], "dropped_micro_steps": 0}
        path = str(changed(plan, tmp_path / "p.safetensors", dealt=dealt))
        page = str(tmp_path / "page.html")
        for words in (["check", path, "--trace"], ["report", "--plan", path, "-o", page]):
            found = CliRunner().invoke(main, [*words, str(trace)])
            assert found.exit_code == 2 and "--workload" in found.stderr, (packer, found.output, found.exception)
    assert "evil_plugin" not in sys.modules


def test_bools_are_zero_or_one(tmp_path):
    arrays = {"topk_ids": np.zeros((3, 2, 1), np.uint8), "seq_len": np.array([3]), "num_experts": np.array([8])}
    payload = bytearray(save(arrays | {"known_T": np.array([True, False, True])}))
    payload[payload.rfind(b"\1\0\1")] = 7
    (tmp_path / "t.safetensors").write_bytes(payload)
    refused(RoutingTrace.load, tmp_path / "t.safetensors", match="known_T")
