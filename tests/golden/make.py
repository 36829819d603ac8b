"""Write original.tar.xz, texts.tar.xz and jaxformer/numbers.npz beside this file: `python tests/golden/make.py FOLDER`,
see README.md."""

import io
import lzma
import sys
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
FILES = (
    "README.md", "ORDER.md", "configs/*.json", "tfrecords/*",
    "mp8/ckpt_init/step_0/shard_*/*.npz", "mp8/ckpt_full/step_5/shard_*/*.npz",
    "mp8/ckpt_perturbed/step_7/shard_*/*.npz", "mp8/ckpt_slim_bf16/step_5/shard_*/*.npz",
    "variants/*/ckpt_params/step_0/shard_*/*.npz",
)  # fmt: skip
# These are .npz files of named arrays. Left out of them is what no test reads: residual streams, other context lengths,
# sampled tokens, weights after further steps.
ARRAYS = (
    "fn_*.npz", "variants/*/params.npz", "variants/*/eval_f32.npz", "mp?/f32/train.npz",
    "mp1/f32/final_params.npz", "mp?/f32/eval.npz", "mp8/f32/resume_from_step5.npz",
)  # fmt: skip
LEFT_OUT = ("hidden", "logits_ctx", "eval_ctx/", "gen/top_k1", "gen/sample", "final/", "train/final/")
# Of these the losses by token, without the logits.
LOSSES = ("mp8/f32/eval_init.npz", "mp8/f32/eval_perturbed.npz", "mp8/f32/eval_slim.npz")
ONE_SHARD, ONE_SHARD_PARAMS = "mp1/ckpt_full/step_5/shard_0", "mp1/ckpt_params/step_5/shard_0"
TEXTS = (
    "gpt2_tokenizer/merges.txt", "gpt2_tokenizer/vocab.json", "lambada/lambada_test.jsonl", "piqa/valid.jsonl",
    "piqa/valid-labels.lst",
)  # fmt: skip
EXAMPLES = 300  # of each task

# A float32 array costs a tenth less where xz takes the place of a byte in its word as context.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 0, "lp": 2, "pb": 2}]


def npz(*unnamed: np.ndarray, **named: np.ndarray) -> bytes:
    """An uncompressed .npz: xz finds the arrays that two files have in common."""
    file = io.BytesIO()
    np.savez(file, *unnamed, **named)
    return file.getvalue()


def original(golden: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file."""
    for name in found(golden, FILES):
        yield name, (golden / name).read_bytes()
    for patterns, out in ((ARRAYS, LEFT_OUT), (LOSSES, (*LEFT_OUT, "logits"))):
        for name in found(golden, patterns):
            file = np.load(golden / name, allow_pickle=False)
            yield name, npz(**{key: file[key] for key in file.files if not key.startswith(out)})
    yield from one_shard(golden)


def found(folder: Path, patterns: Iterable[str]) -> Iterator[str]:
    """Names of the files in a folder, pattern by pattern."""
    for pattern in patterns:
        yield from sorted(path.relative_to(folder).as_posix() for path in folder.glob(pattern))


def one_shard(golden: Path) -> Iterator[tuple[str, bytes]]:
    """The last leaves of the one-shard checkpoint: the parameters and the step, over 16 files as the original splits
    them."""
    files = [np.load(golden / ONE_SHARD / f"{i}.npz", allow_pickle=False) for i in range(16)]
    leaves = [file[key] for file in files for key in file.files]
    parameters = (len(leaves) - 3) // 3  # beside as many first and second moments, two counts and the step
    for i, part in enumerate(np.array_split(range(-parameters - 1, 0), 16)):
        yield f"{ONE_SHARD_PARAMS}/{i}.npz", npz(*(leaves[k] for k in part))


def texts(data: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file: the tokenizer's whole, the first lines of the others."""
    for name in TEXTS:
        lines = (data / name).read_bytes().splitlines(keepends=True)
        yield name, b"".join(lines if name.startswith("gpt2") else lines[:EXAMPLES])


def jaxformer(golden: Path) -> dict[str, np.ndarray]:
    """The arrays that a test reads: parameters and logits, and a training without drops."""
    tiny, whole = (dict(np.load(golden / f"jaxformer/{name}.npz", allow_pickle=False)) for name in ("tiny", "whole"))
    found = {name: x for name, x in tiny.items() if name.startswith("params/")}
    found |= {name.removeprefix("whole/"): x for name, x in whole.items() if name.startswith("whole/gradient/")}
    found |= {name: whole[f"whole/{name}"] for name in ("loss", "cross", "balance", "updates/loss")}
    updates = np.concatenate([whole[f"whole/x{i}"] for i in range(4)])
    return {**found, "x": tiny["x"], "logits": tiny["eval/logits"], "updates/x": updates}


def write(path: Path, members: Iterator[tuple[str, bytes]]) -> None:
    """Write a .tar.xz that depends on names and contents alone."""
    with lzma.open(path, "wb", filters=FILTERS) as file, tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def main(shared: Path) -> None:
    """Write the archives from the folder that holds golden/ and data/."""
    write(HERE / "original.tar.xz", original(shared / "golden"))
    write(HERE / "texts.tar.xz", texts(shared / "data"))
    np.savez_compressed(HERE / "jaxformer" / "numbers.npz", **jaxformer(shared / "golden"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
