"""The interface through which a run reports its progress, for example to the driver of a pod."""

from mesh_transformer.logs import Sink


class Observer(Sink):
    """Receives the progress of a run, and is one of its sinks. This base class ignores the progress; a subclass
    overrides the methods that it needs. A picture lies on the machine of the run.

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
