"""The command line: exit statuses, what it prints, and what it says about wrong arguments."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

import dualkv_compile
from dualkv_compile import cli, demo


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_doctor_checks_this_machine(capsys):
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed and "kernels, cpu" in printed
    assert "check, cpu        ok: 1 of 1 attention sites rewritten" in printed


def test_doctor_reports_a_difference(monkeypatch, capsys):
    from dualkv_compile import doctor

    monkeypatch.setattr(doctor, "check", lambda device: (1.0, 1))
    assert cli.main(["doctor"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_it_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "dualkv_compile", "--help"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("demo", "explain", "bench", "doctor"))


def test_explain_counts_tokens_by_the_formula(tmp_path, capsys):
    arguments = ["explain", "--arch", "llama", "--rows", "3", "--prompt", "10", "--response", "4", "--override", "num_hidden_layers=1"]
    assert cli.main([*arguments, "--dump", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "1 of 1 rewritten" in printed
    (written,) = tmp_path.glob("*.report.json")
    report = json.loads(written.read_text())
    assert (report["dense_tokens"], report["packed_tokens"]) == (3 * (10 + 4), 10 - 1 + 3 * (4 + 1))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["explain", "--arch", "no-such-model"], "cannot build 'no-such-model'"),
        (["bench", "no-such-benchmark"], "expected one of"),
    ],
)
def test_what_cannot_run_is_said(arguments, words, capsys):
    assert cli.main(arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["explain", "--rows", "0"], "expected at least 1, got 0"),
        (["explain", "--override", "nothing"], "expected KEY=VALUE"),
        (["demo", "--steps", "0"], "expected at least 1, got 0"),
        ([], "required"),
    ],
)
def test_wrong_arguments_are_named(arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_the_demo_names_what_to_install(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "reasoning_gym" else find(name))
    assert cli.main(["demo"]) == 2
    assert "pip install reasoning-gym" in capsys.readouterr().err


def test_bench_without_a_gpu_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench"]) == 2
    assert "CUDA GPU" in capsys.readouterr().err


def test_override_reads_literals_and_strings():
    assert cli.override("layers=3") == ("layers", 3)
    assert cli.override("kind=[1, 'a']") == ("kind", [1, "a"])
    assert cli.override("act=silu") == ("act", "silu")


def a_step(**changes):
    good = {f: 1 for f in demo.Step.__dataclass_fields__} | {"spread": True, "gradient_difference": 1e-6, "rewritten": 4}
    return demo.Step(**{**good, **changes})


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, None),
        ({"gradient_difference": 1e-2}, "gradients differ"),
        ({"gradient_difference": float("nan")}, "gradients differ"),
        ({"gradient_difference": float("inf")}, "gradients differ"),
        ({"spread": False}, "rewards"),
        ({"rewritten": 0}, "no attention site"),
    ],
)
def test_the_demo_fails_where_it_proves_nothing(changes, words):
    found = demo.problems([a_step(), a_step(**changes)])
    assert found == [] if words is None else len(found) == 1 and words in found[0]


def test_a_gradient_that_is_missing_or_not_finite_is_a_difference():
    ours, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    assert demo.gradient_difference(ours, other) == float("inf")
    for p, q in zip(ours.parameters(), other.parameters(), strict=True):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    assert demo.gradient_difference(ours, other) == 0
    ours.weight.grad[0, 0] = float("nan")
    assert demo.gradient_difference(ours, other) == float("inf")


def test_worked_solutions_of_the_task_are_right():
    task = demo.Task(0, 40)
    for entry in task.data:
        answer = demo.solution(entry).rsplit(" ", 1)[-1]
        assert answer == entry["answer"]
        assert task.reward_of(demo.solution(entry), entry) > task.reward_of("no idea", entry)
    assert dualkv_compile.reports() == []
