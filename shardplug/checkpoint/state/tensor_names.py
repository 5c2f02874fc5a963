"""Pairs the names of a model with the names of a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

__all__ = ["Pairing", "clean_name", "listed", "pair"]

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def clean_name(name: str) -> str:
    """Drop what torch.compile and checkpoint wrappers add to a name."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@dataclass(frozen=True)
class Pairing:
    """Which tensor of a checkpoint belongs to which tensor here.

    Attributes:
        saved: The checkpoint's name for each name here that has a partner.
        missing: Names here without a partner.
        unexpected: The checkpoint's names without a partner.
        repeated: Those of them that are further names of a tensor that has a partner.
    """

    saved: Mapping[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    repeated: frozenset[str]


def pair(
    aliases: Mapping[str, Collection[str]],
    saved: Collection[str],
    *,
    given: Collection[str] = (),
) -> Pairing:
    """Pair names, looking through a constant prefix that one side has in front of all names.

    Args:
        aliases: For each tensor here all its names; the key is one of them.
        saved: The checkpoint's names.
        given: Those of them that the user chose. One that fits as it is is meant as it is, and
            says nothing about a prefix of the others.
    """
    known = set(saved)
    own = {alias for names in aliases.values() for alias in names}
    exact = own & set(given)
    prefixed = _prefix_map(own - exact, known - exact)

    def partner(alias: str) -> str | None:
        theirs = alias if alias in exact else prefixed(alias)
        return theirs if theirs in known and (alias in exact or theirs not in exact) else None

    pairs: dict[str, str] = {}
    for name, others in aliases.items():
        for alias in (name, *sorted(set(others) - {name})):
            theirs = partner(alias)
            if theirs is not None:
                pairs[name] = theirs
                break
    partners = set(pairs.values())
    every = {partner(alias) for alias in own}
    return Pairing(
        saved=pairs,
        missing=tuple(name for name in aliases if name not in pairs),
        unexpected=tuple(name for name in saved if name not in partners),
        repeated=frozenset((known & every) - partners),
    )


def _prefix_map(own: set[str], saved: set[str]) -> Callable[[str], str]:
    """Find the prefix by which most names of the one side become names of the other.

    It is looked for only when no name fits as it is, and taken only when it is the single best
    one and fits more than half of the smaller side: nothing is paired by a coincidence of names.
    """
    if own & saved:
        return lambda name: name
    # (prefix, True): the checkpoint has it in front; (prefix, False): the model has.
    fits: Counter[tuple[str, bool]] = Counter()
    for theirs, ours, in_front in ((saved, own, True), (own, saved, False)):
        for name in theirs:
            parts = name.split(".")
            for cut in range(1, len(parts)):
                if ".".join(parts[cut:]) in ours:
                    fits[".".join(parts[:cut]) + ".", in_front] += 1
    best = fits.most_common(2)
    if not best or (len(best) == 2 and best[0][1] == best[1][1]):
        return lambda name: name
    (prefix, in_front), count = best[0]
    if 2 * count <= min(len(own), len(saved)):
        return lambda name: name
    if in_front:
        return lambda name: prefix + name
    return lambda name: name.removeprefix(prefix)


def listed(names: Iterable[str], limit: int = 20) -> str:
    """Write names, which may come from a file, on one line: at most `limit` of them."""
    ordered = list(names)
    shown = ", ".join(map(_printable, ordered[:limit])) or "none"
    return shown if len(ordered) <= limit else f"{shown} and {len(ordered) - limit} more"


def _printable(name: str) -> str:
    text = "".join(char if char.isprintable() else "?" for char in name)
    return text if len(text) <= 200 else f"{text[:197]}..."
