"""Settings of all tests."""

import os

import torch
from hypothesis import HealthCheck, settings

# a machine that is busy compiling is slow, not wrong
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.register_profile(
    "fuzz",
    deadline=None,
    max_examples=500,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # workers share the cores


def pytest_configure(config):
    # not in pyproject.toml, where pytest would import the package before its coverage is measured
    config.addinivalue_line("filterwarnings", "error::dualkv_compile.errors.InternalErrorWarning")
