"""A decoding engine with the weights of a checkpoint, on the devices of this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from mesh_transformer import platforms
from mesh_transformer.checkpoint.open import Checkpoint
from mesh_transformer.config import Config
from mesh_transformer.errors import byte_size
from mesh_transformer.infer.engine import SlotEngine
from mesh_transformer.infer.program_table import CompileThread, Program, ProgramCounts
from mesh_transformer.logs import Progress, log
from mesh_transformer.runtime.session import memory
from mesh_transformer.runtime.session.session import Session
from mesh_transformer.runtime.session.weights import read_params


def open_engine(config: Config, checkpoint: Checkpoint, *, slots: int, context: int | None = None) -> ServingEngine:
    """Load the parameters of a checkpoint of any format onto the config's mesh, and allocate a cache of `slots`
    sequences.

    Args:
        context: positions per slot. None: the context of the model.

    Raises:
        UserError: the devices do not fit the mesh, or the checkpoint does not fit the config; or parameters and cache
            do not fit the memory.
    """
    session = Session.open(config)
    placement = session.whole_sequences.for_decoding()
    memory.check_serving(session, placement, slots, context)
    log.info("reading %s", checkpoint)
    weights = read_params(session, checkpoint, for_decode=True)
    log.info("parameters of step %d from %s", weights.step, checkpoint)
    engine = ServingEngine(placement, weights.params, slots=slots, context=context)
    log.info("cache of %s, slots: %d, context: %d", byte_size(engine.cache_bytes), slots, engine.context)
    return engine


class ServingEngine(SlotEngine):
    """A `SlotEngine` whose programs are compiled before it serves, and by a thread while it serves.

    Until then, where a compiled program can do the work of another one, it does: a longer length for a shorter one,
    all slots for one, a whole prompt for its end after a cached prefix. A request that needs a missing program waits
    for it, and that program is the next one.
    """

    _thread: CompileThread | None = None
    # until the warm-up, a call compiles its program
    _on_demand = True

    def compile(self, program: Program) -> None:
        """See `SlotEngine`. Compiled programs are kept on disk."""
        if program not in self.compiled:
            with platforms.CompileCache():
                super().compile(program)

    def warm_up(self) -> None:
        """Compile the programs that a short chat needs, and those that move slots."""
        programs = self.first_programs()
        progress = Progress("compiling", len(programs), unit="programs")
        # one thread traces a program while the other compiles or loads one
        with ThreadPoolExecutor(2) as pool:
            for count, _ in enumerate(pool.map(self.compile, programs), 1):
                progress.update(count)
        progress.close()
        self._on_demand = False
        # a slot that was in use has run them
        if not any(self._ends):
            self.run_once()

    def compile_rest(self, on_compiled: Callable[[], None]) -> None:
        """Start to compile the other programs, in the order of `programs`. Scored ones are compiled when a request
        needs them.

        Args:
            on_compiled: called in the thread after each program.
        """
        rest = [program for program in self.programs() if program not in self.compiled]
        self._thread = CompileThread(self.compile, rest, on_compiled)
        self._thread.start()

    def available(self, program: Program) -> bool:
        """Whether a program is compiled.

        Raises:
            Exception: the compilation of a program failed.
        """
        if self._thread is not None and self._thread.failure is not None:
            raise self._thread.failure
        return self._on_demand or program in self.compiled

    def want(self, program: Program) -> None:
        """See `SlotEngine`."""
        if self._thread is not None:
            self._thread.want(program)

    @property
    def program_counts(self) -> ProgramCounts:
        """How many programs are compiled and how many will be."""
        left = self._thread.left if self._thread else len(set(self.first_programs()) - self.compiled.keys())
        return ProgramCounts(len(self.compiled), left)

    def close(self) -> bool:
        """Begin no further compilation. Returns whether none runs."""
        return self._thread is None or self._thread.close()
