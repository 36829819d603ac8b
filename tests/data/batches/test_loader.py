"""Batches: equal to the original's, and the same whatever the hosts, the read-ahead and the interruptions."""

import gc
import itertools
import logging
import subprocess
import sys
import threading
import zlib

import numpy as np
import pytest
from support.loading import MODES, take, train

from mesh_transformer.data.batches.loader import make_train_loader, make_val_loader
from mesh_transformer.data.batches.stream import Walk
from mesh_transformer.data.records.tfrecords import write_records
from mesh_transformer.errors import UserError


@pytest.mark.parametrize(("case", "accumulation", "batch"), [("train_2x2", 2, 2), ("train_3x1", 3, 1)])
def test_golden_training_batches(golden, case, accumulation, batch):
    want = np.load(golden / "loader_golden.npz")[f"{case}/batches"]
    index = str(golden / "tiny.train.index")
    loader = make_train_loader(index, seq=64, accumulation=accumulation, batch=batch, rows=range(batch))
    got = np.stack([next(loader).tokens for _ in want])
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, want)


def test_golden_validation_batches(golden):
    want = np.load(golden / "loader_golden.npz")
    index = str(golden / "tiny.val.index")
    val = make_val_loader(index, seq=64, batch=2, rows=range(2))
    for _ in range(2):
        found = np.stack([batch.tokens for batch in itertools.islice(val, 5)])
        np.testing.assert_array_equal(found, want["val_2/batches"])
    once = make_val_loader(index, seq=64, batch=2, rows=range(2), repeat=False)
    np.testing.assert_array_equal(np.stack([batch.tokens for batch in once]), want["val_2/sample_once"])


@pytest.mark.parametrize("mode", MODES)
def test_hosts_split_the_rows_and_share_the_position(dataset, mode):
    whole = train(dataset, **mode)
    hosts = [train(dataset, rows=range(k, k + 1), **mode) for k in range(2)]
    for _ in range(9):
        parts = [next(host).tokens for host in hosts]
        np.testing.assert_array_equal(np.concatenate(parts, 1), next(whole).tokens)
        assert hosts[0].get_state() == hosts[1].get_state() == whole.get_state()
    other = train(dataset, **mode)
    other.set_state(hosts[1].get_state())
    assert take(other, 5) == take(whole, 5)


@pytest.mark.parametrize("mode", MODES)
def test_a_host_takes_any_rows(dataset, mode):
    """Not only consecutive ones, and those of another host too."""
    options = {"seq": 4, "batch": 4, **mode}
    whole = make_train_loader(str(dataset), rows=range(4), **options)
    hosts = [(rows, make_train_loader(str(dataset), rows=rows, **options)) for rows in ((0, 3), (1, 2, 3), (2,))]
    for _ in range(6):
        batch = next(whole).tokens
        for rows, host in hosts:
            np.testing.assert_array_equal(next(host).tokens, batch[:, list(rows)])
            assert host.get_state() == whole.get_state()


@pytest.mark.parametrize("rows", [(), (2, 1), (1, 1), (3, 4), (-1, 0)])
def test_rows_are_ascending_and_of_the_batch(dataset, rows):
    with pytest.raises(ValueError, match="rows must be some of 0..3, ascending"):
        make_train_loader(str(dataset), seq=4, batch=4, rows=rows)


def test_a_host_decodes_only_its_rows(dataset, monkeypatch):
    from mesh_transformer.data.records import tfrecords as records

    decoded = []
    original = records.decode_example
    loader = train(dataset, rows=range(1, 2), prefetch=0)
    monkeypatch.setattr(records, "decode_example", lambda *given: decoded.append(1) or original(*given))
    next(loader)
    assert len(decoded) == 2


def test_files_end_batches_unless_asked(dataset, caplog):
    with caplog.at_level(logging.INFO):
        assert np.array(take(train(dataset), 5)).reshape(5, 4).tolist() == [
            *([4 * k + i for i in range(4)] for k in range(2)),
            [14, 15, 16, 17],
            [18, 19, 20, 21],
            [0, 1, 2, 3],
        ]
    assert len([r for r in caplog.records if "dropped" in r.message]) == 1
    across = np.array(take(train(dataset, batch_across_files=True), 11)).reshape(-1)
    assert across.tolist() == [k % 22 for k in range(44)]


@pytest.mark.parametrize("window", [1, 2, 6, 1000])
def test_shuffled_epochs_hold_every_record_once(dataset, window):
    drawn = np.array(take(train(dataset, shuffle=True, shuffle_window=window), 11)).reshape(2, 22)
    for epoch in drawn:
        assert sorted(epoch) == list(range(22))
    assert drawn[0].tolist() != drawn[1].tolist()


