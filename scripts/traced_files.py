"""The files of the package whose functions run in a forward pass, a training step and a served request.

    python scripts/traced_files.py            # exit code 1 if a page lists other files
    python scripts/traced_files.py --write    # write them to docs/training_step.md and docs/served_request.md

The model is a small GPT-J. A file that is imported, and has no function that runs, is not one of them.
"""

import argparse
import asyncio
import http.client
import json
import sys
import textwrap
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mesh_transformer"
FORWARD, STEP, REQUEST = "forward", "step", "request"
PAGES = {STEP: ROOT / "docs" / "training_step.md", REQUEST: ROOT / "docs" / "served_request.md"}
BEGIN, END = "<!-- traced files -->\n", "<!-- end of traced files -->\n"
COLUMNS = 120
MODEL = {"family": "gptj", "layers": 2, "d_model": 32, "n_heads": 4, "n_vocab": 257, "seq": 32, "pe_rotary_dims": 8}


class Entered:
    """Notes the files of the package whose functions begin while it is a context, in this thread and in threads that
    start after it was made."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        self._noting = False
        self._others = threading.gettrace(), sys.gettrace()
        threading.settrace(self._enter)

    def __enter__(self) -> None:
        self._noting = True
        sys.settrace(self._enter)

    def __exit__(self, *_: object) -> None:
        self._noting = False
        of_threads, of_this = self._others
        # mypy does not know that there may be none
        threading.settrace(of_threads)  # type: ignore[arg-type]
        sys.settrace(of_this)

    def _enter(self, frame: FrameType, event: str, _: Any) -> None:
        # an import inside a function runs the file, but no function of it
        if self._noting and event == "call" and frame.f_code.co_name != "<module>":
            self._files.add(frame.f_code.co_filename)

    @property
    def files(self) -> list[str]:
        """By their paths below the package."""
        files = (Path(file) for file in self._files)
        return sorted(file.relative_to(PACKAGE).as_posix() for file in files if file.is_relative_to(PACKAGE))


def traced_files() -> dict[str, list[str]]:
    """The files by what runs. Call it in a new process: what was traced before is not traced again."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    found = {}
    for name, run in (FORWARD, forward), (STEP, step), (REQUEST, request):
        entered = Entered()
        run(entered)
        found[name] = entered.files
    return found


def _program() -> Any:
    import jax

    from mesh_transformer.config import parse_config
    from mesh_transformer.models.placement import Placement
    from mesh_transformer.train.step import TrainProgram

    config = parse_config({"model": MODEL, "data": {"batch_size": 8}})
    return TrainProgram(Placement.of(config, jax.devices()[:1]), config)


def forward(entered: Entered) -> None:
    """The trace of a forward pass without a cache."""
    import jax
    import jax.numpy as jnp

    from mesh_transformer.parallel.sharding import use

    program = _program()
    model, tokens = program.model, jax.ShapeDtypeStruct((1, MODEL["seq"]), jnp.int32)
    with entered, use(program.partition):
        jax.jit(lambda params, tokens: model.apply(params, tokens)[0]).lower(model.shapes, tokens)


def step(entered: Entered) -> None:
    """The trace of a training step."""
    from mesh_transformer.train.step import lower_step

    program = _program()
    with entered:
        lower_step(program, program.config.optimizer.gradient_accumulation_steps, 8)


def request(entered: Entered) -> None:
    """A completion by a server. The request traces the programs, as the warm-up of a server does before it."""
    import jax

    from mesh_transformer.data.tokens.tokenizer import ByteTokenizer
    from mesh_transformer.infer.cpu.packed import pack
    from mesh_transformer.infer.engine import SlotEngine
    from mesh_transformer.infer.program_table import ProgramCounts
    from mesh_transformer.runtime.serving.app import make_app
    from mesh_transformer.runtime.serving.keys import ApiKeys
    from mesh_transformer.runtime.serving.loop import EngineLoop
    from mesh_transformer.runtime.serving.model import ServedModel
    from mesh_transformer.runtime.serving.start import ServeOptions, Service, bind

    class Engine(SlotEngine):
        program_counts = ProgramCounts(0, 0)

        def warm_up(self) -> None:
            pass

        def compile_rest(self, on_compiled: Callable[[], None]) -> None:
            pass

        def close(self) -> bool:
            return True

    placement = _program().placement
    model, params = placement.model, placement.model.init(jax.random.key(0))
    parts = [(stage, params[stage]) for stage in ("embed", "head")]
    for modules in model.rows_by_layer:
        layer = {name: jax.tree.map(lambda x, r=row: x[r], params["blocks"][of]) for name, (of, row) in modules.items()}
        parts.append(("blocks", layer))
    engine = Engine(placement.for_decoding(), pack(parts, model.decoder), slots=1)
    loop, listener = EngineLoop(lambda: engine, slots=1, max_queue=1), bind("127.0.0.1", 0)
    served = ServedModel("tiny", model.decoder.n_vocab, ByteTokenizer(), loop, 600.0)
    keys = ApiKeys()
    app = make_app(served, keys, (), ServeOptions().names(listener, keys))
    service = Service(served, app, listener, 30.0)

    def ask() -> None:
        client = http.client.HTTPConnection(*listener.getsockname(), timeout=600)
        body, headers = json.dumps({"prompt": "a", "max_tokens": 2}), {"Content-Type": "application/json"}
        client.request("POST", "/v1/completions", body, headers)
        response = client.getresponse()
        if response.status != 200:
            raise RuntimeError(response.read().decode())

    async def answer() -> None:
        stopping = asyncio.Event()
        running = asyncio.create_task(service.run(stopping, asyncio.Event()))
        while loop.state != "ok":
            await asyncio.sleep(0.01)
        with entered:
            await asyncio.to_thread(ask)
        stopping.set()
        await running

    asyncio.run(answer())


def render(page: Path, files: Sequence[str]) -> str:
    """The text of a page with these files between its marks. The rest is written by hand."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + as_markdown(files) + "\n" + END + rest.partition(END)[2]


def as_markdown(files: Sequence[str]) -> str:
    """A list of the folders of the package, each with its files."""
    folders: dict[str, list[str]] = defaultdict(list)
    for file in files:
        folder, slash, name = file.partition("/")
        folders[folder + slash if slash else ""].append(name or folder)
    lines = []
    for folder, names in sorted(folders.items()):
        text = ", ".join(f"`{name}`" for name in names)
        lines += textwrap.wrap(f"- `{folder}`: {text}" if folder else f"- {text}", COLUMNS, subsequent_indent="  ")
    return "\n".join(lines) + "\n"


def outdated(files: Mapping[str, Sequence[str]]) -> list[str]:
    """A line for each page that lists other files than these."""
    return [
        f"{page.relative_to(ROOT)} lists other files than run: python scripts/traced_files.py --write"
        for name, page in PAGES.items()
        if page.read_text(encoding="utf-8") != render(page, files[name])
    ]


def main() -> int:
    """Compare or write. Returns 1 if a page lists other files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the lists")
    arguments = parser.parse_args()
    # the package beside this file, whichever one is installed
    sys.path.insert(0, str(ROOT))
    files = traced_files()
    if arguments.write:
        for name, page in PAGES.items():
            page.write_text(render(page, files[name]), encoding="utf-8")
    faults = outdated(files)
    sys.stdout.write("\n".join([*(f"{name}: {len(some)} files" for name, some in files.items()), *faults]) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
