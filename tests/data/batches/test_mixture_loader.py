"""Batches of a mixture: the same whatever the processes and the interruptions, and what their records call for."""

import json

import numpy as np
import pytest

from mesh_transformer.config.mixture import TrainSource
from mesh_transformer.data.batches.loader import make_train_loader
from mesh_transformer.data.records.tfrecords import write_record, write_records
from mesh_transformer.errors import UserError

# records of the files of each source
FILES = {"code": (20, 21), "pile": (90, 7), "web": (30,)}
SOURCES = {
    "pile": {"weight": {"0": 0.5, "12": 0.2, "40": 0.6}},
    "code": {"weight": 0.25},
    "web": {"weight": 0.25, "epochs": 2},
}
BATCH, STEPS = 4, 60


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    """An index of each source. All tokens of a record are its number: hundreds for the place of its source."""
    for place, (name, counts) in enumerate(FILES.items()):
        first = 100 * place
        for number, count in enumerate(counts):
            rows = [np.full(5, k) for k in range(first, first + count)]
            write_records(str(tmp_path / f"{name}{number}.tfrecords"), rows)
            first += count
        (tmp_path / f"{name}.index").write_text("".join(f"{name}{i}.tfrecords\n" for i in range(len(counts))))
    return tmp_path


def sources(folder, **changes):
    fields = {name: {"set": f"{folder}/{name}.index", **given} for name, given in {**SOURCES, **changes}.items()}
    return {name: TrainSource(**given) for name, given in fields.items()}


def mixture(folder, *, rows=range(BATCH), prefetch=0, **options):
    options = {"seq": 4, "batch": BATCH, "accumulation": 2, "seed": 5, "shuffle": "whole", **options}
    return make_train_loader(options.pop("train_set", None) or sources(folder), rows=rows, prefetch=prefetch, **options)


def numbers(batch):
    """The numbers of the records of a batch, (A, B)."""
    return batch.tokens[..., 0]


