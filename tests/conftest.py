"""Settings of all tests."""

import os

import torch
from hypothesis import HealthCheck, settings

# a machine that is busy compiling is slow, not wrong
settings.register_profile("default", deadline=None)
settings.register_profile(
    "fuzz", deadline=None, max_examples=500, database=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # workers share the cores

