"""Groups whose class one of their fields selects, as `optimizer.name` selects the class of `optimizer`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_type_hints

from pydantic import GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema, core_schema

from mesh_transformer.config.describe import short
from mesh_transformer.errors import UserError, did_you_mean, set_options
from mesh_transformer.fields import ConfigGroup


@dataclass(frozen=True)
class Variants:
    """Marks a group, as `Annotated[Base, Variants(tag, classes)]`: the field `tag` names the class of the group.

    The first class is the default. In each class, the field `tag` is a `Literal` of the name of the class.
    """

    tag: str
    classes: Mapping[str, type[ConfigGroup]]

    def chosen(self, values: Any) -> str:
        """The name of the class that these values select: a dictionary or a group. Null means absent."""
        given = values.get(self.tag) if isinstance(values, dict) else getattr(values, self.tag)
        return next(iter(self.classes)) if given is None else given

    def having(self, *fields: str) -> list[str]:
        """The names of the classes that have all these fields."""
        return [name for name, group in self.classes.items() if group.model_fields.keys() >= set(fields)]

    @cached_property
    def merged(self) -> type[ConfigGroup]:
        """A group with the fields of all classes, for lookups by name. The first class with a field defines it."""
        fields: dict[str, Any] = {}
        for group in self.classes.values():
            hints = get_type_hints(group, include_extras=True)
            for name, field in group.model_fields.items():
                fields.setdefault(name, (hints[name], field))
        fields[self.tag] = (Literal[tuple(self.classes)], fields[self.tag][1])
        return create_model("Merged", __base__=ConfigGroup, **fields)

    def check(self, group: str, values: dict[str, Any]) -> None:
        """Refuse an unknown class, and fields that only other classes have.

        Raises:
            UserError: lists the classes, or names the classes that have the field.
        """
        name, where = self.chosen(values), f"{group}.{self.tag}"
        if name not in tuple(self.classes):
            expected = f"expected one of {', '.join(self.classes)}{did_you_mean(str(name), self.classes)}"
            raise UserError(f"{where} = {short(name)}: {expected}")
        fields = self.classes[name].model_fields
        wrong = [field for field, value in values.items() if field not in fields and value is not None]
        if not wrong:
            return
        faults = [
            f"{group}.{field} is a field of {where} {', '.join(self.having(field))}, not of {name}"
            + did_you_mean(field, fields, f"{group}.")
            for field in wrong
        ]
        owners = self.having(*wrong)
        raise UserError(
            f"{'; '.join(faults)}: remove {'it' if len(wrong) == 1 else 'them'} "
            f"({set_options(*(f'{group}.{field}=null' for field in wrong))})"
            + (f", or set {where}={owners[0]}" if owners else "")
        )

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices = {name: handler.generate_schema(group) for name, group in self.classes.items()}
        return core_schema.tagged_union_schema(choices, discriminator=self.chosen)
