"""The stages that drop duplicates: tasks of duplicates.py, one after the other."""

from collections.abc import Sequence

from mesh_transformer.dataset.counts import DocumentCounts
from mesh_transformer.dataset.duplicates import (
    GROUP_ROWS,
    RUN,
    Bucket,
    Kept,
    Range,
    Sorted,
    TableRows,
    find_duplicates,
    groups_of,
    keep_rest,
    slices_of,
    sort_group,
)
from mesh_transformer.dataset.fragment import SIDES, Fragment
from mesh_transformer.dataset.shards import Source
from mesh_transformer.dataset.stages import JobStages, Named
from mesh_transformer.dataset.worker import Task
from mesh_transformer.files import join


class Duplicates:
    """Drops the duplicates of all fragments.

    Args:
        work: the folder of the objects.
        rows: documents of a group at most, and of a bucket on average.
    """

    def __init__(self, work: str, stages: JobStages, rows: int = GROUP_ROWS):
        self._work, self._stages, self._rows = work, stages, rows

    def drop(
        self, paths: Sequence[str], fragments: Sequence[Fragment]
    ) -> tuple[list[tuple[DocumentCounts, DocumentCounts]], list[list[Source]]]:
        """(counts of the kept documents of each fragment, by side; sources of the kept tokens of each side)."""
        slices = [
            table_slice
            for number, path in enumerate(paths)
            for table_slice in slices_of(number, path, fragments[number], self._rows)
        ]
        groups = groups_of(slices, self._rows)
        buckets = -(-sum(table_slice.rows for table_slice in slices) // self._rows)
        in_order = self._paths("sorted", len(groups))
        bucket_paths = self._paths("bucket", buckets)
        rest = self._paths("kept", len(groups))
        tasks = [
            Task(sort_group, (path, self._work, group, buckets), path)
            for path, group in zip(in_order, groups, strict=True)
        ]
        ordered = self._stages.run("sorting", _named(tasks), Sorted)
        firsts = [(group[0].fragment, group[0].first) for group in groups[1:]]
        tasks = []
        for number, path in enumerate(bucket_paths):
            ranges = [sorted_group.bucket(at, number) for sorted_group, at in zip(ordered, in_order, strict=True)]
            tasks.append(Task(find_duplicates, (path, self._work, ranges, firsts), path))
        drops = self._stages.run("comparing", _named(tasks), Bucket)
        tasks = []
        for number, (path, group) in enumerate(zip(rest, groups, strict=True)):
            ranges = [ordered[number].dropped(in_order[number])]
            ranges += [bucket.group(at, number) for bucket, at in zip(drops, bucket_paths, strict=True)]
            lengths = ordered[number].lengths(in_order[number])
            tasks.append(Task(keep_rest, (path, self._work, group, lengths, ranges), path))
        kept = self._stages.run("dropping", _named(tasks), Kept)
        return _rest(fragments, groups, rest, kept)

    def _paths(self, name: str, count: int) -> list[str]:
        return [join(self._work, f"{name}-{number:05d}") for number in range(count)]


def _rest(
    fragments: Sequence[Fragment], groups: Sequence[Sequence[TableRows]], paths: Sequence[str], kept: Sequence[Kept]
) -> tuple[list[tuple[DocumentCounts, DocumentCounts]], list[list[Source]]]:
    """The result of `Duplicates.drop`."""
    counts = [[DocumentCounts() for _ in SIDES] for _ in fragments]
    sources: list[list[Source]] = [[] for _ in SIDES]
    # where the tokens of the next slice of each side begin in its fragment
    places = [list(fragment.tokens_at) for fragment in fragments]
    for group, path, result in zip(groups, paths, kept, strict=True):
        at = result.at
        for side in range(len(SIDES)):
            for table_slice, sides in zip(group, result.slices, strict=True):
                rest, fragment = sides[side], fragments[table_slice.fragment]
                runs = Range(path, at, rest.runs * RUN.itemsize)
                at += runs.length
                if rest.counts.tokens:
                    at_tokens, table = places[table_slice.fragment][side], table_slice.table(side)
                    sources[side].append(Source(table_slice.path, at_tokens, rest.counts.tokens, table, runs))
                places[table_slice.fragment][side] += rest.tokens * fragment.width
                counts[table_slice.fragment][side] += rest.counts
    return [(train, val) for train, val in counts], sources


def _named(tasks: Sequence[Task]) -> list[Named]:
    """Each task with the object that it writes, its first argument."""
    return [Named(task, task.arguments[0], task.arguments[0]) for task in tasks]
