"""Two processes on the CPU, groups whole on each rank, against one unmarked eager process: DDP, FSDP2, tensor parallelism."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch.distributed as dist

HERE = pathlib.Path(__file__).parent
pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo")


def run(tmp_path, *names, processes=2, timeout=120):
    path = tmp_path / "results.json"
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", str(HERE / "distributed_worker.py")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])}
    process = subprocess.Popen(
        [sys.executable, *command, str(path), *names], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # torch.distributed.run ends its workers
        pytest.fail(f"no result after {timeout} s: {process.communicate()[0][:3000]}")
    assert process.returncode == 0, output[-3000:]
    return json.loads(path.read_text())


def packed_throughout(result, sites=2):
    """Every piece that a marked tensor reaches is packed, every attention site rewritten."""
    assert result["worst"] < 1e-6
    with_tokens = [r for r in result["reports"] if r["variant"] != "plain"]
    assert {r["variant"] for r in with_tokens} == {"packed, padding kept"}, with_tokens
    assert all(r["packed"] == result["tokens_with_padding"] < r["dense"] and not r["barriers"] for r in with_tokens), with_tokens
    assert sum(r["rewritten"] * r["calls"] for r in with_tokens) == sum(r["sites"] * r["calls"] for r in with_tokens) == sites
    return with_tokens


def test_ddp(tmp_path):
    """Every piece between two buckets is packed: queries, keys, masks and rotary tables cross them, flattened hidden states as well."""
    results = run(tmp_path, "ddp", "ddp_flattened", "ddp_in_one_graph")
    for name in ("ddp", "ddp_flattened"):
        assert len(packed_throughout(results[name])) == len(results[name]["reports"]) >= 4
    whole = results["ddp_in_one_graph"]
    assert whole["worst"] < 1e-6
    assert [(r["variant"], r["rewritten"], r["packed"]) for r in whole["reports"]] == [("packed", 2, whole["tokens"])]


def test_fsdp(tmp_path):
    """FSDP2's hooks break the graph at each layer; with checkpointing as well. Per-layer compilation leaves padding out."""
    results = run(tmp_path, "fsdp", "fsdp_right_padded", "fsdp_per_layer", "fsdp_reads_padding", "fsdp_clips_gradients")
    packed_throughout(results["fsdp"])
    packed_throughout(results["fsdp_right_padded"])
    per_layer = results["fsdp_per_layer"]
    assert per_layer["worst"] < 1e-6
    assert [(r["variant"], r["rewritten"], r["packed"]) for r in per_layer["reports"]] == [("packed", 1, per_layer["tokens"])] * 2
    # Python between two layers that reads padding, or that looks at the gradient of every row
    assert results["fsdp_reads_padding"]["worst"] < 1e-6
    assert results["fsdp_clips_gradients"]["worst"] < 1e-6


def test_tensor_parallelism_runs_dense_and_says_why(tmp_path):
    (result,) = run(tmp_path, "tensor_parallel").values()
    (report,) = result["reports"]
    assert result["worst"] < 1e-6
    assert report["variant"] == "dense" and report["sites"] == 2 and "is a DTensor" in report["notes"][0]
