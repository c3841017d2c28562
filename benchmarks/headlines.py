"""README's table: calls that a user would recognise, on one GPU and of one commit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .plot import comparison, markdown
from .recorded import Key, PeerRun, Peers, known_cases, work_of
from .tree import spec
from .work import DIRECTIONS, directions

COLUMNS = (
    "bfloat16",
    *(name for way in DIRECTIONS for name in (f"{way}, of the roof", "fastest peer's time over ours")),
)


class Headline(NamedTuple):
    """A row, and the case that it shows."""

    title: str
    operator: str
    case: str  # Case.id

    @property
    def keys(self) -> list[Key]:
        """Its directions."""
        operator, case = spec.OPERATORS[self.operator], known_cases(self.operator)[self.case]
        return [Key(self.operator, self.case, direction) for direction in directions(operator, case)]


HEADLINES = (
    Headline("causal attention, 8192 tokens, D = 128", "flash_attention", "s8192b2d128causal-bfloat16"),
    Headline("causal attention, 8192 tokens, D = 64", "flash_attention", "s8192b2d64causal-bfloat16"),
    Headline("causal attention, 4096 tokens, D = 256", "flash_attention", "s4096b2d256causal-bfloat16"),
    Headline("causal attention, 64 heads over 8, 8192 tokens", "flash_attention", "s8192gqa8causal-bfloat16"),
    Headline("causal attention, window of 1024, 16,384 tokens", "flash_attention", "s16384window-bfloat16"),
    Headline("attention with softcap, 4096 tokens", "flash_attention", "s4096softcap-bfloat16"),
    Headline("decoding, 16,384 keys", "flash_attention", "sq1sk16384gqa8-bfloat16"),
    Headline("causal attention, 32 packed sequences", "flash_attention_varlen", "varlen_b32-bfloat16"),
    Headline("retention, 8192 tokens, D = 128", "retention", "b2s8192d128-bfloat16"),
    Headline("matmul, 4096 x 4096 x 4096", "matmul", "square4096-bfloat16"),
    Headline("rope, 4 x 8192 tokens", "rope", "b4s8192-bfloat16"),
    Headline("rms_norm, 32,768 x 4096", "rms_norm", "rows32768x4096-bfloat16"),
    Headline("layer_norm, 32,768 x 4096", "layer_norm", "rows32768x4096-bfloat16"),
    Headline("softmax, 32,768 x 4096", "softmax", "rows32768x4096-bfloat16"),
    Headline("lion, 268 M parameters", "lion", "params268m-bfloat16"),
)


class Source(NamedTuple):
    """Where numbers come from."""

    device: str
    commit: str


def runs_of(headline: Headline, peers: Mapping[str, Peers]) -> dict[Key, PeerRun]:
    """The runs that timed a row, by its directions."""
    runs = peers[headline.operator].runs if headline.operator in peers else {}
    return {key: runs[key] for key in headline.keys if key in runs and comparison(key, peers)}


def source_of(peers: Mapping[str, Peers]) -> Source | None:
    """Return the GPU and commit that timed most rows, of several the latest. None if none did."""
    found: dict[Source, list[str]] = {}
    for headline in HEADLINES:
        for run in runs_of(headline, peers).values():
            found.setdefault(Source(run.device, run.commit), []).append(run.day)
    return max(found, key=lambda source: (len(found[source]), max(found[source])), default=None)


def table(peers: Mapping[str, Peers]) -> str:
    """The rows of one GPU and commit. Rows that another run timed are left out."""
    source, rows, days = source_of(peers), [], set()
    for headline in HEADLINES:
        timed = {key: run for key, run in runs_of(headline, peers).items() if Source(run.device, run.commit) == source}
        if timed:
            ways = {key.direction: key for key in timed}
            rows.append((headline.title, *(cell for way in DIRECTIONS for cell in _cells(ways.get(way), peers))))
            days |= {run.day for run in timed.values()}
    if source is None:
        return "\n".join(markdown(COLUMNS, rows))
    short = next(run.short for peer in peers.values() for run in peer.runs.values() if run.commit == source.commit)
    caption = f"On one {source.device}, {' to '.join(dict.fromkeys((min(days), max(days))))}, commit `{short}`."
    return "\n".join([*markdown(COLUMNS, rows), "", caption])


def _cells(key: Key | None, peers: Mapping[str, Peers]) -> tuple[str, str]:
    """Rate and share of the roof; the fastest peer."""
    measured = comparison(key, peers) if key else None
    if key is None or measured is None:
        return "–", "–"
    work = work_of(key)
    rate = f"{work.rate(measured.seconds):.3g} {work.unit}{f', {measured.share:.0%}' if measured.share else ''}"
    return rate, f"{measured.ratio:.2f}, {measured.peer}" if measured.ratio else "–"
