"""Groups of layers: a period that repeats."""

from mesh_transformer.spec.layer_groups import layer_groups_of, pipelined_group


def test_stages_share_out_the_group_with_most_layers() -> None:
    """Four repeats of one layer are fewer layers than two of three."""
    groups = layer_groups_of("abcabcdddd")
    assert [(one.period, one.repeats) for one in groups] == [(("a", "b", "c"), 2), (("d",), 4)]
    assert pipelined_group(groups, 2) == 0
    assert pipelined_group(groups, 4) == 1
    assert pipelined_group(groups, 3) is None
