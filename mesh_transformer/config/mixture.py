"""The sources of a mixture: `data.train_set` as an object."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import MinLen
from pydantic import BeforeValidator, Discriminator, Tag

from mesh_transformer.errors import UserError
from mesh_transformer.fields import ConfigGroup, Count, CountOrZero, Name, NonNegative, OptionalText, Unit, Words


def _from_step_0(value: Any) -> Any:
    """A weight as an object of first steps, which JSON writes as texts."""
    if not isinstance(value, dict):
        return {0: value}
    return {int(step) if isinstance(step, str) and step.isdecimal() else step: weight for step, weight in value.items()}


Weights = Annotated[
    dict[CountOrZero, NonNegative],
    MinLen(1),
    BeforeValidator(_from_step_0),
    Words('a number, 0 or more, or an object that maps first steps to such numbers, such as {"0": 0.7, "10000": 0.2}'),
]


class TrainSource(ConfigGroup):
    """A source of a mixture: `data.train_set` maps the names of sources to these fields."""

    set: Name
    """index file, .tfrecords file or .txt file, like `data.train_set`"""
    weight: Weights
    """the source's share of the records, in proportion to the weights of the others. An object gives the weight from
    each of its steps on; before the first of them the weight is 0"""
    epochs: Annotated[Count | None, Unit("passes")] = None
    """passes over the source, after which it has no more records; absent: no limit"""
    after_epochs: Literal["others", "end_run"] = "others"
    """others: its share goes to the other sources. end_run: the run ends before the step that needs one more record of
    it"""

    def weight_at(self, step: int) -> float:
        """The weight at a step of the run, from 1."""
        begun = [first for first in self.weight if first <= step]
        return self.weight[max(begun)] if begun else 0.0


TrainSet = Annotated[
    Annotated[OptionalText, Tag("file")] | Annotated[dict[Name, TrainSource], MinLen(1), Tag("sources")],
    Discriminator(lambda value: "sources" if isinstance(value, dict) else "file"),
    Words('one file, or an object of sources, such as {"pile": {"set": "pile.train.index", "weight": 0.7}}'),
]


def check_weights(sources: Mapping[str, TrainSource]) -> None:
    """Refuse a mixture that has only weights of 0 at some step.

    Raises:
        UserError: names the step.
    """
    for step in sorted({1, *(max(first, 1) for source in sources.values() for first in source.weight)}):
        if not any(source.weight_at(step) for source in sources.values()):
            raise UserError(
                f"data.train_set: all weights are 0 at step {step}: give a source a weight from this step on, or "
                f"from an earlier one"
            )
