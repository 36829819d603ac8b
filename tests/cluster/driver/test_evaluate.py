"""eval_harness.py on a Ray cluster gives the same numbers as one process."""

import pytest

pytestmark = [pytest.mark.faults, pytest.mark.nightly]


def test_the_same_numbers_on_a_ray_cluster(evaluated, ray_nodes):
    together = evaluated("--ray-address", ray_nodes.address)
    assert together == pytest.approx(evaluated(), rel=1e-5)
