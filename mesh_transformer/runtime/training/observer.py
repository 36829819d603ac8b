"""The interface through which a run reports its progress, for example to the driver of a pod."""

from mesh_transformer.logs import Scalars


class Observer:
    """Receives the progress of a run. This base class ignores it; a subclass overrides the methods that it needs.

    The thread of the run makes all calls. The time between two calls depends on the phase.
    """

    # whether the observer shows the progress, so that the run needs no progress bar of its own
    shows_progress = False

    def started(self, step: int, total: int, steps_redone: int) -> None:
        """The run has its state, after `step` of `total` steps. `steps_redone` counts the repeated steps of all
        restarts."""

    def phase(self, name: str, step: int) -> None:
        """The run enters the phase `name`: start, open, data, compile, step, validate, save or finish.

        Args:
            step: the current step.
        """

    def write(self, step: int, scalars: Scalars) -> None:
        """The metrics of a step, as in the metrics file. An observer is one of the run's sinks."""

    def picture(self, step: int, name: str, path: str) -> None:
        """A picture of the run was drawn: a PNG at `path`, on the machine of the run."""

    def text(self, step: int, name: str, text: str) -> None:
        """A text of the run, such as a sample."""

    def close(self) -> None:
        """No more metrics follow."""
