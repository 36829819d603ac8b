"""The draws of a mixture, against a model of their definition."""

import json
from fractions import Fraction

import pytest

from mesh_transformer.config.mixture import TrainSource
from mesh_transformer.data.batches.mixture import Mixture, position_at
from mesh_transformer.errors import UserError

SIZES = {"code": 41, "pile": 97, "web": 30}
# code and web tie; pile changes at step 12; web has no more records after 60 draws
SOURCES = {
    "pile": {"weight": {"0": 0.5, "12": 0.2, "40": 0.6}},
    "code": {"weight": 0.25},
    "web": {"weight": 0.25, "epochs": 2},
}


def mixture(sources=SOURCES, draws=8, seed=5):
    made = {name: TrainSource(set=f"{name}.index", **fields) for name, fields in sources.items()}
    return Mixture(made, SIZES, seed, draws)


def names(mix, steps):
    return [mix.names[draw.source] for _ in range(steps) for draw in mix.next_step()]


def weight_at(source, step):
    weight = source["weight"]
    if not isinstance(weight, dict):
        return Fraction(str(weight))
    return [Fraction(str(w)) for first, w in weight.items() if int(first) <= step][-1]


def model(sources, draws, steps):
    """The source of each draw, by exact fractions over the whole history."""
    history, changed, before = [], 0, None
    for step in range(1, steps + 1):
        for _ in range(draws):
            left = {
                name: source
                for name, source in sources.items()
                if "epochs" not in source or history.count(name) < source["epochs"] * SIZES[name]
            }
            weights = {name: weight_at(source, step) for name, source in left.items()}
            weights = {name: weight for name, weight in weights.items() if weight}
            if weights != before:
                changed, before = len(history), weights
            since = history[changed:]

            def lag(name, weights=weights, since=since):
                return weights[name] / sum(weights.values()) * (len(since) + 1) - since.count(name)

            history.append(min(weights, key=lambda name: (-lag(name), name)))
    return history


def test_the_source_that_lags_most_is_drawn():
    """Ties by name, a change of weights at the first draw of its step, and a source that ends inside a step."""
    want = model(SOURCES, 8, 60)
    assert names(mixture(), 60) == want
    assert want.count("web") == 60
    # the end of web lies inside a step
    assert want[::-1].index("web") % 8


@pytest.mark.parametrize("weights", [(0.7, 0.3), (1, 1), (5, 1e-3), (1, 1, 1), (0.1, 0.2, 0.7), (0.61, 0.24, 0.15)])
def test_counts_stay_within_a_record_of_their_shares(weights):
    sources = {name: {"weight": weight} for name, weight in zip(SIZES, weights, strict=False)}
    drawn = names(mixture(sources, draws=1000), 1)
    for count in range(1, len(drawn) + 1):
        for name, weight in zip(SIZES, weights, strict=False):
            assert abs(drawn[:count].count(name) - weight / sum(weights) * count) <= 1


@pytest.mark.parametrize("weights", [(0.3, 0.3, 0.1), (0.3, 0.1, 0.2), (0.1, 0.3, 0.7), (0.2, 0.6, 0.3)])
def test_ties_are_exact(weights):
    """Lags of floating-point numbers would not tie: 0.1 x 3 is not 0.3."""
    sources = {name: {"weight": weight} for name, weight in zip(SIZES, weights, strict=True)}
    assert names(mixture(sources, draws=60), 2) == model(sources, 60, 2)


def test_equal_sources_take_turns_by_name():
    sources = {"web": {"weight": 0.3}, "code": {"weight": 0.3}, "pile": {"weight": 0.1}}
    assert names(mixture(sources, draws=7), 2) == ["code", "web", "pile", "code", "web", "code", "web"] * 2


def test_each_record_comes_once_a_pass_and_passes_differ():
    mix = mixture({"code": {"weight": 1}}, draws=41)
    passes = [[mix.record(draw) for draw in mix.next_step()] for _ in range(3)]
    assert [sorted(one) for one in passes] == [list(range(41))] * 3
    assert passes[0] != passes[1] != passes[2] != passes[0]
    ordered = mixture({"code": {"weight": 1}}, draws=41, seed=None)
    assert [ordered.record(draw) for draw in ordered.next_step()] == list(range(41))


def test_it_resumes_at_every_step():
    whole, positions, steps = mixture(), [], []
    for _ in range(60):
        positions.append(json.dumps(whole.position()))
        steps.append([(draw.source, whole.record(draw)) for draw in whole.next_step()])
    for step, position in enumerate(positions):
        resumed = mixture()
        resumed.go_to(json.loads(position))
        assert [(draw.source, resumed.record(draw)) for draw in resumed.next_step()] == steps[step]
        # the count of each source, not only the next draws
        assert json.dumps(resumed.position()) == (positions[step + 1] if step < 59 else json.dumps(whole.position()))


def test_a_change_of_weights_by_the_user_starts_the_lags_anew():
    mix = mixture({"code": {"weight": 0.9}, "pile": {"weight": 0.1}})
    names(mix, 5)
    changed = mixture({"code": {"weight": 0.1}, "pile": {"weight": 0.9}}, draws=10)
    changed.go_to(mix.position())
    # without a new start, all ten would be pile
    assert names(changed, 1).count("pile") == 9


def test_the_weights_follow_the_step_of_the_run():
    sources = {"code": {"weight": {"0": 1, "7": 0}}, "pile": {"weight": {"7": 1}}}
    mix = mixture(sources)
    mix.go_to(position_at(5))
    assert names(mix, 2) == ["code"] * 8 + ["pile"] * 8


@pytest.mark.parametrize(
    ("sources", "steps", "why"),
    [
        ({"web": {"weight": 1, "epochs": 1, "after_epochs": "end_run"}, "code": {"weight": 1}}, 7, "source web has"),
        ({"web": {"weight": 1, "epochs": 1}, "code": {"weight": 1, "epochs": 1}}, 8, "a source with a weight has"),
    ],
)
def test_the_data_ends_before_the_step_that_it_does_not_fill(sources, steps, why):
    """30 records of web in halves are 60 draws: 7 steps of 8. 30 and 41 are 8 steps."""
    mix = mixture(sources)
    names(mix, steps)
    position = mix.position()
    assert mix.next_step() is None
    assert why in mix.end
    assert mix.position() == position
    assert mix.next_step() is None


POSITION = {"version": 2, "order": "whole, seed 5", "step": 1, "sources": {}}


@pytest.mark.parametrize(
    ("position", "message"),
    [
        (
            {**POSITION, "order": "whole, seed 6"},
            "has the order 'whole, seed 6', this run has the order 'whole, seed 5'",
        ),
        (
            {**POSITION, "sources": {"pile": {"weight": 1, "drawn": 1, "base": 0}}},
            "of the sources pile, and .* code, pile",
        ),
        ({**POSITION, "sources": {"pile": {"weight": 1, "drawn": 1, "base": 2}}}, "cannot be read"),
        ({**POSITION, "sources": {"pile": {"weight": "1", "drawn": 1, "base": 0}}}, "cannot be read"),
        ({**POSITION, "sources": {"pile": 3}}, "cannot be read"),
        ({**POSITION, "sources": 3}, "cannot be read"),
        ({**POSITION, "step": -1}, "cannot be read"),
        ({**POSITION, "version": 3}, "cannot be read"),
        ({"version": 1, "order": "index"}, "has the order 'index', and this run draws any record: .*data.restart=true"),
        ([], "cannot be read"),
    ],
)
def test_a_position_of_something_else_is_refused(position, message):
    with pytest.raises(UserError, match=message):
        mixture().go_to(position)
