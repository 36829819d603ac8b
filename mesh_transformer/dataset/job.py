"""A job of prepare_dataset.py: from inputs to a folder that `data.train_set` can name.

    inputs -> parts -> fragments (a task a part) -> duplicates -> shards (a task a shard) -> index files, manifest.json

Every cut is a function of the inputs and the options, so that the bytes of the output do not depend on the workers. The
output folder has a folder `work` until the manifest is there, which is written last.
"""

import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from mesh_transformer import files
from mesh_transformer.config.strict_json import parse_object
from mesh_transformer.data.chat.instructions import template_fingerprint
from mesh_transformer.data.tokens.tokenizer import Tokenizer, load_tokenizer
from mesh_transformer.dataset.counts import DocumentCounts, add_reasons, total
from mesh_transformer.dataset.dropping import Duplicates
from mesh_transformer.dataset.example_fragment import write_example_fragment
from mesh_transformer.dataset.fragment import SIDES, Examples, Fragment, Text, write_fragment
from mesh_transformer.dataset.inputs import Input, read_inputs
from mesh_transformer.dataset.manifest import Summary, encoded, manifest
from mesh_transformer.dataset.objects import atomic_file
from mesh_transformer.dataset.options import PrepareOptions, Work
from mesh_transformer.dataset.packed_shards import RowPacking, packed_cuts, write_packed_shard
from mesh_transformer.dataset.parts import FilePart, plan
from mesh_transformer.dataset.picture import length_picture
from mesh_transformer.dataset.shards import RECORDS, Shard, Source, cuts, source_of, taken, write_shard
from mesh_transformer.dataset.stages import JobStages, Named, ShownFragments
from mesh_transformer.dataset.tasks import Runner
from mesh_transformer.dataset.worker import Task, failures_explained
from mesh_transformer.errors import UserError, byte_size, listed, plural
from mesh_transformer.files import check_writable, is_remote, join, make_folder, open_binary
from mesh_transformer.logs import log

MANIFEST, PICTURE, JOB, WORK = "manifest.json", "lengths.png", "job.json", "work"
_MAX_JSON_BYTES = 64 << 20


def prepare(
    specs: Sequence[str], tokenizer: str, output: str, options: PrepareOptions, runner: Runner
) -> dict[str, Any]:
    """Make the data set of the inputs `specs` in the folder `output`. Returns the content of manifest.json.

    An interrupted job goes on: tasks that are done are not run again.

    Raises:
        UserError: bad input or options, `output` has other files, or the tokens do not fill one record.
        RunError: a disk or a bucket fails.
    """
    inputs = read_inputs(specs)
    loaded = load_tokenizer(tokenizer)
    template = template_fingerprint(loaded) if options.instructions else None
    job = _Job(output, Work.of(inputs, tokenizer, loaded.fingerprint, options, template), inputs, options)
    examples = None if template is None else Examples(options.seq + 1, options.long, template)
    text = Text(tokenizer, loaded.fingerprint, options.column, options.val, options.on_error, examples)
    with failures_explained():
        # before the folder has the options, because they may be wrong
        parts = plan(inputs, options.part_bytes, None if options.instructions else options.column)
        if (finished := job.begin()) is not None:
            log.info("%s is whole already: nothing to do", output)
            return finished
        return job.run(parts, text, loaded, runner)


