"""Runs of layers."""

from mesh_transformer.spec.runs import runs_of, shared_run


def test_stages_share_out_the_run_with_most_layers() -> None:
    """Four repeats of one layer are fewer layers than two of three."""
    runs = runs_of("abcabcdddd")
    assert [(one.period, one.repeats) for one in runs] == [(("a", "b", "c"), 2), (("d",), 4)]
    assert shared_run(runs, 2) == 0
    assert shared_run(runs, 4) == 1
    assert shared_run(runs, 3) is None
