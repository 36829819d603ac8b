"""The stages of a pipeline (mesh.pp), and the layers that they share out."""

from mesh_transformer.config.mesh import MeshConfig, MeshShape, check_multiple
from mesh_transformer.errors import UserError, listed
from mesh_transformer.fields import Size
from mesh_transformer.spec import Decoder


def stages(mesh: MeshConfig, shape: MeshShape) -> int:
    """The groups of consecutive layers into which a pipeline cuts a run: of all stages, in all rounds; 1 without
    one."""
    return shape["pp"] * mesh.rounds_of_layers if shape["pp"] > 1 else 1


def layer_loop_trips(decoder: Decoder, stages: int = 1) -> int:
    """The trips of the loop over the repeats of the shared run, or of a stage's group of them."""
    run = decoder.shared_run(stages)
    return 0 if run is None else decoder.runs[run].repeats // stages


def check_stages(decoder: Decoder, mesh: MeshConfig, shape: MeshShape) -> None:
    """Refuse stages that share out no run of layers.

    Raises:
        UserError: names the runs, and the sizes of mesh.pp that fit.
    """
    pp, rounds, runs = shape["pp"], mesh.rounds_of_layers, decoder.runs
    if decoder.shared_run(stages(mesh, shape)) is not None:
        return
    if len(runs) == 1 and len(runs[0].period) == 1:
        also = ", or set mesh.schedule=1f1b" if rounds > 1 else ""
        check_multiple(Size("model.layers", runs[0].layers), "mesh.pp", pp, also, times=rounds)
    longest = max(run.repeats for run in runs)
    fit = [n for n in range(1, longest + 1) if n == 1 or decoder.shared_run(n * rounds) is not None]
    each = [f"{run.repeats} x {len(run.period)}" for run in runs]
    product = f"mesh.pp {pp} x mesh.rounds {rounds}" if rounds > 1 else f"mesh.pp {pp}"
    raise UserError(
        f"{product} divides no run of layers: the layers are {listed(each)} (repeats x layers of a period), and stages "
        f"share out the repeats of one run: set mesh.pp to {listed(list(map(str, fit)))}"
    )