class _Job:
    """The stages of a job, and its output folder."""

    def __init__(self, output: str, work: Work, inputs: Sequence[Input], options: PrepareOptions):
        self._output, self._inputs, self._options = output, inputs, options
        self._described, self._work = work, join(output, WORK)
        self._existing: set[str] = set()

    def begin(self) -> dict[str, Any] | None:
        """Begin or continue the job. Returns the manifest if the job has ended.

        Raises:
            UserError: the folder has another job, or other files.
        """
        names = files.list_dir(self._output)
        if MANIFEST in names:
            path = join(self._output, MANIFEST)
            content = _json_of(path)
            self._described.check(content, self._output)
            Summary.of(content, path)
            self._clean()
            return content
        path, inside = join(self._work, JOB), files.list_dir(self._work)
        self._existing = {join(self._output, name) for name in names} | {join(self._work, name) for name in inside}
        if JOB in inside:
            self._described.check(_json_of(path), self._output)
        elif others := [name for name in names if name != WORK]:
            raise UserError(
                f"{self._output} has other files ({listed(others)}): choose a folder that is empty or does not exist"
            )
        else:
            if not is_remote(self._output):
                check_writable(self._output)
            make_folder(self._work)
            with atomic_file(path, self._work) as file:
                file.write(encoded(self._described.content))
        return None

    def run(self, parts: Sequence[FilePart], text: Text, tokenizer: Tokenizer, runner: Runner) -> dict[str, Any]:
        """Run the stages. Returns the manifest."""
        stages = JobStages(runner, self._existing)
        input_files = [file for source in self._inputs for file in source.files]
        size = byte_size(sum(file.size for file in input_files))
        log.info("%s of %s (%s)", plural(len(parts), "part"), plural(len(input_files), "file"), size)
        paths = [join(self._work, f"fragment-{number:06d}") for number in range(len(parts))]
        fragments = self._fragments(stages, parts, paths, text)
        self._check_any(fragments)
        kept = [fragment.sides for fragment in fragments]
        sources = [
            [source_of(path, fragment, side) for path, fragment in zip(paths, fragments, strict=True)]
            for side in range(len(SIDES))
        ]
        if self._options.dedup and any(fragment.documents for fragment in fragments):
            kept, sources = Duplicates(self._work, stages).drop(paths, fragments)
        made = self._shards(stages, sources, fragments[0].width if fragments else 0, tokenizer.eot)
        numbered = list(zip((part.input for part in parts), fragments, strict=True))
        content = manifest(self._described.content, self._inputs, tokenizer, numbered, kept, made)
        self._finish(content, total(sides[0] for sides in kept), made)
        return content

    def _fragments(
        self, stages: JobStages, parts: Sequence[FilePart], paths: Sequence[str], text: Text
    ) -> list[Fragment]:
        named = []
        for part, path in zip(parts, paths, strict=True):
            given = path, self._work, part, self._inputs[part.input].share, text
            task = (
                Task(write_fragment, given, part.place)
                if text.examples is None
                else Task(write_example_fragment, (*given, text.examples), part.place)
            )
            named.append(Named(task, path, path))
        sizes = _sizes(parts)
        return stages.run("tokenizing", named, Fragment, self._check, sizes, ShownFragments())

    def _check(self, fragment: Fragment) -> None:
        """An earlier command with --on-error skip may have left a fragment with bad places."""
        if self._options.on_error == "stop" and fragment.bad:
            raise UserError(f"{fragment.bad[0]} (--on-error skip counts such places and goes on)")

    def _check_any(self, fragments: Sequence[Fragment]) -> None:
        """Raise UserError if all documents were dropped."""
        dropped = add_reasons(fragment.dropped for fragment in fragments)
        if dropped and not any(fragment.documents for fragment in fragments):
            # so that other options are not refused
            self._clean()
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
            first = next((f" ({message})" for fragment in fragments for message in fragment.bad), "")
            raise UserError(f"no document is left; dropped: {reasons}{first}: correct the input, or add documents")

    def _shards(self, stages: JobStages, sources: Sequence[Sequence[Source]], width: int, eot: int) -> dict[str, Shard]:
        """Write the shards of both sides. Returns them by name.

        Raises:
            UserError: the tokens of the training documents do not fill one record.
        """
        length, most, named = self._options.seq + 1, self._options.shard_tokens, {}
        packed = self._options.packed
        for side, mine in zip(SIDES, sources, strict=True):
            tokens = sum(source.tokens for source in mine)
            bounds = packed_cuts(tokens, length, most) if packed else cuts(tokens, length, most)
            if side == SIDES[0] and len(bounds) < 2:
                # so that another --seq is not refused
                self._clean()
                raise UserError(
                    f"{plural(tokens, 'token')} of training documents do not fill one record of {length:,}: add text "
                    "or choose a shorter --seq"
                )
            for number, places in enumerate(taken(mine, bounds)):
                name = f"{side}-{number:05d}"
                path, result = join(self._output, name), join(self._work, name)
                where = path, self._work, result, places
                task = (
                    Task(write_packed_shard, (*where, RowPacking(length, eot, self._options.instructions), width), path)
                    if packed
                    else Task(write_shard, (*where, length, width), path)
                )
                named[name] = Named(task, path + RECORDS, result)
        return dict(zip(named, stages.run("writing", list(named.values()), Shard), strict=True))

    def _finish(self, content: dict[str, Any], counts: DocumentCounts, made: dict[str, Shard]) -> None:
        """Write the index files and the picture, then the manifest, which marks the data set as complete."""
        for side in SIDES:
            names = [f"{name}{RECORDS}\n" for name in made if name.startswith(side)]
            if names:
                self._write(f"{side}.index", "".join(names).encode())
            elif self._options.val:
                log.warning(
                    "there is no validation set: its documents (%s) do not fill one record; raise --val",
                    plural(content[side]["documents"], "document"),
                )
        name, train = ", ".join(source.spec for source in self._inputs), content["train"]
        packing = f"\npacked: {train['waste']:.2%} padding" if self._options.packed else ""
        packing += f", {plural(train['cuts'], 'cut')}" if "cuts" in train else ""
        self._write(PICTURE, length_picture(name, counts, self._options.seq, packing))
        self._write(MANIFEST, encoded(content))
        self._clean()

    def _write(self, name: str, content: bytes) -> None:
        with atomic_file(join(self._output, name), self._work) as file:
            file.write(content)

    def _clean(self) -> None:
        """Delete the folder `work`, which only an interrupted job needs."""
        with contextlib.suppress(FileNotFoundError):
            files.remove_tree(self._work)


def _sizes(parts: Sequence[FilePart]) -> list[float]:
    """Bytes of each part. The parts of a file share its size by their length, whatever its unit."""
    units: Counter[tuple[int, str]] = Counter()
    for part in parts:
        units[part.input, part.file] += max(part.stop - part.first, 1)
    return [part.size * max(part.stop - part.first, 1) / units[part.input, part.file] for part in parts]


def _json_of(path: str) -> dict[str, Any]:
    """The JSON object in a file that an earlier command has written."""
    with open_binary(path) as file:
        content = file.read(_MAX_JSON_BYTES)
    try:
        return parse_object(content, path)
    except UserError as error:
        raise UserError(f"{error}; it is not of prepare_dataset.py: choose another output folder") from error
