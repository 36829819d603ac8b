"""The names of the fields in both spellings, and the messages for unknown names."""

import difflib
import shlex
from collections.abc import Iterator
from typing import Any

from mesh_transformer.config import classic
from mesh_transformer.config.aliases import ALIASES
from mesh_transformer.config.schema import GROUPS
from mesh_transformer.errors import UserError

FIELDS: dict[str, tuple[str, ...]] = {name: tuple(group.model_fields) for name, group in GROUPS.items()}
SHOWN_CHARS = 60
SHOWN_KEYS = 8
SHOWN_HINT = 600
# each unknown key is compared with every known name
MAX_KEYS = 1000
NEAR = 0.75  # of difflib's ratio: one letter of four is wrong, or two of a longer name
NOT_OURS = "no field of this program"
# (group, field) as a file may still have it, to that of today
MOVED = {
    ("model", "compute_dtype"): ("compute", "dtype"),
    **{("model", field): ("compute", field) for field in ("remat", "scan_unroll", "logits_mib")},
}
# other names that --set takes for a field
OTHER_NAMES = {**classic.RENAMED, "compute_dtype": ("compute", "dtype")} | {
    ".".join(old): new for old, new in MOVED.items()
}


def owners(field: str) -> list[str]:
    """The groups that have a field of this name."""
    return [group for group, fields in FIELDS.items() if field in fields]


def spelled(group: str, field: str) -> str:
    """A field in both spellings, such as `mesh.tp (classic: cores_per_replica)`."""
    key = classic.CLASSIC_KEY.get((group, field))
    return f"{group}.{field}" + (f" (classic: {key})" if key and key != field else "")


def is_grouped(raw: dict[str, Any]) -> bool:
    """Whether a file is in the grouped spelling. A classic file may have a key that is also the name of a group."""
    groups = [key for key in raw if key in GROUPS]
    inside = sum(len(raw[key].keys() & set(FIELDS[key])) for key in groups if isinstance(raw[key], dict))
    return bool(groups) and len(groups) + inside >= len(raw.keys() & set(classic.KEYS))


def check_file(raw: dict[str, Any]) -> None:
    """Refuse the names of a file that this program does not have.

    Raises:
        UserError: says of each what it may be, and how it is left out.
    """
    count = len(raw) + sum(len(value) for value in raw.values() if isinstance(value, dict))
    if count > MAX_KEYS:
        raise UserError(f"it has {count:,} keys: a config has at most {MAX_KEYS:,}")
    faults = dict(_grouped_faults(raw) if is_grouped(raw) else _flat_faults(raw))
    if not faults:
        return
    strangers = [key for key, fault in faults.items() if fault == NOT_OURS]
    all_objects = all(isinstance(value, dict) for value in raw.values())
    if not is_grouped(raw) and len(strangers) == len(raw) and all_objects:
        objects = f"{len(raw)} objects" if len(raw) > 1 else "one object"
        raise UserError(
            f"it holds {objects}, {_some(raw)}: a file is one config, write the content of one object to a file"
        )
    texts = [fault for fault in faults.values() if fault != NOT_OURS][:SHOWN_KEYS]
    if len(strangers) == 1:
        texts.insert(0, f"unknown key {_cut(strangers[0])}: {NOT_OURS}")
    elif strangers:
        texts.insert(0, f"unknown keys {_some(strangers)}: no fields of this program")
    told = "; ".join(texts).replace("?;", "?")
    way_out = _how_to_leave_out(sorted(faults, key=lambda key: faults[key] != NOT_OURS))
    raise UserError(f"{told}{' ' if told.endswith('?') else '; '}{way_out}")


def _how_to_leave_out(keys: list[str]) -> str:
    them = "them" if len(keys) > 1 else "it"
    if not all(_is_plain(key) and "," not in key and not key.startswith("-") for key in keys):
        return f"remove {them} from the file"
    listed = ",".join(keys)
    named = shlex.quote(listed) if len(listed) <= SHOWN_HINT else "KEY,..."
    return f"--ignore-keys {named} leaves {them} out"


def resolve(name: str) -> tuple[str, str, str]:
    """(group, field, entry) of a dotted name, of a classic key, or of a field name that only one group has.

    Raises:
        UserError: there is no such name, or more than one.
    """
    if name in OTHER_NAMES:
        return *OTHER_NAMES[name], ""
    group, dot, rest = name.partition(".")
    field, inner, entry = rest.partition(".")
    if dot and field:
        if group not in GROUPS:
            raise UserError(f"unknown group {_cut(group)}: {_advice(group) or _known(GROUPS)}")
        if field not in FIELDS[group]:
            raise UserError(
                f"unknown key {group}.{_cut(field)}: {_advice(field, group) or _known(FIELDS[group])}"
            )
        if inner and (group, field) != ("data", "val_set"):
            raise UserError(f"{group}.{field} has no entries: only data.val_set.NAME has")
        if inner and not entry:
            raise UserError("data.val_set. lacks the name of an entry: write data.val_set.NAME=FILE")
        return group, field, entry
    if group in GROUPS:
        raise UserError(f"{group} is a group: name one of its fields, {', '.join(FIELDS[group])}")
    if dot or not (found := owners(group)):
        raise UserError(f"unknown key {_cut(name)}: {_advice(group) or _known(GROUPS)}")
    if len(found) > 1:
        raise UserError(
            f"{name} is in more than one group: write {' or '.join(f'{g}.{name}' for g in found)}"
        )
    return found[0], group, ""