def test_seeds_shuffle_differently(dataset):
    orders = [take(train(dataset, shuffle=True, seed=seed), 4) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_every_window_is_shuffled_in_its_own_order(tmp_path):
    write_records(str(tmp_path / "one.tfrecords"), [np.full(5, k) for k in range(64)])
    loader = train(tmp_path / "one.tfrecords", shuffle=True, shuffle_window=32)
    halves = np.array(take(loader, 16)).reshape(4, 16)
    orders = [(half - half.min()).tolist() for half in halves]
    assert [sorted(order) for order in orders] == [list(range(16))] * 4
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize("counts", [(5, 0), (0, 0, 3, 0), (0, 1, 4, 0, 0)])
@pytest.mark.parametrize("window", [2, 1000])
def test_empty_record_files_shorten_no_epoch(tmp_path, counts, window):
    """Shuffled files: the empty ones may lie at the end of one epoch and at the beginning of the next."""
    first, names = 0, []
    for place, count in enumerate(counts):
        names.append(f"{place}.tfrecords")
        write_records(str(tmp_path / names[-1]), [np.full(5, first + k) for k in range(count)])
        first += count
    index = tmp_path / "all.index"
    index.write_text("\n".join(names))
    for seed in range(3):
        loader = train(index, shuffle=True, shuffle_window=window, seed=seed, prefetch=0)
        drawn = np.array(take(loader, 3 * first)).reshape(-1, first)
        assert [sorted(epoch) for epoch in drawn.tolist()] == [list(range(first))] * len(drawn)


def test_files_without_a_record_are_named_and_not_read_for_ever(tmp_path, caplog):
    files = [str(tmp_path / name) for name in "ab"]
    for path in files:
        write_records(path, [])
    walk = Walk(files)
    assert [walk.read() for _ in range(3)] == [None] * 3
    assert caplog.messages == [f"{path} has no records" for path in files]
    with pytest.raises(UserError, match="there is no record in .*make the files again"):
        walk.read()


def test_compressed_records_give_the_same_batches(dataset):
    want = take(train(dataset), 6)
    for name in "abc":
        path = dataset.with_name(f"{name}.tfrecords")
        path.write_bytes(zlib.compress(path.read_bytes()))
    loader = train(dataset)
    assert take(loader, 3) == want[:3]
    resumed = train(dataset)
    resumed.set_state(loader.get_state())
    assert take(resumed, 3) == want[3:]


@pytest.mark.parametrize("mode", MODES[:3])
def test_object_storage_gives_the_same_batches(dataset, mode, monkeypatch):
    from support.gcs_server import GcsServer

    want = take(train(dataset, **mode), 6)
    with GcsServer() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        server.put("bucket", "sets/all.index", b"records/a.tfrecords\nb.tfrecords\ngs://bucket/sets/c.tfrecords\n")
        for name, key in (("a", "records/a"), ("b", "sets/b"), ("c", "sets/c")):
            data = dataset.with_name(f"{name}.tfrecords").read_bytes()
            server.put("bucket", f"{key}.tfrecords", data)
        loader = train("gs://bucket/sets/all.index", **mode)
        assert take(loader, 2) == want[:2]
        resumed = train(dataset, **mode)
        resumed.set_state(loader.get_state())
        assert take(resumed, 4) == want[2:]
        loader.close()
        for missing in ("gs://bucket/none.index", "gs://bucket/none.tfrecords"):
            with pytest.raises(UserError, match="not found, tried gs://bucket/none"):
                train(missing)


def test_names_are_looked_up_under_data(dataset, monkeypatch, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    (home / "data").mkdir()
    dataset.with_name("a.tfrecords").rename(home / "data" / "a.tfrecords")
    (home / "data" / "one.index").write_text("data/a.tfrecords\n")
    monkeypatch.chdir(home)
    want = take(train("a.tfrecords"), 2)
    assert take(train("one.index"), 2) == want
    monkeypatch.chdir("/")
    assert take(train(home / "data" / "one.index"), 2) == want


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i.unlink(), "not found, tried .*all.index"),
        (lambda i: i.write_text(" \n"), "is empty"),
        (lambda i: i.write_bytes(b"\0\1"), "not an index file"),
        (lambda i: i.write_text("a.tfrecords\nmissing.tfrecords\n"), r"line 2: .*missing\.tfrecords"),
        (lambda i: i.with_name("a.tfrecords").write_bytes(b"x" * 40), "record 0 at byte 0"),
        (
            lambda i: write_records(str(i.with_name("a.tfrecords")), [np.arange(9)]),
            "has 9 tokens.*need 5.*set data.seq to 8",
        ),
        (
            lambda i: write_records(str(i.with_name("a.tfrecords")), [np.arange(0)]),
            "has 0 tokens, sequences of 4 need 5: make",
        ),
        (lambda i: [i.with_name(f"{n}.tfrecords").write_bytes(b"") for n in "abc"], "no record in 3"),
    ],
)
def test_bad_input_is_refused_at_once(dataset, change, message):
    change(dataset)
    with pytest.raises(UserError, match=message):
        train(dataset)
    with pytest.raises(UserError, match=message):
        make_val_loader(str(dataset), seq=4, batch=1, rows=range(1))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_damage_surfaces_where_it_is_reached(dataset, prefetch):
    path = dataset.with_name("c.tfrecords")
    path.write_bytes(path.read_bytes()[:-3])
    loader = train(dataset, prefetch=prefetch)
    take(loader, 3)
    with pytest.raises(UserError, match=r"c\.tfrecords: record 7 at byte"):
        next(loader)


