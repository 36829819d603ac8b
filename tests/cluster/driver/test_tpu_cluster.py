"""The original program's interface on real processes: train, eval, generate, save, load."""

import pytest
from support.commands import metrics
from support.counting import NAME, write_task
from support.driving import write

from mesh_transformer.cluster.driver.compute_target import ComputeTarget
from mesh_transformer.cluster.driver.tpu_cluster import TPUCluster
from mesh_transformer.config import load_config
from mesh_transformer.errors import UserError
from mesh_transformer.runtime.evaluation.command import EvalOptions, evaluate

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def cluster(tmp_path, monkeypatch, worker_environment):
    for name, value in {**worker_environment, "TMPDIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    config = load_config(str(write(tmp_path)), ["optimizer.total_steps=6", "data.val_set={}"])
    return TPUCluster(config, ComputeTarget(processes=2))


def test_train_save_load_generate(cluster, tmp_path):
    assert cluster.train(steps=4) == 0
    assert (tmp_path / "run/step_4").exists()
    cluster.save(str(tmp_path / "copy"))

    samples = cluster.generate(["7 bottles", [65, 66]], max_new_tokens=3, temperature=0.0, num_samples=2)
    assert [len(of_prompt) for of_prompt in samples] == [2, 2]
    assert samples[0][0]["prompt"] == "7 bottles"
    # temperature 0 is greedy
    assert samples[0][0]["tokens"] == samples[0][1]["tokens"]
    assert len(samples[1][0]["tokens"]) == 3

    raw = load_config("config.json", ["checkpoint.model_dir=tuned", "optimizer.total_steps=1", "data.val_set={}"])
    tuned = TPUCluster(raw, ComputeTarget(processes=2))
    tuned.load(str(tmp_path / "copy"))
    assert tuned.train() == 0
    scratch = metrics(tmp_path / "run")[0]["train/loss"]
    assert metrics(tmp_path / "tuned")[0]["train/loss"] < scratch - 0.01

    with pytest.raises(UserError, match="--temperature"):
        cluster.generate(["x"], temperature=-1.0)


@pytest.mark.nightly
def test_train_in_two_calls_and_evaluate(cluster, tmp_path):
    """The evaluation of the newest checkpoint gives the same numbers as in this process."""
    pytest.importorskip("lm_eval")
    assert cluster.train(steps=4) == 0
    assert cluster.train() == 0
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    options = {"include_path": str(write_task(tmp_path)), "limit": 10}
    report = cluster.eval([NAME], **options)
    alone = evaluate(cluster.config, EvalOptions(tasks=(NAME,), **options)).report
    assert report["evaluation"]["step"] == alone["evaluation"]["step"] == 6
    found, expected = (one["results"][NAME]["byte_perplexity,none"] for one in (report, alone))
    assert found == pytest.approx(expected, rel=1e-5)
    # better than equal probabilities of all bytes
    assert found < 257 / 1.01
