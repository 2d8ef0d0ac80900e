"""Each function of foremoe that asks for a GPU names the part of `bench.gpu` that runs it on one, or stands among the rest."""

import ast
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from bench.gpu.__main__ import FAST, RIGHT

FOREMOE = Path(__file__).resolve().parents[1] / "foremoe"

# Function -> a part of `bench.gpu right` or `fast`.
RUN_BY = {
    "calibrate.launch._num_gpus": "calibrate",
    "calibrate.launch.join": "calibrate",
    "calibrate.measure._hardware": "calibrate",
    "calibrate.measure._memory_bytes": "calibrate",
    "calibrate.measure._peak": "calibrate",
    "calibrate.measure.measure": "calibrate",
    "calibrate.stopwatch.Stopwatch._once": "calibrate",
    "distributed.group.TorchGroup.all_to_all": "ranks",
    "distributed.private.private_group": "ranks",
    "integrations.megatron.buffers.MegatronBuffers.__init__": "megatron",
    "integrations.megatron.checks.are_offloaded": "megatron",
    "runtime.fused.fuses": "layer",
    "runtime.holes.numbers_of": "layer",
    "runtime.products.SlotProducts.add": "layer",
    "runtime.products._has_grouped_product": "layer",
    "runtime.products.add_product": "layer",
    "runtime.runtime.Runtime._check_experts": "ranks",
    "testing.transfer_tests.TransferTests.on_ranks": "transfer",
    "transfer.backends.default_backends": "megatron",
    "transfer.collective.Collective.open": "ranks",
    "transfer.cupy_peer.CupyPeer.open": "ranks",
    "transfer.cupy_peer.cuda_runtime": "ranks",
    "transfer.host_store.HostStore.read": "ranks",
    "transfer.host_store.HostStore.write": "ranks",
    "transfer.pinned_host.PinnedHost.open": "ranks",
    "transfer.staging.require_on_gpu": "transfer",
    "transfer.streams.SideStream.__init__": "ranks",
    "transfer.timeline.Wait._now": "ranks",
    "transfer.timeline.Wait.seconds": "ranks",
}
# Their branch for GPUs has run on none; on a CPU all have tests.
NEVER_RUN = {
    "cli.doctor._gpus",
    "distributed.watch.end_waits",
    "integrations.megatron.home_moves._copy_aside",
    "integrations.verl.engine",
    "runtime.slotted.SlottedRows.__init__",
}


def asks_for_a_gpu(node: ast.AST) -> bool:
    """True for `x.is_cuda`, `cuda.is_available` and the word "cuda"."""
    if isinstance(node, ast.Attribute):
        return node.attr == "is_cuda" or (node.attr == "is_available" and ast.unparse(node.value).endswith("cuda"))
    return isinstance(node, ast.Constant) and node.value == "cuda"


def functions() -> set[str]:
    found = set()

    def walk(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = f"{name}.{child.name}" if isinstance(child, ast.FunctionDef | ast.ClassDef) else name
            if asks_for_a_gpu(child):
                found.add(name)
            walk(child, inner)

    for path in sorted(FOREMOE.rglob("*.py")):
        walk(ast.parse(path.read_text()), ".".join(path.relative_to(FOREMOE).with_suffix("").parts))
    return found


def test_every_branch_for_gpus_names_what_runs_it() -> None:
    assert functions() == {*RUN_BY, *NEVER_RUN} and not NEVER_RUN & {*RUN_BY}
    assert {*RUN_BY.values()} <= {*RIGHT, *FAST}
