"""What a run tells whoever watches it from outside its thread, such as the driver of a pod."""

from mesh_transformer.logs import Scalars


class Observer:
    """Nobody: what a run tells is dropped. A subclass overrides what it wants to know.

    The run's own thread makes all calls, between which it may compute for long: how long, `phase` announces.
    """

    shows_progress = False  # whether the run's own progress bar would be a second one

    def started(self, step: int, total: int, steps_redone: int) -> None:
        """The state is there, after `step` of `total` steps; `steps_redone` counts those of all restarts."""

    def phase(self, name: str, step: int) -> None:
        """The run turns to `name`: start, open, data, compile, step, validate, save or finish; `step` is the one at hand."""

    def write(self, step: int, scalars: Scalars) -> None:
        """The numbers of a step, as they are written to the metrics file: an observer is one of the run's sinks."""

    def close(self) -> None:
        """No more numbers come."""