def moved(raw: dict[str, Any]) -> dict[str, Any]:
    """A file in groups with the fields that have moved in their place of today; where both are given, that one counts."""
    found = {group: dict(values) if isinstance(values, dict) else values for group, values in raw.items()}
    for (group, field), (new_group, new_field) in MOVED.items():
        if isinstance(raw.get(group), dict) and field in raw[group]:
            if found.get(new_group) is None:
                found[new_group] = {}
            target, value = found[new_group], found[group].pop(field)
            if isinstance(target, dict) and target.get(new_field) is None:
                target[new_field] = value
    return found


def _flat_faults(raw: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Each key that no classic config has, with what is to be told of it."""
    classic_keys = sum(key in classic.KEYS for key in raw)
    for key in raw:
        if key in GROUPS:
            yield (
                key,
                f'"{key}" is the name of a group, the other {classic_keys} keys are classic ones: remove or rename it',
            )
        elif key not in classic.KEYS:
            yield key, _told(key, _advice(key, flat=True))


def _grouped_faults(raw: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, values in raw.items():
        if key in GROUPS:
            for field in values if isinstance(values, dict) else ():
                if field not in FIELDS[key]:
                    yield f"{key}.{field}", _told(f"{key}.{field}", _advice(field, key))
        elif key in classic.RENAMED:
            yield key, _outside(key, [classic.RENAMED[key][0]], classic.RENAMED[key][1])
        elif groups := owners(key):
            yield key, _outside(key, groups, key)
        else:
            yield key, _told(key, _advice(key), "group" if isinstance(values, dict) else "key")


def _outside(key: str, groups: list[str], field: str) -> str:
    inside = " or ".join(f'"{group}": {{...}}' for group in groups)
    written = "it" if field == key else f'it as "{field}"'
    return f"{key} stands outside the groups: write {written} inside {inside}"


def _told(key: str, advice: str, what: str = "key") -> str:
    return f"unknown {what} {_cut(key)}: {advice}" if advice else NOT_OURS


def _advice(key: str, group: str | None = None, flat: bool = False) -> str:
    """What the key may have been meant to be, or an empty string."""
    near = _nearest(key, group)
    outer, _, inner = key.partition(".")
    if not group and inner in FIELDS.get(outer, ()):
        return f'write it inside its group, {{"{outer}": {{"{inner}": ...}}}}'
    if near is None:
        return ""
    if flat and "." in near and tuple(near.split(" ")[0].split(".")) not in classic.CLASSIC_KEY:
        return f"did you mean {near}? A flat (classic) file cannot hold it: remove it and pass --set {near}=VALUE, or write the file in groups"
    return f"did you mean {near}?"


def _nearest(key: str, group: str | None) -> str | None:
    """The name that `key` may stand for: another program's, an exact one of another group, or a close one."""
    if key.lower() in ALIASES:
        return spelled(*ALIASES[key.lower()].split("."))
    anywhere = {f"{g}.{f}": spelled(g, f) for g, fields in FIELDS.items() for f in fields}
    anywhere |= {f: spelled(g, f) for g, fields in FIELDS.items() for f in fields}
    anywhere |= {classic_key: spelled(*at) for at, classic_key in classic.CLASSIC_KEY.items()}
    if key in anywhere:
        return anywhere[key]
    own = {field: spelled(group, field) for field in FIELDS[group]} if group else {g: g for g in GROUPS}
    for names in (own, anywhere):
        if close := difflib.get_close_matches(key[:SHOWN_CHARS], names, n=1, cutoff=NEAR):
            return names[close[0]]
    return None


def _known(names: dict[str, Any] | tuple[str, ...]) -> str:
    return f"{NOT_OURS}; known are {', '.join(names)}"


def _some(keys: Any) -> str:
    shown = [_cut(key) for key in list(keys)[:SHOWN_KEYS]]
    return ", ".join(shown) + (f" and {len(keys) - SHOWN_KEYS} more" if len(keys) > SHOWN_KEYS else "")


def _cut(key: str) -> str:
    cut = key if len(key) <= SHOWN_CHARS else f"{key[:SHOWN_CHARS]}..."
    return cut if _is_plain(key) else repr(cut)


def _is_plain(key: str) -> bool:
    """Whether the key stands in a line as it is: no line break, no control character, no space around it."""
    return key.isprintable() and key == key.strip() != ""
