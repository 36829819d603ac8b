"""Holds a worker before a training step: the part of support/gate.py that runs in the worker, as its sitecustomize."""

import importlib.util
import os
import sys
import time
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULE = "mesh_transformer.runtime.training.profile"
FOLDER = os.path.dirname(os.path.abspath(__file__))


def held_at() -> int:
    with open(os.path.join(FOLDER, "step")) as file:
        return int(file.read())


def hold(step: int) -> None:
    """Return when the gate is behind `step`."""
    time.sleep(float(os.environ.get("GATE_PAUSE_S", "0")))
    if step >= held_at():
        name = f"{step}.{os.environ.get('JAX_PROCESS_ID', '0')}"
        with open(os.path.join(FOLDER, name), "w"):
            pass
    while step >= held_at():
        time.sleep(0.005)


class Finder:
    """Wraps the method of the training loop that each step begins with, when its module is imported."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_wrap(module: ModuleType) -> None:
            load(module)
            begin = module.StepProfile.step

            def begin_later(profile: Any, step: int) -> Any:
                hold(step)
                return begin(profile, step)

            module.StepProfile.step = begin_later

        spec.loader.exec_module = load_and_wrap
        return spec


sys.meta_path.insert(0, Finder())
