"""The arrays that mechanisms, layers and decoders declare, against the models; and layers cut into groups."""

import functools

import jax
import jax.numpy as jnp
import pytest
from support.builders import TINY, float32_model
from support.families import MODELS

from mesh_transformer.checkpoint.native.manifest import flatten
from mesh_transformer.config import ComputeConfig, parse_config
from mesh_transformer.fields import PIPELINED, STACKS, WHOLE
from mesh_transformer.models.block import block, encoded_positions, positions_of
from mesh_transformer.models.model import Model, embed, final_norm, unembed
from mesh_transformer.models.modules import Context
from mesh_transformer.models.stack import by_group
from mesh_transformer.ops.attend.causal import Causal
from mesh_transformer.parallel.sharding import collect_axes
from mesh_transformer.spec import Decoder, LayerGroup, in_group, layer_groups_of, neighbours, pipelined_group, starts

CLASSIC = {
    "gptj": {},
    "gptj learned positions": {"pe": "fixed"},
    "gptj t5": {"pe": "t5", "norm": "scalenorm-bias"},
    "gptj rmsnorm": {"norm": "rmsnorm"},
}
ALL = {**{name: {**TINY["model"], **changes} for name, changes in CLASSIC.items()}, **MODELS}


def decoder_of(name: str) -> Decoder:
    """The decoder of a tiny model."""
    return parse_config({"model": ALL[name]}).model.decoder()


@pytest.mark.parametrize("name", ALL)
def test_arrays_are_the_parameters_of_the_model(name: str) -> None:
    config = parse_config({"model": ALL[name]}).model
    shapes = jax.eval_shape(float32_model(config).init, jax.random.key(0))
    found = {path: array.shape for path, array in config.decoder().arrays().items()}
    assert found == {path: leaf.shape for path, leaf in flatten(shapes).items()}


@pytest.mark.parametrize("name", ALL)
def test_arrays_have_the_dimension_names_of_the_modules(name: str) -> None:
    decoder = decoder_of(name)
    model = Model(decoder, ComputeConfig(dtype="float32", remat="none"))
    tokens, x = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1, decoder.d_model))
    encoded = encoded_positions(decoder, tokens)
    assert collect_axes(lambda: embed(decoder, tokens, tokens)[0]) == model.stage_axes["embed"]
    head = collect_axes(lambda: final_norm(decoder, x)) | collect_axes(lambda: unembed(decoder, x))
    assert head == model.stage_axes["head"]
    for kind in decoder.kinds:
        ctx = Context(Causal(), positions_of(decoder, kind.attention.positions, encoded, 0))
        assert collect_axes(functools.partial(block, decoder, kind, x, ctx)) == model.stage_axes["blocks"][kind]


@pytest.mark.parametrize("virtual_stages", [1, 2, 3])
@pytest.mark.parametrize("name", ALL)
def test_stacks_of_a_pipeline_are_split(name: str, virtual_stages: int) -> None:
    decoder = decoder_of(name)
    pipelined = decoder.pipelined_group(virtual_stages)
    for path, array in decoder.arrays(virtual_stages).items():
        assert len(array.axes) == len(array.shape), path
        stage, _, rest = path.partition("/")
        if stage == "blocks":
            group = int(rest.partition("/")[0]) if len(decoder.layer_groups) > 1 else 0
            assert array.axes[0] == (PIPELINED if group == pipelined else WHOLE), path


@pytest.mark.parametrize("name", ALL)
def test_only_matrices_multiply_tokens(name: str) -> None:
    decoder = decoder_of(name)
    for path, array in decoder.arrays().items():
        table = path.startswith("embed/")
        # a stack of vectors has two dimensions, of vectors of all experts three
        is_matrix = len([axis for axis in array.axes if axis not in (*STACKS, "experts")]) > 1 and not table
        assert (array.used > 0) == is_matrix, path
        assert array.used <= array.size, path
        # a matrix of zeros would learn nothing
        assert (array.stddev is not None) == (is_matrix or path.endswith(("tokens/w", "positions/w", "relative/w"))), (
            path
        )
        if not is_matrix:
            assert array.role == "other", path
        if array.used not in (0, array.size):
            assert "experts" in array.axes, path