def test_batches_name_the_source_of_each_sequence(folder):
    batch = next(mixture(folder))
    assert batch.tokens.shape == (2, 4, 5)
    assert batch.tokens.dtype == batch.sources.dtype == np.int32
    np.testing.assert_array_equal(batch.sources, numbers(batch) // 100)
    assert (batch.documents, batch.learned) == (None, None)


def test_each_record_comes_once_a_pass(folder):
    loader = mixture(folder)
    drawn = np.concatenate([numbers(next(loader)).reshape(-1) for _ in range(STEPS)])
    for place, counts in enumerate(FILES.values()):
        own = drawn[drawn // 100 == place] - 100 * place
        size = sum(counts)
        passes = [own[begin : begin + size].tolist() for begin in range(0, len(own) - size + 1, size)]
        assert passes
        assert [sorted(one) for one in passes] == [list(range(size))] * len(passes)
        assert len({tuple(one) for one in passes}) == len(passes)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_it_resumes_at_every_step_on_any_number_of_processes(folder, processes):
    """60 steps, over two changes of weights, the end of passes and the end of a source."""
    whole, batches, positions = mixture(folder), [], []
    for _ in range(STEPS):
        positions.append(json.dumps(whole.get_state()))
        batches.append(next(whole))
    rows = np.split(np.arange(BATCH), processes)
    hosts = [mixture(folder, rows=own.tolist()) for own in rows]
    for step, position in enumerate(positions):
        for host, own in zip(hosts, rows, strict=True):
            host.set_state(json.loads(position))
            found = next(host)
            for got, want in zip(found, batches[step], strict=True):
                assert (got is None) == (want is None)
                assert got is None or np.array_equal(got, want[:, own])
            after = positions[step + 1] if step + 1 < STEPS else json.dumps(whole.get_state())
            assert json.dumps(host.get_state()) == after


def test_a_process_reads_only_its_rows(folder, monkeypatch):
    from mesh_transformer.data.records import record_set

    read = []
    original = record_set.parse_record
    loader = mixture(folder, rows=[1])
    monkeypatch.setattr(record_set, "parse_record", lambda *at: read.append(1) or original(*at))
    next(loader)
    assert len(read) == 2


def test_read_ahead_changes_no_batch_and_no_position(folder):
    loaders = [mixture(folder, prefetch=prefetch) for prefetch in (0, 3)]
    for _ in range(5):
        first, second = [(next(loader).tokens.tolist(), loader.get_state()) for loader in loaders]
        assert first == second
    loaders[1].close()


def test_one_set_is_shuffled_as_a_whole(folder):
    path = f"{folder}/pile.index"
    loader = mixture(folder, train_set=path, batch=97, rows=range(97), accumulation=1)
    passes = [numbers(next(loader)).reshape(-1).tolist() for _ in range(2)]
    assert [sorted(one) for one in passes] == [list(range(100, 197))] * 2
    assert passes[0] != passes[1]
    assert next(loader).sources is None
    train_set = {"pile": sources(folder)["pile"]}
    ordered = mixture(folder, train_set=train_set, batch=97, rows=range(97), accumulation=1, shuffle=False)
    assert numbers(next(ordered)).reshape(-1).tolist() == list(range(100, 197))


def test_the_end_is_said_with_its_reason(folder, caplog):
    caplog.set_level("INFO")
    web = {"weight": 1, "epochs": 1, "after_epochs": "end_run"}
    loader = mixture(folder, train_set=sources(folder, web=web, pile={"weight": 1}, code={"weight": 0}), prefetch=2)
    assert len(list(loader)) == 7
    assert "data.train_set ends before step 8: the source web has no more records" in caplog.text
    assert loader.get_state()["step"] == 7


def test_text_is_a_source(folder):
    (folder / "poem.txt").write_text("abcdefghij" * 10)
    poem = TrainSource(set=f"{folder}/poem.txt", weight=1)
    loader = mixture(folder, train_set={"code": sources(folder)["code"], "poem": poem}, tokenizer="bytes")
    batch = next(loader)
    assert {bytes(row[:1].tolist()).decode() for row in batch.tokens[batch.sources == 1]} <= set("abcdefghij")


@pytest.mark.parametrize("name", ["code1", "pile0", "web0"])
def test_a_changed_file_of_any_source_is_told(folder, name):
    loader = mixture(folder)
    next(loader)
    position = json.loads(json.dumps(loader.get_state()))
    path = folder / f"{name}.tfrecords"
    write_records(str(path), [np.full(5, 7)] * 40)
    with pytest.raises(UserError, match=rf"{name}.tfrecords has changed since .*--set data.restart=true"):
        mixture(folder).set_state(position)


def test_other_files_of_a_source_are_told(folder):
    loader = mixture(folder)
    position = json.loads(json.dumps(loader.get_state()))
    for text, was, now in (
        ("code1.tfrecords\ncode0.tfrecords", "code0", "code1"),
        ("code0.tfrecords", "code1", "none"),
    ):
        (folder / "code.index").write_text(text)
        with pytest.raises(UserError, match=rf"the source code has changed .* was {was}.* and is {now}"):
            mixture(folder).set_state(position)


def test_a_position_in_order_is_refused_and_one_of_a_mixture_too(folder):
    path = f"{folder}/pile.index"
    ordered = make_train_loader(path, seq=4, batch=2, rows=range(2))
    whole = mixture(folder, train_set=path)
    with pytest.raises(UserError, match="has the order 'index', and this run draws any record"):
        whole.set_state(ordered.get_state())
    with pytest.raises(UserError, match="has the order 'whole, seed 5', this run has the order 'index'"):
        ordered.set_state(whole.get_state())


def records(path, *contents):
    with open(path, "wb") as file:
        for documents, loss in contents:
            arrays = [None if one is None else np.array(one) for one in (documents, loss)]
            write_record(file, np.arange(5), *arrays)
    return str(path)


PLAIN, PACKED, MASKED = (None, None), ([2, 2], None), (None, [3, 1])


@pytest.mark.parametrize("packing", ["auto", "documents"])
def test_packing_and_masks_follow_the_records(tmp_path, packing):
    path = records(tmp_path / "a.tfrecords", PACKED, ([5], [1, 4]))
    loader = make_train_loader(path, seq=4, batch=1, rows=[0], packing=packing)
    batch = next(loader)
    assert batch.documents.tolist() == [[[1, 1, 2, 2, 0]]]
    assert batch.learned is None
    with pytest.raises(UserError, match="record 1 at byte .* has a loss mask .* the first record of its set has none"):
        next(loader)
    assert next(make_train_loader(path, seq=4, batch=1, rows=[0], packing="concat")).documents is None


def test_a_mask_of_one_source_gives_all_batches_a_mask(tmp_path):
    paths = {"a": records(tmp_path / "a.tfrecords", PLAIN), "b": records(tmp_path / "b.tfrecords", MASKED)}
    train_set = {name: TrainSource(set=path, weight=1) for name, path in paths.items()}
    batch = next(make_train_loader(train_set, seq=4, batch=2, rows=range(2), shuffle="whole"))
    assert batch.learned.tolist() == [[[True] * 5, [False, False, False, True, False]]]
    # a source without lengths beside one with them: each record is one document
    records(tmp_path / "b.tfrecords", PACKED)
    batch = next(make_train_loader(train_set, seq=4, batch=2, rows=range(2), shuffle="whole"))
    assert batch.documents.tolist() == [[[1] * 5, [1, 1, 2, 2, 0]]]


@pytest.mark.parametrize(
    ("contents", "packing", "message"),
    [
        (
            [PLAIN, PLAIN],
            "documents",
            "record 0 .* no lengths of its documents .*--pack documents, or set data.packing to conc",
        ),
        ([PACKED, PLAIN], "documents", "record 1 .* no lengths of its documents"),
        ([PLAIN, PACKED], "auto", "record 1 .* has the lengths of its documents, and the first record of its set has"),
        ([PLAIN, MASKED], "concat", "record 1 .* has a loss mask"),
    ],
)
def test_records_that_do_not_fit_are_refused_by_name(tmp_path, contents, packing, message):
    path = records(tmp_path / "a.tfrecords", *contents)
    with pytest.raises(UserError, match=message):
        next(make_train_loader(path, seq=4, batch=2, rows=range(2), packing=packing))
    train_set = {"a": TrainSource(set=path, weight=1)}
    with pytest.raises(UserError, match=message):
        next(make_train_loader(train_set, seq=4, batch=2, rows=range(2), packing=packing))
