"""The environment of a worker process."""

import os

import mesh_transformer
from mesh_transformer.cluster.host import agent


def test_a_worker_imports_the_package_of_its_agent() -> None:
    """The folder that contains the package is first in PYTHONPATH, before another copy of the package."""
    environment = agent._environment({"PYTHONPATH": "/elsewhere"})
    first, *others = environment["PYTHONPATH"].split(os.pathsep)
    assert os.path.samefile(os.path.join(first, "mesh_transformer", "__init__.py"), mesh_transformer.__file__)
    assert others == ["/elsewhere"]