def test_a_pass_without_a_batch(dataset):
    for make in (
        lambda: iter(make_val_loader(str(dataset), seq=4, batch=12, rows=range(1))),
        lambda: iter(make_val_loader(str(dataset), seq=4, batch=12, rows=range(1), repeat=False)),
        lambda: make_train_loader(str(dataset), seq=4, batch=12, rows=range(3, 4)),
    ):
        with pytest.raises(UserError, match="fills no batch: 3 record file.*longest with 11 records.*takes 12"):
            next(make())
    across = make_train_loader(str(dataset), seq=4, batch=50, rows=range(50), batch_across_files=True)
    assert np.array(take(across, 1)).tolist() == [[[k % 22 for k in range(50)]]]


def test_dropped_iterators_leave_no_threads(dataset):
    before = threading.active_count()
    val = make_val_loader(str(dataset), seq=4, batch=1, rows=range(1))
    for _ in range(3):
        next(iter(val))
    gc.collect()
    assert threading.active_count() <= before


def test_text_is_tokenized_once(tmp_path, monkeypatch):
    from mesh_transformer.data.corpus import sequences as prepare

    text = "To be, or not to be. " * 20
    (tmp_path / "play.txt").write_text(text)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = str(tmp_path / "play.txt")

    def first():
        loader = make_train_loader(source, seq=16, batch=3, rows=range(3), tokenizer="bytes")
        return bytes(next(loader).tokens.astype(np.uint8).reshape(-1)).decode()

    assert first() == text[:51]
    folder = tmp_path / "cache" / "mesh-transformer" / "datasets"
    assert len(list(folder.glob("*.tfrecords"))) == 1
    with monkeypatch.context() as context:
        context.setattr(prepare, "write_corpus", lambda *_: pytest.fail("tokenized again"))
        assert first() == text[:51]
    (tmp_path / "play.txt").write_text("x" + text)
    assert first() == ("x" + text)[:51]
    assert len(list(folder.glob("*.tfrecords"))) == 2
    (tmp_path / "play.txt").write_text("short")
    with pytest.raises(
        UserError, match=r"do not fill one sequence of 17 \(1 document\): add text or choose a shorter data\.seq$"
    ):
        first()
    assert len(list(folder.glob("*.tfrecords"))) == 2


def test_a_position_in_another_text_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "play.txt").write_text("To be, or not to be. " * 40)
    loader = make_train_loader(str(tmp_path / "play.txt"), seq=16, batch=2, rows=range(2), tokenizer="bytes")
    state = {**loader.get_state(), "name": "play-other.tfrecords"}
    with pytest.raises(UserError, match="the stored data position is in play-other.tfrecords"):
        loader.set_state(state)


def test_several_processes_may_fill_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "play.txt").write_text("All the world's a stage. " * 400)
    code = (
        "from mesh_transformer.data.corpus.sequences import cached_records\n"
        "print(cached_records('play.txt', 16, 'bytes'))"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert len({process.communicate(timeout=60)[0] for process in started}) == 1
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len(list((tmp_path / "cache" / "mesh-transformer" / "datasets").glob("*.tfrecords"))) == 1


@pytest.mark.parametrize("name", ["a.TFRECORDS", "a.TfRecord.GZ"])
def test_upper_case_is_lower_case(dataset, name):
    named = dataset.with_name(name)
    dataset.with_name("a.tfrecords").rename(named)
    assert take(train(named), 1) == [[[0, 1], [2, 3]]]


def test_an_index_may_have_record_in_its_name(dataset):
    named = dataset.with_name("my.tfrecords.index")
    dataset.rename(named)
    assert take(train(named), 1) == [[[0, 1], [2, 3]]]


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.TXT").write_text("abc" * 100)
    options = {"seq": 8, "batch": 2, "rows": range(2), "tokenizer": "bytes"}
    make_train_loader(str(tmp_path / "text.TXT"), n_vocab=257, **options)
    with pytest.raises(UserError, match=r"token 99, and model.n_vocab is 99"):
        make_train_loader(str(tmp_path / "text.TXT"), n_vocab=99, **options)
