"""How many examples a test draws: few and always the same in `make test`, more and new ones in each round of `make fuzz`."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

FACTOR = 2 if settings.get_current_profile_name() == "fuzz" else 1


def examples(count: int, **more) -> settings:
    return settings(max_examples=count * FACTOR, suppress_health_check=list(HealthCheck), **more)