@pytest.mark.parametrize("name", ALL)
def test_each_branch_reads_and_adds(name: str) -> None:
    decoder = decoder_of(name)
    for kind in decoder.kinds:
        for mechanism in kind.mechanisms:
            roles = {array.role for array in mechanism.arrays(decoder.d_model).values()}
            assert {"input", "output"} <= roles, (name, mechanism)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("", []),
        ("d", [("d", 1)]),
        ("d" * 26, [("d", 26)]),
        # DeepSeek-V3
        ("d" * 3 + "e" * 58, [("d", 3), ("e", 58)]),
        # JAXformer
        ("ddddde" * 8, [("ddddde", 8)]),
        ("dedee", [("de", 2), ("e", 1)]),
        ("dede", [("de", 2)]),
        ("edd", [("e", 1), ("d", 2)]),
        ("abc", [("a", 1), ("b", 1), ("c", 1)]),
        # a period is as short as possible
        ("abababab", [("ab", 4)]),
    ],
)
def test_layer_groups_of(kinds: str, expected: list[tuple[str, int]]) -> None:
    groups = layer_groups_of(kinds)
    assert [("".join(group.period), group.repeats) for group in groups] == expected
    assert "".join(kind for group in groups for kind in group.kinds) == kinds
    assert starts(groups)[-1] == len(kinds) == sum(group.layers for group in groups)


@pytest.mark.parametrize(
    ("kinds", "virtual_stages", "expected"),
    [
        ("", 2, None),
        ("dddd", 1, 0),
        ("dddd", 4, 0),
        ("dddd", 3, None),
        # the longest group
        ("d" * 3 + "e" * 58, 2, 1),
        # the longest that the number of virtual stages divides
        ("d" * 3 + "e" * 58, 3, 0),
        ("d" * 3 + "e" * 58, 4, None),
        # repeats are shared out, not layers
        ("ddddde" * 8, 8, 0),
        ("ddddde" * 8, 6, None),
        # of equally long groups the last
        ("ddee", 2, 1),
    ],
)
def test_pipelined_group(kinds: str, virtual_stages: int, expected: int | None) -> None:
    assert pipelined_group(layer_groups_of(kinds), virtual_stages) == expected


def test_neighbours_are_equal_layers_that_follow_each_other() -> None:
    assert neighbours("ddddde") == [("d", 5), ("e", 1)]
    assert neighbours("ded") == [("d", 1), ("e", 1), ("d", 1)]
    assert neighbours("") == []


@pytest.mark.parametrize("name", ALL)
def test_stacks_are_the_rows_of_the_groups(name: str) -> None:
    decoder = decoder_of(name)
    arrays = decoder.arrays()
    found = {path: len(layers) for stacks in decoder.stacks.values() for path, layers in stacks}
    blocks = {path.removeprefix("blocks/"): array for path, array in arrays.items() if path.startswith("blocks/")}
    assert found == {path: array.shape[0] for path, array in blocks.items()}
    for parameter, stacks in decoder.stacks.items():
        rows = [layer for _, layers in stacks for layer in layers]
        has = [parameter in layer.kind.arrays(decoder.d_model) for layer in decoder.layers]
        assert rows == [layer for layer, one in enumerate(has) if one]


def test_names_in_groups() -> None:
    groups = (LayerGroup(("d",), 1), LayerGroup(("e",), 2))
    assert in_group("ff/in", 0, 1) == "ff/in"
    assert by_group({"0/ff/in": {"w": 1}, "1/ff/in": {"w": 2}}, groups) == [{"ff/in": {"w": 1}}, {"ff/in": {"w": 2}}]
    # the eleventh group is not a part of the second
    many = [LayerGroup((str(number),), 1) for number in range(11)]
    blocks = {in_group("ff/in", number, 11): {"w": number} for number in range(11)}
    assert by_group(blocks, many)[1] == {"ff/in": {"w": 1}}
