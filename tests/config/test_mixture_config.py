"""A mixture in the config: its overrides, its defaults, and what it refuses."""

import json

import pytest

from mesh_transformer.config import parse_config
from mesh_transformer.errors import UserError

MODEL = {"layers": 1, "d_model": 8, "n_heads": 1, "n_vocab": 300, "seq": 8, "pe_rotary_dims": 8}
SOURCES = {"pile": {"set": "p.index", "weight": 0.7, "epochs": 2}, "code": {"set": "c.index", "weight": 0.3}}


def data(train_set=SOURCES, *overrides, **fields):
    return parse_config({"model": MODEL, "data": {"train_set": train_set, **fields}}, overrides).data


def test_weights_change_at_steps():
    pile = data(SOURCES, 'data.train_set.pile.weight={"3": 0.5, "10": 0}').train_set["pile"]
    assert [pile.weight_at(step) for step in (1, 2, 3, 9, 10, 11)] == [0, 0, 0.5, 0.5, 0, 0]
    assert data().train_set["code"].weight_at(1) == 0.3


def test_overrides_change_add_and_remove_sources():
    assert data(SOURCES, "data.train_set.pile.weight=0.5").train_set["pile"].weight == {0: 0.5}
    # a text is taken as written
    assert data(SOURCES, "data.train_set.pile.set=1e5").train_set["pile"].set == "1e5"
    web = ['data.train_set.web={"set": "w.index", "weight": 1}', "data.train_set.pile=null"]
    assert data(SOURCES, *web).sources == ("code", "web")
    assert data(SOURCES, "data.train_set=one.index").train_files == ("one.index",)


def test_a_mixture_is_shuffled_as_a_whole_unless_asked():
    assert (data().shuffle, data(shuffle=False).shuffle, data("one.index").shuffle) == ("whole", False, False)


def test_the_recorded_config_is_the_same_config():
    config = parse_config({"model": MODEL, "data": {"train_set": SOURCES}})
    assert parse_config(json.loads(json.dumps(config.model_dump(mode="json")))) == config


@pytest.mark.parametrize(
    ("fields", "override", "message"),
    [
        ({"shuffle": True}, None, "data.shuffle true .* set data.shuffle to whole, or to false"),
        ({"shuffle_window": 5}, None, "data.shuffle_window 5 has no effect, because data.train_set is a mixture"),
        ({"batch_across_files": True}, None, "data.batch_across_files true has no effect"),
        (
            {"train_set": "x", "shuffle": "whole", "shuffle_window": 5},
            None,
            "data.shuffle_window 5 has no effect, because data.shuffle is whole",
        ),
        ({"train_set": "x"}, "data.train_set.pile.weight=1", "data.train_set is one file, 'x'"),
        ({"train_set": {}}, None, "data.train_set = {}: expected one file, or an object of sources"),
        ({}, "data.train_set.pile.weight=-1", r"data.train_set.pile.weight = -1: expected a number, 0 or more, or an"),
        ({}, 'data.train_set.pile.weight={"1.5": 1}', "data.train_set.pile.weight = '1.5'"),
        ({}, "data.train_set.pile.epochs=0.5", "data.train_set.pile.epochs = 0.5: expected a whole number, 1 or more"),
        ({}, "data.train_set.pile.after_epochs=end", "expected one of others, end_run"),
        ({}, "data.train_set.pile.wieght=1", r"unknown key data.train_set.pile.wieght: .*did you mean weight\?"),
        ({}, "data.train_set.web=3", "data.train_set.web = 3: expected an object of set, weight, epochs, after_epochs"),
        ({}, "data.train_set.web.weight=3", "not given: data.train_set.web.set"),
        ({}, 'data.train_set={"a": {"set": "x", "weight": {"2": 1}}}', "all weights are 0 at step 1"),
        ({}, 'data.train_set={"a": {"set": "x", "weight": {"0": 1, "7": 0}}}', "all weights are 0 at step 7"),
        ({"packing": "rows"}, None, "data.packing = 'rows': expected one of auto, concat, documents"),
    ],
)
def test_it_is_refused_by_name(fields, override, message):
    fields = dict(fields)
    with pytest.raises(UserError, match=message):
        data(fields.pop("train_set", SOURCES), *([override] if override else []), **fields)
