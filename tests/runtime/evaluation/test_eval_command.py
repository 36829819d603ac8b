"""eval_harness.py, and the tasks of a training run."""

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.commands import REPO, metrics, run, write_run

import eval_harness
from mesh_transformer.errors import UserError
from mesh_transformer.runtime.evaluation import tasks
from mesh_transformer.runtime.evaluation.command import scalars

TASK = """
task: bottles
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
metadata: {{version: 3}}
"""


@pytest.fixture(scope="module", autouse=True)
def one_index_of_the_harness() -> Iterator[None]:
    """The tests in this process read the harness's 14,000 task files once: that takes many seconds."""
    from lm_eval.tasks import _index

    theirs, build = Path(_index.__file__).parent, _index.TaskIndex.build
    index = functools.cache(lambda: build([theirs]))

    def shared(paths):
        return {name: entry for path in paths for name, entry in (index() if path == theirs else build([path])).items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_index.TaskIndex, "build", staticmethod(shared))
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A finished run with a task at each validation."""
    folder = tmp_path_factory.mktemp("trained")
    questions = [
        {"text": f"{i} bottles", "choices": [" of beer on the wall", " of wine"], "answer": i % 3 == 0}
        for i in range(30)
    ]
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps({**q, "answer": int(q["answer"])}) + "\n" for q in questions))
    (folder / "tasks").mkdir()
    (folder / "tasks/bottles.yaml").write_text(TASK.format(file=data))
    write_run(
        folder,
        data={"eval_harness_tasks": ["bottles"], "eval_harness_include": "tasks", "eval_harness_limit": 20},
        logging={"tensorboard": True},
    )
    run("device_train.py", "--config", "config.json", cwd=folder, HF_DATASETS_OFFLINE="1")
    return folder


def evaluate(folder: Path, *arguments: str, code: int = 0, devices: int = 1) -> tuple[str, str]:
    return run(
        "eval_harness.py", "--config", "config.json", *arguments, cwd=folder, code=code, devices=devices,
        HF_DATASETS_OFFLINE="1",
    )  # fmt: skip


def test_the_loop_logs_its_tasks(trained):
    for record in metrics(trained / "run"):
        assert ({"eval/bottles/acc", "eval/bottles/acc_norm"} <= record.keys()) == (record["step"] in (5, 10, 12))
        assert not any("stderr" in name for name in record)
    events = [path.read_bytes() for path in (trained / "run/tensorboard").glob("events*")]
    assert any(b"eval/bottles/acc_norm" in content for content in events)


def test_the_command_agrees_with_the_loop_and_writes_it_down(trained):
    arguments = ["--tasks", "bottles", "--include-path", "tasks", "--limit", "20", "--output", "found.json"]
    table, errors = evaluate(trained, *arguments, "--cache", "answers.sqlite")
    assert "|bottles|" in table
    assert "acc_norm" in table
    assert "lm-evaluation-harness 0.4." in table
    assert "scored 40 requests" in errors
    # JAX's warning: a process that uses devices must not be forked
    assert "os.fork" not in errors
    found = json.loads((trained / "found.json").read_text())
    last = metrics(trained / "run")[-1]
    for name in ("acc", "acc_norm"):
        assert found["results"]["bottles"][f"{name},none"] == last[f"eval/bottles/{name}"]
        assert found["results"]["bottles"][f"{name}_stderr,none"] >= 0
    assert found["versions"]["tasks"] == {"bottles": 3}
    assert {"lm_eval", "jax", "mesh_transformer"} <= found["versions"].keys()
    assert found["config"]["model"]["layers"] == 2
    assert found["evaluation"]["step"] == 12
    assert found["tokens"]["scored_requests"] == 40
    assert found["tokens"]["computed"] < found["tokens"]["as_given"]
    _, errors = evaluate(trained, *arguments, "--cache", "answers.sqlite")
    assert "scored 0 requests" in errors
    assert json.loads((trained / "found.json").read_text())["results"] == found["results"]


@pytest.mark.nightly
def test_hugging_face_and_classic_checkpoints_give_the_same_numbers(trained):
    arguments = ["--tasks", "bottles", "--include-path", "tasks", "--limit", "20", "--output", "form.json"]
    run(
        "to_hf_weights.py",
        "--config",
        "config.json",
        "--input-ckpt",
        "run",
        "--output-path",
        "hf",
        "--dtype",
        "fp32",
        cwd=trained,
    )
    run(
        "resharding_example.py", "--config", "config.json", "--ckpt", "run", "--shards-out", "1", "--out",
        "classic/step_12", "--format", "classic", cwd=trained,
    )  # fmt: skip
    last = metrics(trained / "run")[-1]
    for place in ("hf", "classic"):
        evaluate(trained, *arguments, "--ckpt", place)
        found = json.loads((trained / "form.json").read_text())["results"]["bottles"]
        assert found["acc_norm,none"] == last["eval/bottles/acc_norm"]


def test_lambada_and_piqa_from_a_folder_on_eight_devices(trained, texts):
    """The context is longer than in training: rotary positions have no maximum."""
    _, errors = evaluate(
        trained, "--tasks", "lambada,piqa", "--data-dir", str(texts), "--limit", "4", "--num-fewshot", "0",
        "--output", "two.json", "--set", "mesh.tp=4", "--set", "model.seq=1024", devices=8,
    )  # fmt: skip
    found = json.loads((trained / "two.json").read_text())["results"]
    assert found.keys() == {"lambada_openai", "piqa"}
    assert found["piqa"]["acc,none"] in (0, 0.25, 0.5, 0.75, 1)
    assert found["lambada_openai"]["perplexity,none"] > 1
    assert "scored 12 requests" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "bottle", "--include-path", "tasks"], "did you mean bottles?"),
        (["--tasks", "piqa"], "task piqa cannot be loaded"),
        (["--tasks", "piqa", "--data-dir", "tasks"], "task piqa cannot be loaded"),
        (["--tasks", "piqa", "--data-dir", "absent"], "absent"),
        (["--tasks", "a,,b"], "--tasks"),
        (["--limit", "0"], "--limit 0"),
        (["--output", "tasks"], "--output tasks is a folder"),
        (["--batch-tokens", "0"], "--batch-tokens 0"),
        (["--output", "absent/F.json"], "absent"),
        (["--tasks", "bottles", "--include-path", "tasks", "--ckpt", "absent"], "absent"),
        (["--tasks", "bottles", "--include-path", "tasks", "--cache", "config.json"], "--cache config.json"),
    ],
)
def test_bad_input_is_reported_in_one_line(trained, monkeypatch, arguments, message):
    monkeypatch.chdir(trained)
    monkeypatch.setattr(sys, "argv", ["eval_harness.py", "--config", "config.json", *arguments])
    with pytest.raises(UserError) as caught:
        eval_harness.main()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_input_has_exit_code_2(trained):
    # from a folder of its own: without one, the command would read all task files of the harness first
    output, errors = evaluate(trained, "--tasks", "piqa", "--data-dir", "tasks", code=2)
    assert output == ""
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert "task piqa cannot be loaded" in lines[0]
    assert "Traceback" not in errors


def test_a_task_that_cannot_be_loaded_stops_a_run_at_its_start(tmp_path):
    write_run(tmp_path, data={"eval_harness_tasks": ["piqa"], "eval_harness_data": "."})
    _, errors = run("device_train.py", "--config", "config.json", cwd=tmp_path, code=2, HF_DATASETS_OFFLINE="1")
    assert "task piqa cannot be loaded" in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_a_request_that_cannot_be_answered_stops_a_run_at_its_start(trained, tmp_path):
    (tmp_path / "tasks").mkdir()
    data = tmp_path / "long.jsonl"
    data.write_text(json.dumps({"text": "a", "choices": ["b" * 40, "c"], "answer": 0}) + "\n")  # seq is 32
    (tmp_path / "tasks/bottles.yaml").write_text(TASK.format(file=data))
    write_run(tmp_path, data={"eval_harness_tasks": ["bottles"], "eval_harness_include": "tasks"})
    _, errors = run("device_train.py", "--config", "config.json", cwd=tmp_path, code=2, HF_DATASETS_OFFLINE="1")
    assert "a continuation has 40 tokens" in errors


def test_without_the_harness_the_message_says_what_to_install(trained):
    code = (
        "import sys, runpy\n"
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'lm_eval' else find(name, *a)\n"
        f"sys.argv = ['eval_harness.py', '--config', 'config.json']\n"
        f"sys.path.insert(0, {str(REPO)!r})\n"
        f"runpy.run_path({str(REPO / 'eval_harness.py')!r}, run_name='__main__')"
    )
    child = subprocess.run([sys.executable, "-c", code], cwd=trained, capture_output=True, text=True)
    assert child.returncode == 2
    assert "pip install -e '.[eval]'" in child.stderr
    assert "Traceback" not in child.stderr


@pytest.mark.parametrize(("name", "whole"), [("mine", False), ("both", True), ("arc_easy", True)])
def test_single_tasks_of_ones_own_spare_the_index_of_the_harness(tmp_path, monkeypatch, name, whole):
    """Its creation takes many seconds. A group may contain tasks outside its folder."""
    from lm_eval.tasks import TaskManager

    class Whole(Exception):
        pass

    class Manager(TaskManager):
        def __init__(self, include_defaults=True, **named):
            if include_defaults:
                raise Whole
            super().__init__(include_defaults=False, **named)

    (tmp_path / "mine.yaml").write_text(TASK.format(file="absent").replace("bottles", "mine"))
    (tmp_path / "both.yaml").write_text("group: both\ntask: [mine, arc_easy]")
    monkeypatch.setattr("lm_eval.tasks.TaskManager", Manager)
    with pytest.raises(Whole if whole else UserError):
        tasks.Tasks([name], include_path=str(tmp_path))


@pytest.mark.parametrize("name", ["lambada/lambada_openai", "piqa/piqa"])
def test_the_tasks_for_local_data_ask_what_the_harness_asks(name):
    import lm_eval.tasks

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))
    theirs, ours = (
        yaml.load(path.read_text(), Loader)
        for path in (
            Path(lm_eval.tasks.__file__).parent / f"{name}.yaml",
            tasks.LOCAL_TASKS / f"{Path(name).name}.yaml",
        )
    )
    of_data = {"dataset_path", "dataset_name", "training_split", "custom_dataset", "tag", "test_split"}
    of_data |= {"should_decontaminate", "doc_to_decontamination_query"}
    assert {k: v for k, v in ours.items() if k not in of_data} == {k: v for k, v in theirs.items() if k not in of_data}


def test_names_of_scalars():
    results = {
        "results": {
            "piqa": {"alias": "piqa", "sample_len": 3, "acc,none": 0.5, "acc_stderr,none": 0.1},
            "gsm8k": {"exact_match,strict-match": 0.25, "exact_match_stderr,strict-match": "N/A"},
        },
        "groups": {"mmlu": {"acc,none": 0.75}},
    }
    assert scalars(results) == {
        "eval/piqa/acc": 0.5,
        "eval/gsm8k/exact_match/strict-match": 0.25,
        "eval/mmlu/acc": 0.75,
    }
