"""The names of the fields in both spellings, and the nearest one to a name that is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from mesh_transformer.config import classic
from mesh_transformer.config.schema import GROUPS
from mesh_transformer.errors import UserError

FIELDS: dict[str, tuple[str, ...]] = {name: tuple(group.model_fields) for name, group in GROUPS.items()}
SHOWN_CHARS = 60


def owners(field: str) -> list[str]:
    """The groups that have a field of this name."""
    return [group for group, fields in FIELDS.items() if field in fields]


def spelled(group: str, field: str) -> str:
    """A field in both spellings, such as `mesh.tp (classic: cores_per_replica)`."""
    key = classic.CLASSIC_KEY.get((group, field))
    return f"{group}.{field}" + (f" (classic: {key})" if key and key != field else "")


def check_flat_keys(keys: Iterable[str]) -> None:
    """Refuse a key that no classic config has.

    Raises:
        UserError: names the nearest key.
    """
    for key in keys:
        if key not in classic.KEYS:
            raise UserError(f"unknown key {_cut(key)}: {_advice(key, flat=True)}")


def check_groups(keys: Iterable[str]) -> None:
    """Refuse a top-level key of a grouped config that is not a group.

    Raises:
        UserError: names the nearest group or field.
    """
    for key in keys:
        if key not in GROUPS:
            raise UserError(f"unknown group {_cut(key)}: {_advice(key)}")


def check_fields(group: str, keys: Iterable[str]) -> None:
    """Refuse a key that the group does not have.

    Raises:
        UserError: names the nearest field, of this group or of another.
    """
    for key in keys:
        if key not in FIELDS[group]:
            raise UserError(f"unknown key {group}.{_cut(key)}: {_advice(key, group)}")


def resolve(name: str) -> tuple[str, str, str]:
    """(group, field, entry) of a dotted name, or of a field name that only one group has.

    Raises:
        UserError: there is no such name, or more than one.
    """
    group, dot, rest = name.partition(".")
    field, inner, entry = rest.partition(".")
    if dot and field:
        check_groups([group])
        check_fields(group, [field])
        if inner and (group, field) != ("data", "val_set"):
            raise UserError(f"{group}.{field} has no entries: only data.val_set.NAME has")
        if inner and not entry:
            raise UserError("data.val_set. lacks the name of an entry: write data.val_set.NAME=FILE")
        return group, field, entry
    if group in GROUPS:
        raise UserError(f"{group} is a group: name one of its fields, {', '.join(FIELDS[group])}")
    if dot or not (found := owners(group)):
        raise UserError(f"unknown key {_cut(name)}: {_advice(group)}")
    if len(found) > 1:
        raise UserError(
            f"{name} is in more than one group: write {' or '.join(f'{g}.{name}' for g in found)}"
        )
    return found[0], group, ""


def _advice(key: str, group: str | None = None, flat: bool = False) -> str:
    near = _nearest(key, group)
    outer, _, inner = key.partition(".")
    if not group and inner in FIELDS.get(outer, ()):
        return f'write it inside its group, {{"{outer}": {{"{inner}": ...}}}}'
    if near is None:
        known = FIELDS[group] if group else classic.KEYS if flat else tuple(GROUPS)
        return f"known are {', '.join(known)}"
    if flat and "." in near and not _has_classic_key(near):
        return f"did you mean {near}? A flat (classic) file cannot hold it: pass --set {near}=VALUE, or write the file in groups"
    return f"did you mean {near}?"


def _nearest(key: str, group: str | None) -> str | None:
    """The known name closest to `key`: in its own group, then as an exact name elsewhere, then anywhere."""
    anywhere = {f"{g}.{f}": spelled(g, f) for g, fields in FIELDS.items() for f in fields}
    anywhere |= {f: spelled(g, f) for g, fields in FIELDS.items() for f in fields}
    anywhere |= {classic_key: spelled(*at) for at, classic_key in classic.CLASSIC_KEY.items()}
    if key in anywhere:
        return anywhere[key]
    own = {field: spelled(group, field) for field in FIELDS[group]} if group else {g: g for g in GROUPS}
    for names in (own, anywhere):
        if close := difflib.get_close_matches(key[:SHOWN_CHARS], names, n=1):
            return names[close[0]]
    return None


def _has_classic_key(near: str) -> bool:
    group, field = near.split(" ")[0].split(".")
    return (group, field) in classic.CLASSIC_KEY


def _cut(key: str) -> str:
    return key if len(key) <= SHOWN_CHARS else f"{key[:SHOWN_CHARS]}..."
