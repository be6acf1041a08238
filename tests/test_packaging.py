"""Wheel and editable install hold every package, under the names that imports use, and the backend's entry point."""

import os
import pathlib
import subprocess
import sys
import sysconfig

import pytest

ROOT = pathlib.Path(__file__).parent.parent

CHECK = """
import sys, pathlib
import torch
import dualkv_compile.passes, dualkv_compile.kernels
target = pathlib.Path(sys.argv[1]).resolve()
for module in (dualkv_compile, dualkv_compile.passes, dualkv_compile.kernels):
    assert pathlib.Path(module.__file__).resolve().is_relative_to(target), module.__file__
assert "dualkv" in torch._dynamo.list_backends(exclude_tags=()), torch._dynamo.list_backends(exclude_tags=())
backend = torch._dynamo.lookup_backend("dualkv")
import dualkv_compile.backend
assert backend is dualkv_compile.backend.dualkv
import importlib.util
assert importlib.util.find_spec("passes") is None
"""


def run(*command, cwd, **env):
    done = subprocess.run(list(map(str, command)), cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"


@pytest.fixture
def source(tmp_path):
    """A copy of what the build reads: a build leaves files beside pyproject.toml, and reads what an earlier one left."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    for folder in ("dualkv_compile", "dualkv_compile/integrations", "passes", "kernels"):
        (source / folder).mkdir()
        for file in (ROOT / folder).glob("*.py"):
            (source / folder / file.name).write_bytes(file.read_bytes())
    (tmp_path / "elsewhere").mkdir()
    return source


PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def install(wheels, target, cwd):
    (wheel,) = wheels.glob("dualkv_compile-*.whl")
    run(*PIP, "install", "--no-deps", "--no-index", "--target", target, wheel, cwd=cwd)


def test_wheel_installs_under_its_names_and_registers_the_backend(source, tmp_path):
    wheels, target = tmp_path / "wheels", tmp_path / "target"
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", wheels, source, cwd=tmp_path)
    install(wheels, target, tmp_path)
    # only the target's metadata is left of this package, even where the interpreter has an editable install too
    run(sys.executable, "-c", CHECK, target, cwd=tmp_path / "elsewhere", PYTHONPATH=str(target))


def test_editable_install_reads_the_checkout_under_the_same_names(source, tmp_path):
    wheels, target = tmp_path / "wheels", tmp_path / "target"
    wheels.mkdir()
    build = f"from setuptools import build_meta; build_meta.build_editable({str(wheels)!r})"
    run(sys.executable, "-c", build, cwd=source)
    install(wheels, target, tmp_path)
    # -S: without the .pth files of this interpreter, one of which may be an editable install of another checkout
    paths = [str(target), *{sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}]
    begin = f"import site, sys; sys.path[:0] = {paths!r}; site.addsitedir({paths[0]!r})\n"
    run(sys.executable, "-S", "-c", begin + CHECK, source, cwd=tmp_path / "elsewhere")
